"""ShardPlan: which samples lie in which shard, and everything that decides what their hidden states are. Light."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal

from pydantic import Field

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import DataConfig, RunConfig, TargetConfig
from eagle3_core.config.base import Section
from eagle3_core.pipeline import STAGES, output_key, shard_key
from eagle3_core.storage import Artifact

PLAN = "plan.json"
SAMPLES = "samples.jsonl"

StoredDtype = Literal["float32", "bfloat16", "float16"]


class PlannedShard(Section):
    """One shard: its samples in the order in which they are stored."""

    index: int = Field(ge=0)
    digest: str = Field(description="Of the samples' token ids and all that decides their states.")
    sample_ids: tuple[str, ...] = Field(min_length=1)
    tokens: int = Field(ge=1)


class PlannedSample(Section):
    """One line of samples.jsonl."""

    id: str
    shard: int
    length: int = Field(ge=2)
    supervised: int = Field(ge=1, description="Answer tokens; they are the last of the sample.")
    held_out: bool
    domain: str


class ShardPlan(Section):
    """plan.json. `aux_layers` are layers whose OUTPUT is stored, counted from 0 (never an engine's own numbers)."""

    schema_version: Literal["eagle3/shard-plan/1"] = "eagle3/shard-plan/1"
    aux_layers: tuple[int, ...] = Field(min_length=1)
    dtype: StoredDtype
    target_dtype: StoredDtype
    hidden_size: int = Field(ge=1)
    max_sample_tokens: int = Field(ge=2)
    target: dict[str, Any] = Field(description="TargetIdentity.")
    engine: dict[str, Any] = Field(description="Fingerprint of engine and capture plugin, and the device.")
    shards: tuple[PlannedShard, ...] = Field(min_length=1)


def read_plan(artifact: Artifact) -> ShardPlan:
    """Return the plan, verified against its manifest."""
    artifact.ref.expect(Kind.SHARD_PLAN)
    return ShardPlan.model_validate(artifact.json(PLAN))


def read_samples(artifact: Artifact) -> list[PlannedSample]:
    """Return all samples in the order of shards and of rows in them."""
    with artifact.verified_path(SAMPLES).open(encoding="utf-8") as file:
        return [PlannedSample.model_construct(**json.loads(line)) for line in file]


def tokens_file(index: int) -> str:
    """Return the name of the file in the plan that holds the token ids of one shard."""
    return f"tokens/{index:05d}.safetensors"


def capture_key(plan: Ref, index: int) -> str:
    """Return where the shard belongs: it depends on the plan alone, which holds the engine's identity."""
    assert STAGES["capture"].sections == ()
    return shard_key(output_key(STAGES["capture"], _NO_CONFIG, {"shard_plan": plan}), index)


def cut(lengths: Sequence[int], shard_tokens: int, max_shards: int) -> list[range]:
    """Cut consecutive samples into shards of at most `shard_tokens`, or more where there would be too many shards.

    A longer sample has a shard of its own. Depends on its arguments alone.
    """
    bound = max(shard_tokens, -(-sum(lengths) // max_shards))
    while len(shards := _cut(lengths, bound)) > max_shards:
        bound += -(-bound // 50)
    return shards


def _cut(lengths: Sequence[int], bound: int) -> list[range]:
    shards: list[range] = []
    start = tokens = 0
    for position, length in enumerate(lengths):
        if position > start and tokens + length > bound:
            shards.append(range(start, position))
            start, tokens = position, 0
        tokens += length
    return [*shards, range(start, len(lengths))] if lengths else []


# `output_key` wants a run, of which the capture stage uses no section.
_NO_CONFIG = RunConfig(target=TargetConfig(model="none"), data=DataConfig(prompts="none"))
