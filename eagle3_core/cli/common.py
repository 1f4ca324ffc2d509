"""Options and error handling that the commands share."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from eagle3_core.config import RunConfig
from eagle3_core.config.recipes import load_recipe, parse_override
from eagle3_core.errors import EXIT_CODES, Eagle3Error, InputError, Remedy
from eagle3_core.storage import ObjectStore, open_store
from eagle3_core.storage.scan import OnBytes

console = Console(stderr=True, highlight=False)
"""Progress and remarks."""
output = Console(highlight=False, width=None if sys.stdout.isatty() else 200)
"""Results; a pipe has no width of its own."""

Recipe = Annotated[
    str, typer.Argument(help="Name of a checked-in recipe (demo, own, smollm2, production) or a YAML file.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Option("--set", "-s", help="Override one key: training.learning_rate=3e-5. Repeatable.", metavar="KEY=VALUE"),
]
Root = Annotated[
    str,
    typer.Option("--root", help="Where artifacts live: a directory or s3://bucket/prefix.", envvar="EAGLE3_ROOT"),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object for scripts.")]
DEFAULT_ROOT = ".eagle3/store"
GOES_ON = "run the same again, it goes on where it was"
"""What a run says that was told to stop."""
NOT_PUBLISHED = 3
"""Exit code of a run that went well and whose drafter did not become the champion."""


def configured(recipe: str, overrides: list[str] | None) -> RunConfig:
    """Return the recipe with the overrides applied."""
    return load_recipe(recipe, dict(parse_override(text) for text in overrides or []))


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """Turn our own errors, and paths that cannot be read or written, into one line and the remedy's exit code."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        print(f"error: {error.filename or 'system'}: {error.strerror or error}; give another path", file=sys.stderr)
        raise typer.Exit(EXIT_CODES[Remedy.FIX]) from None
    except Eagle3Error as error:
        message = " ".join(str(error).split())
        print(f"error: [{type(error).__name__}] {message}", file=sys.stderr)
        raise typer.Exit(EXIT_CODES[error.remedy]) from None


@contextlib.contextmanager
def told_to_stop(said: str) -> Iterator[None]:
    """Let SIGTERM end the block as ctrl-C does, by KeyboardInterrupt; print `said` then.

    The exit code is 143 or 130, 128 and the signal's number.
    """
    came: list[int] = []

    def interrupt(number: int, _frame: object) -> None:
        came.append(number)
        raise KeyboardInterrupt

    previous = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    except KeyboardInterrupt:
        print(f"stopped: {said}", file=sys.stderr)
        raise typer.Exit(128 + (came or [signal.SIGINT])[-1]) from None
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextlib.contextmanager
def byte_bar(title: str, total: int) -> Iterator[OnBytes]:
    """Draw a bar with bytes a second on a terminal; say nothing elsewhere."""
    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), DownloadColumn(), TransferSpeedColumn(),
               TimeRemainingColumn())  # fmt: skip
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task(title, total=total)
        yield lambda count: progress.update(task, advance=count)


def existing_store(root: str) -> ObjectStore:
    """Open a root to look at it; a directory that is not there is a typing error, not an empty root.

    Raises:
        InputError: there is no such directory.
    """
    if "://" not in root and not Path(root).is_dir():
        raise InputError(f"root {root}: expected an existing directory, found none; check --root or EAGLE3_ROOT")
    return open_store(root)


def print_json(values: Any) -> None:
    """Print one JSON object on stdout."""
    print(json.dumps(values, sort_keys=True))


def owner() -> str:
    """Return who owns the jobs this process starts."""
    return f"cli-{os.getpid()}"


def human_bytes(count: float) -> str:
    """Return for example `5.0 TB` (decimal, as disks are sold)."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB"):
        if count < 1000 or unit == "PB":
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError("unreachable")
