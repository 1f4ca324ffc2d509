"""Read SGLang's log: which phase a start is in, and the one line that says why it failed."""

from __future__ import annotations

import os
import re
from pathlib import Path

_PHASES = (
    ("Load weight begin", "engine: loading weights"),
    ("Load weight end", "engine: weights loaded"),
    ("KV Cache is allocated", "engine: KV cache allocated"),
    ("Capture cuda graph begin", "engine: capturing CUDA graphs"),
    ("Uvicorn running on", "engine: answering"),
)
_ERROR = re.compile(r"^(?:\[[^\]]*\]\s*)?(?:[A-Za-z_][\w.]*\.)?[A-Z]\w*(?:Error|Exception|Interrupt)\b.*")
_NOISE = re.compile(r"^\s*$|^\s+|^Traceback|^\s*File |^During handling|SIGQUIT|SIGTERM|^=+|^-+$")
_LONGEST = 600
_OUT_OF_MEMORY = re.compile(r"out of memory|OutOfMemoryError|CUDA error: out of memory", re.IGNORECASE)
_TOO_LITTLE_LEFT = re.compile(r"Not enough memory.*mem-fraction-static", re.IGNORECASE)


class OpenLog:
    """A log that one start appends to, held open: what is written there is known even where the file was removed."""

    def __init__(self, path: Path) -> None:
        """Open it, made if absent; what earlier starts wrote is skipped."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("a+b", buffering=0)
        self._from = self.size

    @property
    def size(self) -> int:
        """Return how long it is, in bytes."""
        return os.fstat(self._file.fileno()).st_size

    @property
    def removed(self) -> bool:
        """Whether no directory names it any more."""
        return os.fstat(self._file.fileno()).st_nlink == 0

    def text(self) -> str:
        """Return what this start has written so far."""
        return os.pread(self._file.fileno(), self.size - self._from, self._from).decode(errors="replace")

    def last_words(self) -> str:
        """Return the line that says most about an end, and where to read on; known after `close` too."""
        if self._file.closed:
            return self._said
        where = f"{self.path}, which was removed" if self.removed else self.path
        return f"last log line: {last_reason(self.text())} [{where}]"

    def close(self) -> None:
        """Let it go."""
        self._said = self.last_words()
        self._file.close()


def phases(text: str) -> list[str]:
    """Return the phases a log shows, in the order of a start."""
    return [phase for needle, phase in _PHASES if needle in text]


def memory_advice(text: str) -> str:
    """Return what to change where a log says that memory was the trouble, else nothing.

    The two complaints pull the same flag in opposite directions; smaller graphs and fewer requests help against both.
    """
    smaller = "lower cuda-graph-max-bs-decode or serving.max_running_requests first"
    if _TOO_LITTLE_LEFT.search(text):
        return f"weights leave no room for a KV cache: {smaller}, then raise mem-fraction-static in serving.engine_args"
    if _OUT_OF_MEMORY.search(text):
        return f"the GPU ran out of memory: {smaller}, then lower mem-fraction-static in serving.engine_args"
    return ""


def last_reason(text: str) -> str:
    """Return the last line that names an error, else the last line that says anything."""
    lines = text.splitlines()[-400:]
    errors = [line for line in lines if _ERROR.match(line)]
    told = errors or [line for line in lines if not _NOISE.search(line)] or ["its log is empty"]
    return " ".join(told[-1].split())[:_LONGEST]
