"""Who a process is, which processes belong to a job, and how to end all of them. Linux; standard library only."""

from __future__ import annotations

import ctypes
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

MARK = "EAGLE3_JOB"
"""Environment variable that every process of a job inherits; its value is the job's directory."""

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Identity:
    """A process, not to be mistaken for a later one with the same number."""

    pid: int
    starttime: str
    boot_id: str

    @classmethod
    def of(cls, pid: int) -> Identity | None:
        """Return who `pid` is now, or None if it does not run."""
        started = _starttime(pid)
        return None if started is None else cls(pid, started, _boot_id())

    def alive(self) -> bool:
        """Tell whether this very process still runs; a zombie does not."""
        return self.boot_id == _boot_id() and _starttime(self.pid) == self.starttime


def become_subreaper() -> None:
    """Adopt grandchildren that lose their parent, so that none escapes the sweep."""
    _libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to kill this process when `parent` dies; call it in the new child."""
    _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent:
        os._exit(1)


def members(job: Path) -> list[int]:
    """Return every live process of the job but this one, whatever session it moved to."""
    return marked(f"{MARK}={job}")


def marked(setting: str) -> list[int]:
    """Return every live process but this one that has `NAME=value` in its environment."""
    wanted = setting.encode()
    return [pid for pid in _pids() if pid != os.getpid() and wanted in _environ(pid) and _starttime(pid)]


def children(pid: int) -> list[int]:
    """Return the live direct children of a process."""
    return [other for other in _pids() if _parent(other) == pid and _starttime(other)]


def sweep(job: Path) -> int:
    """Kill every process of the job but this one; return how many there were."""
    return kill_marked(f"{MARK}={job}")


def kill_marked(setting: str, patience_s: float = 10.0) -> int:
    """Kill every process but this one that has `NAME=value` in its environment; return how many there were.

    Repeats until none is found, since a process may fork while it is being killed.
    """
    killed: set[int] = set()
    end = time.monotonic() + patience_s
    while (found := marked(setting)) and time.monotonic() < end:
        for pid in found:
            _kill(pid)
        killed.update(found)
        time.sleep(0.05)
    return len(killed)


def kill_children() -> None:
    """Kill what this process adopted and what dropped the mark from its environment."""
    for pid in children(os.getpid()):
        _kill(pid)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _pids() -> Iterator[int]:
    return (int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit())


def _environ(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:  # gone, or another user's
        return []


def _stat(pid: int) -> list[str]:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    return text.rpartition(")")[2].split()


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return int(fields[1]) if fields else None


def _starttime(pid: int) -> str | None:
    fields = _stat(pid)
    return None if not fields or fields[0] in "ZX" else fields[19]


def _boot_id() -> str:
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
