"""Run the stages of one RunConfig in order, without a scheduler: same jobs, same artifacts, same resume as Airflow."""

from __future__ import annotations

import contextlib
import datetime
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol, Self

from eagle3_core import jobs
from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.errors import Eagle3Error, JobFencedError, NotCommittedError, Remedy
from eagle3_core.pipeline import STAGES, Stage, shape_names
from eagle3_core.releases import current_champion
from eagle3_core.storage import ObjectStore, find

RETRIES = 3


class Watcher(Protocol):
    """Sees what happens; the command line draws it."""

    def __enter__(self) -> Self:
        """Start drawing."""

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""

    def started(self, title: str) -> None:
        """A job is about to start or be re-joined."""

    def progress(self, title: str, state: Mapping[str, Any]) -> None:
        """The job reported progress."""

    def ended(self, title: str, ref: Ref, seconds: float) -> None:
        """The job's output is committed."""

    def stopping(self, title: str) -> None:
        """Somebody told this process to stop; the job is asked to end, which takes it a moment."""

    def retrying(self, title: str, error: Eagle3Error, attempt: int) -> None:
        """The job failed in a way that another attempt may cure."""


def begin(store: ObjectStore, run: RunConfig, today: datetime.date) -> RunConfig:
    """Return the configuration with what a run fixes as it begins: the champion it challenges, its window's last day.

    Raises:
        ArtifactError: the champion's release or artifacts cannot be read, or are not what was released.
    """
    return run.model_copy(update={"champion": current_champion(store, run.name), "data": run.data.at(today)})


def freeze(store: ObjectStore, run: RunConfig) -> str:
    """Write the run configuration below the root, named by content; return its key."""
    key = f"runs/{run.digest()[:24]}.json"
    if not store.exists(key):
        store.write_bytes(key, json.dumps(run.model_dump(mode="json"), indent=1, sort_keys=True).encode())
    return key


@dataclass
class PipelineRun:
    """One run in one root; `refs` fills as stages end."""

    store: ObjectStore
    run: RunConfig
    watcher: Watcher
    owner: str
    refs: dict[Kind, Ref] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Freeze the configuration and what it challenges."""
        self.run = begin(self.store, self.run, datetime.datetime.now(datetime.UTC).date())
        self.run_key = freeze(self.store, self.run)

    def execute(self, stage: Stage) -> Ref:
        """Run a stage, every element of it if it is fanned out, and remember its output.

        Raises:
            NotCommittedError: an input stage has not run.
            Eagle3Error: the stage failed and no further attempt helps.
            KeyboardInterrupt: came from outside; the stage's job has ended, unless it was somebody else's by then.
        """
        for _, kind in stage.inputs:
            self.require(kind)
        for index, label in self._elements(stage):
            title = stage.name if index is None else f"{stage.name} {label}"
            self.refs[stage.produces] = self._attempts(stage, index, title)
        return self.refs[stage.produces]

    def recall(self, stage: Stage) -> Ref | None:
        """Return the stage's output if its job has succeeded and is still committed; start nothing."""
        if any(kind not in self.refs for _, kind in stage.inputs):
            return None
        ref = None
        for index, _ in self._elements(stage):
            ref = jobs.committed_result(self._spec(stage, index), self.store)
            if ref is None:
                return None
        if ref is not None:
            self.refs[stage.produces] = ref
        return ref

    def require(self, kind: Kind) -> Ref:
        """Return an output of this run.

        Raises:
            NotCommittedError: names the stage to run first.
        """
        if kind not in self.refs:
            maker = next(stage.name for stage in STAGES.values() if stage.produces == kind)
            raise NotCommittedError(f"expected a {kind} of this run, found none; run `eagle3 {maker}` first")
        return self.refs[kind]

    def _elements(self, stage: Stage) -> Iterator[tuple[int | None, str]]:
        if stage.fan_out == "shards":
            total = int(self.refs[Kind.SHARD_PLAN].facts["num_shards"])
            yield from ((index, f"{index + 1}/{total}") for index in range(total))
        elif stage.fan_out == "shapes":
            yield from enumerate(shape_names(self.run))
        else:
            yield None, ""

    def _spec(self, stage: Stage, index: int | None) -> jobs.JobSpec:
        inputs = {name: self.refs[kind] for name, kind in stage.inputs}
        return jobs.stage_job(self.store.root, self.run_key, stage.name, inputs, index)

    def _attempts(self, stage: Stage, index: int | None, title: str) -> Ref:
        spec = self._spec(stage, index)
        always = stage.always
        if not always and (ref := jobs.committed_result(spec, self.store)) is not None:
            return ref
        for attempt in range(1, RETRIES + 2):
            started = time.monotonic()
            self.watcher.started(title)
            try:
                job = jobs.start_or_join(spec, self.owner, always=always or attempt > 1)
                ref = jobs.wait(job, on_progress=self._reporter(title))
            except KeyboardInterrupt:
                self.watcher.stopping(title)
                with contextlib.suppress(FileNotFoundError, JobFencedError):  # it had not begun; it is somebody else's
                    jobs.kill(spec.directory, self.owner)
                raise
            except Eagle3Error as error:
                if error.remedy is Remedy.FIX or attempt > RETRIES:
                    raise
                self.watcher.retrying(title, error, attempt)
                continue
            if find(self.store, ref.key) is not None:
                self.watcher.ended(title, ref, time.monotonic() - started)
                return ref
        raise NotCommittedError(f"{title}: the job reports success but nothing is committed; see {spec.directory}/log")

    def _reporter(self, title: str) -> Callable[[Mapping[str, Any]], None]:
        return lambda state: self.watcher.progress(title, state)
