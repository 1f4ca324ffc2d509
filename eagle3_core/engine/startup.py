"""Watch a server that is starting: alive is who shows a sign of life, however long a start takes."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

from eagle3_core.engine import log as server_log
from eagle3_core.engine import processes
from eagle3_core.errors import EngineMemoryError, EngineStartError

_LOOK_FOR_PROCESSES_S = 1.0
_CGROUP_EVENTS = Path("/sys/fs/cgroup/memory.events")


class StartWatch:
    """Follows log and processes of one start; a total time limit would end slow starts that are well."""

    def __init__(self, log: server_log.OpenLog, mark: str, silence_s: float, on_phase: Callable[[str], None]) -> None:
        """Begin to watch."""
        self._log, self._mark, self._silence_s, self._on_phase = log, mark, silence_s, on_phase
        self._size = log.size
        self._shown = 0
        self._seen: set[int] = set()
        self._moved = self._looked = time.monotonic()
        self._killed_before = out_of_memory_kills()

    def look(self, exit_status: int | None) -> None:
        """Tell new phases; `exit_status` is that of the first process, None while it runs.

        Raises:
            EngineMemoryError: it ended for want of memory, which the same arguments would meet again.
            EngineStartError: it ended otherwise, or has shown no sign of life for too long.
        """
        if (size := self._log.size) != self._size:
            self._size, self._moved = size, time.monotonic()
        text = self._log.text()
        phases = server_log.phases(text)
        for phase in phases[self._shown :]:
            self._on_phase(phase)
        self._shown = len(phases)
        now = time.monotonic()
        if now - self._looked > _LOOK_FOR_PROCESSES_S:
            self._seen |= set(processes.marked(self._mark))
            self._looked = now
        if exit_status is not None:
            self._fail(f"ended with {_status(exit_status)} before it was ready", text)
        if now - self._moved > self._silence_s:
            self._fail(f"was not ready and silent for {self._silence_s:.0f} s (serving.silence_s)", text)

    def _fail(self, what: str, text: str) -> None:
        gone = sorted(pid for pid in self._seen if not processes.alive(pid))
        clues = [f"its process {gone[-1]} is gone"] if gone else []
        kills = out_of_memory_kills()
        if None not in (kills, self._killed_before) and kills != self._killed_before:
            clues.append("the kernel has killed a process here for want of memory (SIGKILL) meanwhile")
        why = "".join(f"; {clue}" for clue in clues)
        line = f"SGLang {what}{why}; {self._log.last_words()}"
        if advice := server_log.memory_advice(text):
            raise EngineMemoryError(f"{line}; {advice}")
        raise EngineStartError(line)


def out_of_memory_kills() -> int | None:
    """Return how many processes of this control group the kernel has killed for want of memory; None: not told here."""
    try:
        events = dict(line.split() for line in _CGROUP_EVENTS.read_text(encoding="utf-8").splitlines())
        return int(events["oom_kill"])
    except (OSError, ValueError, KeyError):
        return None


def _status(code: int) -> str:
    return f"signal {signal.Signals(-code).name}" if code < 0 else f"status {code}"
