"""torchrun as a child that dies with its parent: `python -m eagle3_core.train.agent PARENT_PID NPROC REQUEST`."""

from __future__ import annotations

import os
import sys

from eagle3_core.jobs.processes import die_with_parent


def torchrun_arguments(nproc: int, request: str, agent: int) -> tuple[str, ...]:
    """Return torchrun's arguments for one host; the rendezvous stays on the loopback, whatever the host is called."""
    return (
        "--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(nproc),
        "-m", "eagle3_core.train.worker", str(agent), request,
    )  # fmt: skip


def main(argv: list[str]) -> None:
    """Become torchrun."""
    die_with_parent(int(argv[0]))
    from torch.distributed.run import main as torchrun

    torchrun(torchrun_arguments(int(argv[1]), argv[2], os.getpid()))


if __name__ == "__main__":
    main(sys.argv[1:])
