"""torchrun, dying with its parent: `python -m eagle3_core.train.agent PARENT_PID NPROC REQUEST [MEETING...]`."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence

from eagle3_core.jobs.processes import die_with_parent

ALONE = ("--standalone", "--local-addr", "127.0.0.1")
"""A single machine's rendezvous stays on the loopback, whatever the host is called."""


def torchrun_arguments(nproc: int, request: str, agent: int, meeting: Sequence[str] = ()) -> tuple[str, ...]:
    """Return torchrun's arguments on this machine; `meeting` says where it meets those of others."""
    ranks = ("--nproc-per-node", str(nproc), "-m", "eagle3_core.train.worker", str(agent), request)
    return (*(meeting or ALONE), *ranks)


def main(argv: list[str]) -> None:
    """Become torchrun."""
    die_with_parent(int(argv[0]))
    from torch.distributed.run import main as torchrun

    torchrun(torchrun_arguments(int(argv[1]), argv[2], os.getpid(), argv[3:]))


if __name__ == "__main__":
    main(sys.argv[1:])
