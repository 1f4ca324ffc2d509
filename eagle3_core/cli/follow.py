"""Follow one DAG run: what each stage does now, from Airflow's task states and the jobs' own progress files."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console, RenderableType
from rich.live import Live
from rich.table import Table

from eagle3_core.cli.airflow_api import Api
from eagle3_core.cli.airflow_local import AirflowError
from eagle3_core.jobs.files import COMMAND, ERROR, EXIT, PROGRESS, TERMINATED, read_json
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import describe

ENDED = ("success", "failed")
_PLAIN_EVERY_S = 15.0
_HEALTH_EVERY_S = 30.0
_MARKS = {"success": "[green]done[/]", "running": "[cyan]running[/]", "failed": "[red]failed[/]",
          "up_for_retry": "[yellow]again soon[/]", "upstream_failed": "[dim]not reached[/]",
          "skipped": "[dim]skipped[/]"}  # fmt: skip


@dataclass
class StageView:
    """One line of the display: a task, all its mapped instances together."""

    name: str
    states: list[str] = field(default_factory=list)
    elements: list[tuple[int, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)

    @property
    def state(self) -> str:
        """Return the state that matters most to whoever watches."""
        for state in ("failed", "running", "up_for_retry", "upstream_failed"):
            if state in self.states:
                return state
        if self.states and set(self.states) <= {"success", "skipped"}:
            return "success" if "success" in self.states else "skipped"
        return "waiting"

    @property
    def mapped(self) -> bool:
        """Tell whether the task has several instances."""
        return any(index >= 0 for index, _ in self.elements)

    def running(self) -> list[int]:
        """Return the map indexes that run now; -1 for a task that is not mapped."""
        return [index for index, state in self.elements if state == "running"]

    def count(self) -> str:
        """Return for example `3 of 12 shards done`."""
        if not self.mapped:
            return ""
        done = sum(state in ("success", "skipped") for _, state in self.elements)
        word = {"capture": "shard", "evaluate": "shape"}.get(self.name, "element")
        return f"{done} of {len(self.elements)} {word}s done"


def stage_views(instances: Iterable[Mapping[str, Any]]) -> list[StageView]:
    """Return the stages of a run in order, from the task instances of Airflow's API."""
    views = {name: StageView(name) for name in STAGES}
    for instance in instances:
        view = views.get(instance["task_id"])
        if view is not None:
            state = instance["state"] or "waiting"
            view.states.append(state)
            view.elements.append((int(instance["map_index"]), state))
    return list(views.values())


class Follower:
    """Draws a DAG run until it has ended: a live table in a terminal, lines elsewhere."""

    def __init__(self, api: Api, console: Console, dag_id: str, run_id: str, jobs_directory: Path) -> None:
        """Follow `run_id`; read progress below `jobs_directory`."""
        self._api, self._console, self._jobs = api, console, jobs_directory
        self._path = f"dags/{dag_id}/dagRuns/{run_id}"
        self._started = time.monotonic()
        self._said: dict[str, str] = {}
        self._said_at = 0.0

    def follow(self) -> str:
        """Return the final state of the run.

        Raises:
            AirflowError: the API or the scheduler is gone.
        """
        if not self._console.is_terminal:
            return self._until_ended(self._say_changes)
        with Live(console=self._console, refresh_per_second=4, transient=False) as live:
            return self._until_ended(lambda views: live.update(self._table(views)))

    def _until_ended(self, show: Callable[[list[StageView]], None]) -> str:
        checked = time.monotonic()
        while True:
            state = str(self._api.get(self._path)["state"])
            show(stage_views(self.instances()))
            if state in ENDED:
                return state
            if time.monotonic() - checked > _HEALTH_EVERY_S:
                checked = time.monotonic()
                self._check_scheduler()
            time.sleep(1.0)

    def _check_scheduler(self) -> None:
        """Raise if no scheduler is at work: nothing would ever happen again."""
        if self._api.get("monitor/health")["scheduler"]["status"] != "healthy":
            raise AirflowError("Airflow's scheduler has not been heard of for a while")

    def instances(self) -> list[dict[str, Any]]:
        """Return all task instances of the run."""
        found = self._api.get(f"{self._path}/taskInstances", limit=2000)["task_instances"]
        return [dict(item) for item in found]

    def _table(self, views: list[StageView]) -> RenderableType:
        table = Table("stage", "state", "what", box=None, pad_edge=False, expand=True)
        for view in views:
            table.add_row(view.name, _MARKS.get(view.state, f"[dim]{view.state}[/]"), self._what(view))
        table.caption = f"{time.monotonic() - self._started:,.0f} s"
        table.caption_justify = "left"
        return table

    def _say_changes(self, views: list[StageView]) -> None:
        elapsed = f"{time.monotonic() - self._started:6,.0f} s"
        for view in views:
            line = f"{view.state} {view.count()}".strip()
            if view.state != "waiting" and self._said.get(view.name) != line:
                self._said[view.name] = line
                self._console.print(f"{elapsed}  {view.name}: {line}", soft_wrap=True)
        if time.monotonic() - self._said_at > _PLAIN_EVERY_S:
            self._said_at = time.monotonic()
            for view in views:
                if view.state == "running" and (what := self._progress(view)):
                    self._console.print(f"{elapsed}  {view.name}: {what}", soft_wrap=True)

    def _what(self, view: StageView) -> str:
        return ", ".join(part for part in (view.count(), self._progress(view)) if part)

    def _progress(self, view: StageView) -> str:
        if view.state != "running":
            return ""
        shown = [describe(state).partition(": ")[2] for index in view.running()[:2]
                 if (state := self._latest(view.name, index)) is not None]  # fmt: skip
        return "; ".join(shown)

    def _latest(self, stage: str, index: int) -> dict[str, Any] | None:
        directory = newest_job(self._jobs, stage, index)
        if directory is None or (directory / EXIT).exists():
            return None
        return read_json(directory / PROGRESS)


def newest_job(directory: Path, stage: str, index: int) -> Path | None:
    """Return the job of a stage that was started last; `index` is -1 for a stage that is not fanned out."""
    pattern = f"{stage}-{index:05d}-*" if index >= 0 else f"{stage}-*"
    found = [path for path in directory.glob(pattern) if (path / COMMAND).exists()]
    return max(found, key=lambda path: (path / COMMAND).stat().st_mtime, default=None)


@dataclass(frozen=True)
class Failure:
    """What stopped a run: the task, one line, and where to read more."""

    task: str
    line: str
    log: str


def failure(api: Api, run_path: str, instances: Iterable[Mapping[str, Any]], directory: Path, home: Path) -> Failure:
    """Explain a failed run by its first failed task."""
    failed = sorted((item for item in instances if item["state"] == "failed"), key=lambda item: item["end_date"] or "")
    if not failed:
        return Failure("(none)", "the run was failed from outside", str(home / "standalone.log"))
    first = failed[0]
    task, index = first["task_id"], int(first["map_index"])
    title = task if index < 0 else f"{task} {first.get('rendered_map_index') or index}"
    job = newest_job(directory, task, index) if task in STAGES else None
    if job is not None and (error := read_json(job / ERROR)) is not None:
        return Failure(title, f"[{error['type']}] {error['message']}", str(job / "log"))
    if job is not None and (read_json(job / EXIT) or {}).get("code") == TERMINATED:
        return Failure(title, "ended on request: marked failed, or Airflow was stopped", str(job / "log"))
    line = _logged_error(api, f"{run_path}/taskInstances/{task}", first) or "see the log"
    return Failure(title, line, str(job / "log" if job else home / "logs"))


def _logged_error(api: Api, path: str, instance: Mapping[str, Any]) -> str:
    """Return the last exception in the task's own log."""
    answer = api.find(f"{path}/logs/{instance['try_number']}?map_index={instance['map_index']}") or {}
    for event in reversed(answer.get("content") or []):
        details = event.get("error_detail") if isinstance(event, dict) else None
        if details:
            return " ".join(str(details[0]["exc_value"]).split())
    return ""
