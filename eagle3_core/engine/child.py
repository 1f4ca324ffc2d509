"""The server process: dies with its parent, then becomes SGLang.

Run as `python -m eagle3_core.engine.child PPID ARGV...`.

The death signal is set by the child itself: a hook between fork and exec is not safe in a process with threads.
"""

from __future__ import annotations

import ctypes
import os
import runpy
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent dies; exit at once if that has happened already."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def main(argv: list[str]) -> None:
    """Become `python -m sglang.launch_server`."""
    die_with_parent(int(argv[0]))
    sys.argv = ["sglang.launch_server", *argv[1:]]
    runpy.run_module("sglang.launch_server", run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])
