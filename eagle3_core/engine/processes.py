"""A server's processes: find every one of them by a mark in its environment, and end them all."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import time
import uuid
from pathlib import Path

MARK = "EAGLE3_ENGINE"
MEMORY = Path("/dev/shm")
LOADS = "sglang_loads_"
"""How SGLang names a segment that a killed server leaves behind."""
_OURS = "eagle3-server-"
SPOOL = "eagle3-spool-"
"""How the directories of captured states are named, their owner's pid behind it."""


def marked(value: str) -> list[int]:
    """Return the living processes whose environment carries the mark; zombies count as dead."""
    needle = f"{MARK}={value}".encode()
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                carries = needle in (entry / "environ").read_bytes().split(b"\0")
            except OSError:
                continue
            if carries and alive(int(entry.name)):
                found.append(int(entry.name))
    return sorted(found)


def alive(pid: int) -> bool:
    """Return whether a process runs; a zombie does not."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")


def cpu_seconds(pids: list[int]) -> float:
    """Return the processor time that processes have used so far; those that are gone count nothing."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError, IndexError):
            fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
            ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


def kill_marked(value: str, within_s: float = 5.0) -> list[int]:
    """Kill every marked process and return those that are still there after the given time (none, as a rule)."""
    deadline = time.monotonic() + within_s
    while True:
        left = marked(value)
        if not left or time.monotonic() > deadline:
            return left
        for pid in left:
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.05)


def shared_memory(pids: list[int], prefix: str) -> set[Path]:
    """Return the files whose path begins so that the processes have mapped."""
    found = set()
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace")
        except OSError:
            continue
        found |= {Path(line.split(maxsplit=5)[5]) for line in maps.splitlines() if f" {prefix}" in line}
    return found


def note_shared_memory(memory: Path, segments: set[Path]) -> Path:
    """Write down which segments belong to this process's server; return where, to be removed with them."""
    note = memory / f"{_OURS}{os.getpid()}-{uuid.uuid4().hex[:8]}"
    # Where there is no room for it, a kill leaves a few kilobytes behind.
    with contextlib.suppress(OSError):
        note.write_text("\n".join(map(str, sorted(segments))), encoding="utf-8")
    return note


def free_shared_memory(memory: Path) -> None:
    """Remove spools and servers' segments whose owner was killed: nobody else's, and none that a process still has."""
    remove_spools(memory)
    for note in _left_by_the_dead(memory, _OURS):
        with contextlib.suppress(OSError):
            listed = {Path(line) for line in note.read_text(encoding="utf-8").splitlines()}
            everybody = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
            for segment in listed - shared_memory(everybody, f"{memory}/"):
                if segment.parent == memory and segment.name.startswith(LOADS):
                    segment.unlink(missing_ok=True)
            note.unlink()


def remove_spools(directory: Path) -> None:
    """Remove the spools of killed processes."""
    for spool in _left_by_the_dead(directory, SPOOL):
        shutil.rmtree(spool, ignore_errors=True)


def _left_by_the_dead(directory: Path, prefix: str) -> list[Path]:
    """Return what is named by `prefix` and the pid of a process that is gone."""
    owners = {path: path.name.removeprefix(prefix).split("-")[0] for path in directory.glob(f"{prefix}*")}
    return [path for path, owner in owners.items() if owner.isdigit() and not alive(int(owner))]


def free_port() -> int:
    """Return a loopback port that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def listening(port: int) -> bool:
    """Return whether somebody listens on a loopback port."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex(("127.0.0.1", port)) == 0
