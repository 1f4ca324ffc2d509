"""The pipeline on one page: one short operator per stage."""

from __future__ import annotations

from collections.abc import Mapping

from eagle3_core.artifacts import Ref
from eagle3_core.pipeline import STAGES, shape_names
from eagle3_core.storage import ObjectStore, load
from operators.base import StageOperator
from operators.configure import frozen_run
from operators.links import JobLink, ReportLink


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


class ReportOperator(StageOperator):
    """Put all figures together and judge the drafter."""

    stage = STAGES["report"]
    operator_extra_links = (JobLink(), ReportLink())


class PublishOperator(StageOperator):
    """Point the release at a drafter that passed."""

    stage = STAGES["publish"]
