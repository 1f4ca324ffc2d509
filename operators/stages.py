"""The pipeline on one page: one short operator per stage."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.pipeline import STAGES, shape_names
from eagle3_core.storage import ObjectStore, load
from operators.base import StageOperator
from operators.configure import frozen_run
from operators.links import REPORT_KEY, VERDICT_KEY, JobLink, ReportLink


class PreflightOperator(StageOperator):
    """Check everything that can be checked in seconds."""

    stage = STAGES["preflight"]


class PrepareOperator(StageOperator):
    """Normalise, deduplicate and split the prompts."""

    stage = STAGES["prepare"]


class RegenerateOperator(StageOperator):
    """Let the target answer every prompt."""

    stage = STAGES["regenerate"]


class BuildVocabOperator(StageOperator):
    """Choose the draft vocabulary."""

    stage = STAGES["build_vocab"]


class PlanCaptureOperator(StageOperator):
    """Cut the corpus into shards."""

    stage = STAGES["plan_capture"]


class CaptureOperator(StageOperator):
    """Read the hidden states of one shard."""

    stage = STAGES["capture"]

    def map_name(self, store: ObjectStore, refs: Mapping[str, Ref]) -> str:
        """Return for example `shard 3: samples 96..127, 7,812 tokens`."""
        shards = load(store, refs["shard_plan"]).json("plan.json")["shards"]
        first = sum(len(shard["sample_ids"]) for shard in shards[: self.index])
        last = first + len(shards[self.index]["sample_ids"]) - 1
        return f"shard {self.index}: samples {first}..{last}, {shards[self.index]['tokens']:,} tokens"


class SealOperator(StageOperator):
    """Look at every shard and write the index."""

    stage = STAGES["seal"]


class TrainOperator(StageOperator):
    """Train the drafter under torchrun."""

    stage = STAGES["train"]


class ExportOperator(StageOperator):
    """Write the directory SGLang loads."""

    stage = STAGES["export"]


class ParityOperator(StageOperator):
    """Compare the export with the trained drafter."""

    stage = STAGES["parity"]


class EvaluateOperator(StageOperator):
    """Serve held-out prompts with one draft shape, or with none."""

    stage = STAGES["evaluate"]

    def map_name(self, store: ObjectStore, refs: Mapping[str, Ref]) -> str:
        """Return `baseline` or for example `7/1/8`."""
        return shape_names(frozen_run(store, self.run_key))[int(self.index)]


class ChallengeOperator(StageOperator):
    """Serve challenger and champion in turn on the same held-out prompts."""

    stage = STAGES["challenge"]


class ReportOperator(StageOperator):
    """Put all figures together and judge the drafter."""

    stage = STAGES["report"]
    operator_extra_links = (JobLink(), ReportLink())

    def execute(self, context: Any) -> dict[str, Any]:
        """Return the report's reference; push its key for whoever shows it."""
        report = super().execute(context)
        context["ti"].xcom_push(key=REPORT_KEY, value=report["key"])
        return report


class PublishOperator(StageOperator):
    """Make a drafter that passed the champion.

    One that must not be leaves the task skipped, with the reason: no failure, nothing to retry, and seen in the grid.
    """

    stage = STAGES["publish"]
    operator_extra_links = (JobLink(), ReportLink())

    def execute(self, context: Any) -> dict[str, Any]:
        """Return the release's reference; push in words what happened as `verdict`.

        Raises:
            AirflowSkipException: the drafter is not the champion now; says why.
        """
        context["ti"].xcom_push(key=REPORT_KEY, value=self.inputs["eval_report"]["key"])
        release = super().execute(context)
        facts = release["facts"]
        context["ti"].xcom_push(key=VERDICT_KEY, value=facts["said"])
        if not facts["published"]:
            # A skipped task returns nothing; whoever follows the run wants the reference all the same.
            context["ti"].xcom_push(key="return_value", value=release)
            raise AirflowSkipException(facts["said"])
        self.log.info("%s", facts["said"])
        return release


class VerdictOperator(BaseOperator):
    """Show what a triggered run of `train_drafter` came to, on this run's page.

    Args:
        dag_id: The DAG that was triggered.
        run_id: Its run.
    """

    template_fields: Sequence[str] = ("run_id",)
    operator_extra_links = (ReportLink(),)

    def __init__(self, *, dag_id: str, run_id: Any, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.triggered_dag, self.run_id = dag_id, run_id

    def execute(self, context: Any) -> str:
        """Return the verdict in words.

        Raises:
            AirflowSkipException: the champion stays; says why.
            AirflowFailException: the run left no verdict.
        """
        ti = context["ti"]
        found = {name: ti.xcom_pull(task_ids="publish", dag_id=self.triggered_dag, run_id=self.run_id, key=name)
                 for name in (VERDICT_KEY, REPORT_KEY, "return_value")}  # fmt: skip
        if not all(found.values()):
            raise AirflowFailException(
                f"{self.run_id}: expected the verdict of its task publish, found none; look at it"
            )
        for name in (VERDICT_KEY, REPORT_KEY):
            ti.xcom_push(key=name, value=found[name])
        release = Ref.parse(found["return_value"], f"publish of {self.run_id}").expect(Kind.RELEASE)
        if not release.facts["published"] or release.facts["outcome"] == "unchanged":
            raise AirflowSkipException(found[VERDICT_KEY])
        self.log.info("%s", found[VERDICT_KEY])
        return str(found[VERDICT_KEY])
