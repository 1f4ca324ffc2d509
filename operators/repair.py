"""Find a shard plan; verify its shards by content."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from airflow.sdk import BaseOperator

from eagle3_core import jobs
from eagle3_core.artifacts import Kind, Ref
from eagle3_core.errors import ConfigError, CorruptArtifactError, Eagle3Error, NotCommittedError
from eagle3_core.jobs.files import COMMAND, RESULT, read_json
from eagle3_core.storage import ObjectStore, load, open_store
from operators import settings
from operators.base import JobOperator, as_airflow


@dataclass(frozen=True)
class PlannedRun:
    """A shard plan and the frozen run configuration that made it."""

    plan: Ref
    run_key: str
    finished_at: float


class FindPlanOperator(BaseOperator):
    """Find the shard plan to repair; return its reference, push the key of its run configuration as `run_key`.

    Args:
        key: Key of a shard plan or of a feature set below the root; empty: the plan that was made last.
        known: The parameters that a run may have: of another, misspelt, another plan than the meant one would be taken.
    """

    template_fields: Sequence[str] = ("key",)

    def __init__(self, *, key: str, known: Sequence[str], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.key, self.known = key, tuple(known)

    def execute(self, context: Any) -> dict[str, Any]:
        """Return the plan's reference.

        Raises:
            AirflowFailException: there is no such plan.
        """
        try:
            if strange := sorted(set(context["params"]) - set(self.known)):
                raise ConfigError(
                    f"parameters: expected {' or '.join(self.known)}, found {', '.join(strange)}; trigger it again"
                )
            found = find_plan(open_store(settings.root()), (self.key or "").strip())
        except Eagle3Error as error:
            raise as_airflow(error) from None
        context["ti"].xcom_push(key="run_key", value=found.run_key)
        return found.plan.model_dump(mode="json")


class VerifyShardsOperator(JobOperator):
    """Compare every shard with plan and manifest; quarantine what is bad; return the indexes to capture again."""

    template_fields: Sequence[str] = ("plan", "check_only")

    def __init__(self, *, plan: Any, check_only: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.plan, self.check_only = plan, check_only

    def execute(self, context: Any) -> list[int]:
        """Return the indexes, empty if all is well or nothing is to be changed."""
        check_only = str(self.check_only) == "True"
        try:
            spec = jobs.repair_job(settings.root(), Ref.parse(self.plan, "shard plan"), check_only=check_only)
            job, state = self.run_job(context, spec)
            jobs.raise_failure(job, state)
        except Eagle3Error as error:
            raise as_airflow(error) from None
        bad = [int(index) for index in json.loads(job.log_tail(1)[0])]
        self.log.info("%d shards bad or missing", len(bad))
        return [] if check_only else bad


def find_plan(store: ObjectStore, key: str) -> PlannedRun:
    """Return the plan at `key`, or the one a feature set at `key` was made by, or the last one.

    Raises:
        NotCommittedError: no job of this root made such a plan.
    """
    made = sorted(_planned_runs(store), key=lambda item: item.finished_at, reverse=True)
    wanted: str | None = None
    if key:
        artifact = load(store, key)
        wanted = artifact.manifest.inputs.get("shard_plan", artifact.ref.manifest_sha256)
    for found in made:
        if wanted is None or found.plan.manifest_sha256 == wanted:
            return found
    what = f"a plan that made {key}" if key else "any plan"
    raise NotCommittedError(f"{store.root}: expected {what} among {len(made)} made here, found none; run train_drafter")


def _planned_runs(store: ObjectStore) -> Iterator[PlannedRun]:
    for directory in jobs.jobs_directory(store.root).glob("plan_capture-*"):
        result, command = read_json(directory / RESULT), read_json(directory / COMMAND)
        if result is None or command is None:
            continue
        ref = Ref.parse(result, str(directory))
        try:
            load(store, ref.expect(Kind.SHARD_PLAN))
        except (NotCommittedError, CorruptArtifactError):
            continue
        argv = command["argv"]
        yield PlannedRun(ref, argv[argv.index("--run") + 1], (directory / RESULT).stat().st_mtime)
