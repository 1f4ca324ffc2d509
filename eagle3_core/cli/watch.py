"""Draw what a run is doing: one line a job, with rate, loss and ETA; plain lines where there is no terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from eagle3_core.artifacts import Ref
from eagle3_core.errors import Eagle3Error
from eagle3_core.progress import describe


class ConsoleWatcher:
    """A live bar for the running job; one line for each that ended."""

    def __init__(self, console: Console) -> None:
        """Draw on `console`."""
        self._console = console
        self._task: TaskID | None = None
        self._said = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            TimeElapsedColumn(),
            console=console,
            transient=True,
        )

    def __enter__(self) -> Self:
        """Start drawing."""
        if self._console.is_terminal:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        self._bar.stop()

    def started(self, title: str) -> None:
        """Show a new job."""
        self._clear()
        self._task = self._bar.add_task(title, total=None)

    def progress(self, title: str, state: Mapping[str, Any]) -> None:
        """Show the job's latest progress."""
        if self._task is not None:
            self._bar.update(
                self._task, description=f"{title}: {describe(state).partition(': ')[2]}",
                total=state.get("total"), completed=state.get("done", 0),
            )  # fmt: skip
        if not self._console.is_terminal and ("phase" in state or time.monotonic() - self._said > 10):
            self._said = time.monotonic()
            self._console.print(describe(state), soft_wrap=True)

    def ended(self, title: str, ref: Ref, seconds: float) -> None:
        """Show the job's figures."""
        self._clear()
        facts = ", ".join(
            f"{name} {value}" for name, value in ref.facts.items() if isinstance(value, int | float | str)
        )
        self._console.print(f"[green]done[/] {title} in {seconds:.0f} s: {facts or ref.key}", soft_wrap=True)

    def stopping(self, title: str) -> None:
        """Show that the job is being ended."""
        self._console.print(f"[yellow]ending[/] {title}, which may save first", soft_wrap=True)

    def retrying(self, title: str, error: Eagle3Error, attempt: int) -> None:
        """Show why the job runs again."""
        self._console.print(f"[yellow]again[/] {title} (attempt {attempt} failed: {error})", soft_wrap=True)

    def _clear(self) -> None:
        if self._task is not None:
            self._bar.remove_task(self._task)
            self._task = None
