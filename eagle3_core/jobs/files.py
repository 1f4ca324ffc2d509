"""The files of a job directory, and how they are read and written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

COMMAND = "command.json"
SUPERVISOR = "supervisor.json"
OWNER = "owner"
LEASE = "lease"
LOCK = "lock"
LOG = "log"
EXIT = "exit.json"
RESULT = "result.json"
ERROR = "error.json"
PROGRESS = "progress.json"

OF_ONE_ATTEMPT = (SUPERVISOR, EXIT, RESULT, ERROR, PROGRESS)
"""Removed before a new attempt; `work/` and the log stay."""

LEASE_EXPIRED, SILENT, TERMINATED = 124, 125, 143
"""Codes in exit.json for a command that its supervisor ended."""


def read_json(path: Path) -> dict[str, Any] | None:
    """Return the JSON object, or None if the file is absent; writers replace these files whole."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None
    assert isinstance(values, dict), path
    return values


def write_json(path: Path, values: dict[str, Any]) -> None:
    """Write or replace the file whole."""
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_text(json.dumps(values), encoding="utf-8")
    temp.replace(path)
