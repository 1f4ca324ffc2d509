"""`python -m eagle3_core.jobs.supervisor DIRECTORY`: run one job's command, and leave nothing behind when it ends.

The supervisor is a session of its own, so it outlives whoever started it; its lease bounds for how long.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from eagle3_core.jobs.files import (
    COMMAND,
    EXIT,
    LEASE,
    LEASE_EXPIRED,
    PROGRESS,
    SILENT,
    TERMINATED,
    read_json,
    write_json,
)
from eagle3_core.jobs.processes import become_subreaper, die_with_parent, kill_children, sweep

_SIGNALS = (signal.SIGCHLD, signal.SIGTERM)


class Lease:
    """Expires when nobody has written any of some files for `seconds` of this process's own running time.

    A laptop that slept, or a whole machine that was stopped, loses nothing: gaps between looks do not count.
    """

    def __init__(self, files: Sequence[Path | int], seconds: float) -> None:
        """Watch the modification times of `files`, which are paths or open descriptors."""
        self._files, self._seconds = files, seconds
        self._renewed = self._looked = time.monotonic()
        self._stamps = self._mtimes()

    def _mtimes(self) -> list[int]:
        return [_written_ns(file) for file in self._files]

    def expired(self) -> bool:
        """Look once."""
        now = time.monotonic()
        self._renewed += max(0.0, now - self._looked - 5.0)
        self._looked = now
        if (stamps := self._mtimes()) != self._stamps:
            self._stamps, self._renewed = stamps, now
        return now - self._renewed > self._seconds


def _written_ns(file: Path | int) -> int:
    with contextlib.suppress(FileNotFoundError):
        return os.stat(file).st_mtime_ns  # noqa: PTH116 - of a descriptor, too
    return 0


def main(directory: Path) -> int:
    """Run the command to its end, sweep, record the exit code."""
    for descriptor in [int(name) for name in os.listdir("/proc/self/fd") if int(name) > 2]:  # noqa: PTH208
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed already
            os.close(descriptor)
    command = read_json(directory / COMMAND)
    assert command is not None, directory
    become_subreaper()
    # Blocked and waited for by sigtimedwait: no handler runs in the middle of anything.
    signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
    sweep(directory)
    _say(f"attempt {command['attempt']}: {' '.join(command['argv'])}")
    code = _run(directory, command)
    sweep(directory)
    kill_children()
    if code != 0:
        _say(f"ended with code {code}")
    write_json(directory / EXIT, {"code": code, "attempt": command["attempt"], "at": time.time()})
    return code


def _run(directory: Path, command: dict[str, Any]) -> int:
    lease = Lease([directory / LEASE], command["lease_s"])
    # A write that never returns, a server that hangs: whatever it is, the job shows no sign of life.
    # The log is our own stdout: it grows even where its name was removed.
    life = Lease([sys.stdout.fileno(), directory / PROGRESS], command["silence_s"])
    parent = os.getpid()

    def in_child() -> None:
        die_with_parent(parent)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())

    child = subprocess.Popen(
        command["argv"], cwd=command["cwd"], stdin=subprocess.DEVNULL, preexec_fn=in_child, start_new_session=True
    )
    while True:
        received = signal.sigtimedwait(_SIGNALS, 1.0)
        if (code := _reaped(child.pid)) is not None:
            return code
        if received is not None and received.si_signo == signal.SIGTERM:
            _say("asked to end")
            _terminate(child.pid, command["grace_s"])
            return TERMINATED
        if lease.expired():
            _say(f"nobody renewed the lease for {command['lease_s']:.0f} s, ending")
            _terminate(child.pid, command["grace_s"])
            return LEASE_EXPIRED
        if life.expired():
            _say(f"no line in its log and no progress for {command['silence_s']:.0f} s, ending")
            _terminate(child.pid, command["grace_s"])
            return SILENT


def _reaped(child: int) -> int | None:
    """Reap everything that ended, adopted orphans too; return the command's exit code if it is among them."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while (ended := os.waitpid(-1, os.WNOHANG))[0]:
            if ended[0] == child:
                code = os.waitstatus_to_exitcode(ended[1])
    return code


def _terminate(child: int, grace_s: float) -> None:
    """Ask the command to end and give it `grace_s` seconds; the sweep does the rest."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(child, signal.SIGTERM)
    end = time.monotonic() + grace_s
    while _reaped(child) is None and time.monotonic() < end:
        signal.sigtimedwait((signal.SIGCHLD,), 0.2)


def _say(text: str) -> None:
    print(f"supervisor: {text}", flush=True)  # noqa: T201


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
