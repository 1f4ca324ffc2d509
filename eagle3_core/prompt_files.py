"""The prompt files a run reads: one file, a directory, or the days of a window; checked once, named by content."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Sequence
from pathlib import Path

import eagle3_core.demo
from eagle3_core.config import RunConfig
from eagle3_core.config.base import canonical_sha256
from eagle3_core.errors import InputError
from eagle3_core.identity import DEMO, cache_directory, cached_sha256, remember
from eagle3_core.prompts import RULES, read_prompts

_DATE = re.compile(r"(?<![0-9])([0-9]{4})-?([0-9]{2})-?([0-9]{2})(?![0-9])")


def prompt_files(run: RunConfig) -> tuple[Path, ...]:
    """Return the prompt files, the oldest day first where there is a window; the word `demo` is the one that ships.

    Raises:
        InputError: there is no such file, or no day of the window has one.
    """
    shipped = Path(eagle3_core.demo.__file__).parent / "prompts.jsonl"
    path = shipped if run.data.prompts == DEMO else Path(run.data.prompts).expanduser().resolve()
    days = run.data.at(datetime.datetime.now(datetime.UTC).date()).days
    if not path.is_dir():
        if days is not None:
            raise InputError(f"data.window_days: expected a directory in data.prompts, found {path}; give a directory, "
                             "or leave data.window_days out")  # fmt: skip
        if not path.is_file():
            raise InputError(f"prompts {path}: expected a JSONL file, found none; set data.prompts")
        return (path,)
    files = sorted(path.glob("*.jsonl"))
    found = tuple(files) if days is None else _of_days(files, *days)
    if not found:
        which = "" if days is None else f" of {days[0]} to {days[1]} among {len(files)}"
        raise InputError(f"prompts {path}: expected *.jsonl files{which}, found none; set data.prompts, "
                         "data.window_days or data.until")  # fmt: skip
    return found


def _of_days(files: Sequence[Path], first: datetime.date, last: datetime.date) -> tuple[Path, ...]:
    """Return the files of these days, the oldest first."""
    dated = []
    for path in files:
        day = _day(path)
        if day is None:
            raise InputError(f"{path}: data.window_days needs a date such as 2026-11-29 in every file's name, found "
                             "none; rename it, or move it away")  # fmt: skip
        if first <= day <= last:
            dated.append((day, path))
    return tuple(path for _, path in sorted(dated))


def _day(path: Path) -> datetime.date | None:
    for year, month, day in _DATE.findall(path.stem):
        try:
            return datetime.date(int(year), int(month), int(day))
        except ValueError:
            continue
    return None


def prompts_sha256(files: Sequence[Path]) -> str:
    """Return what names the prompts by content: the file's digest, or one over those of all files in their order."""
    digests = [cached_sha256(path) for path in files]
    return digests[0] if len(digests) == 1 else canonical_sha256(digests)


def checked_prompts(files: Sequence[Path]) -> int:
    """Return the number of prompts after parsing every line; a file that has not changed is not parsed again.

    Raises:
        InputError: a file is missing, all are empty, or a line is not a prompt; names the line.
    """
    count = sum(_checked(path) for path in files)
    if not count:
        raise InputError(f"{files[-1]}: expected one prompt a line, found an empty file")
    return count


def _checked(path: Path) -> int:
    if not path.is_file():
        raise InputError(f"prompts {path}: expected a JSONL file, found none; set data.prompts")
    entry = cache_directory() / f"prompts-{RULES}" / f"{cached_sha256(path)}.json"
    try:
        return int(json.loads(entry.read_text(encoding="utf-8"))["count"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # not yet checked
    count = sum(1 for _ in read_prompts(path))
    if count:
        remember(entry, {"count": count})
    return count
