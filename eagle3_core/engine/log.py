"""Read SGLang's log: which phase a start is in, and the one line that says why it failed."""

from __future__ import annotations

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


def last_reason(path: Path) -> str:
    """Return the last line that names an error, else the last line that says anything."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-400:]
    except OSError:
        return "no log was written"
    errors = [line for line in lines if _ERROR.match(line)]
    told = errors or [line for line in lines if not _NOISE.search(line)] or ["its log is empty"]
    return " ".join(told[-1].split())[:_LONGEST]
