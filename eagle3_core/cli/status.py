"""`eagle3 status`: what runs, what is done, what failed."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rich.table import Table

from eagle3_core import jobs
from eagle3_core.cli.common import DEFAULT_ROOT, AsJson, Root, existing_store, one_line_errors, output, print_json
from eagle3_core.progress import FILE, describe


def status(root: Root = DEFAULT_ROOT, as_json: AsJson = False) -> None:
    """List the jobs of a root with their state and progress, newest last."""
    with one_line_errors():
        rows = list(_rows(jobs.jobs_directory(existing_store(root).root)))
        if as_json:
            print_json({"jobs": rows})
            return
        table = Table("job", "state", "what")
        for row in rows:
            table.add_row(row["job"], row["state"], row["what"])
        output.print(table if rows else f"no jobs below {root}")


def _rows(directory: Path) -> Iterator[dict[str, Any]]:
    found = [path for path in directory.glob("*") if (path / "log").exists()]
    for path in sorted(found, key=lambda item: (item / "log").stat().st_mtime):
        state = jobs.directory_state(path)
        yield {"job": path.name, "state": state.name, "what": _what(path)}


def _what(path: Path) -> str:
    for name in ("error.json", "result.json", FILE):
        try:
            values = json.loads((path / name).read_text(encoding="utf-8"))
        except (FileNotFoundError, ValueError):
            continue
        if name == "error.json":
            return f"{values['type']}: {values['message']}"
        return describe(values) if name == FILE else str(values["key"])
    return ""
