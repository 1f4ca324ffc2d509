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


def phases(text: str) -> list[str]:
    """Return the phases a log shows, in the order of a start."""
    return [phase for needle, phase in _PHASES if needle in text]


def last_reason(path: Path) -> str:
    """Return the last line that names an error, else the last line that says anything."""
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()[-400:]
    except OSError:
        return "no log was written"
    errors = [line for line in lines if _ERROR.match(line)]
    told = errors or [line for line in lines if not _NOISE.search(line)] or ["its log is empty"]
    return " ".join(told[-1].split())[:_LONGEST]
