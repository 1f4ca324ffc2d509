"""ShardPlan: which samples lie in which shard, and everything that decides what their hidden states are. Light."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from pydantic import Field, ValidationError

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.config.base import Section, canonical_sha256
from eagle3_core.data.corpus import Answer
from eagle3_core.data.encoding import Encoding
from eagle3_core.errors import CorruptArtifactError, UnknownSchemaError
from eagle3_core.identity import TargetIdentity
from eagle3_core.pipeline import STAGES
from eagle3_core.storage import Artifact

PLAN = "plan.json"
SAMPLES = "samples.jsonl"
SCHEMA = "eagle3/shard-plan/3"


class PlannedShard(Section):
    """One shard: its samples in the order in which they are stored."""

    index: int = Field(ge=0)
    digest: str = Field(description="Of the samples' token ids and all that decides their states.")
    sample_ids: tuple[str, ...] = Field(min_length=1)
    tokens: int = Field(ge=1)
    label_rows: int = Field(ge=0, description="Tokens whose last hidden state a loss can read.")
    key: str = Field(description="Where it belongs: `shard_place`.")


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

    schema_version: Literal["eagle3/shard-plan/3"] = "eagle3/shard-plan/3"
    aux_layers: tuple[int, ...] = Field(min_length=1)
    dtype: Literal["float32", "bfloat16", "float16"]
    fp8: Literal["none", "aux", "all"]
    last_rows: Literal["labels", "all"]
    target_dtype: Literal["float32", "bfloat16", "float16"]
    hidden_size: int = Field(ge=1)
    max_sample_tokens: int = Field(ge=2)
    prefill_tokens: int = Field(ge=1, description="Decides which samples share a prefill, and so their last bits.")
    target: dict[str, Any] = Field(description="TargetIdentity.")
    engine: dict[str, Any] = Field(description="Fingerprint of engine and capture plugin, and the device.")
    shards: tuple[PlannedShard, ...] = Field(min_length=1)

    @property
    def encoding(self) -> Encoding:
        """Return how its states are stored."""
        return Encoding(
            dtype=self.dtype, fp8=self.fp8, last_rows=self.last_rows, num_aux=len(self.aux_layers),
            hidden_size=self.hidden_size,
        )  # fmt: skip

    def bytes_of(self, shard: PlannedShard) -> int:
        """Return what the tensors of a shard take."""
        return self.encoding.bytes(shard.tokens, shard.label_rows)

    @property
    def bytes(self) -> int:
        """Return what all hidden states take."""
        return sum(self.bytes_of(shard) for shard in self.shards)


def read_plan(artifact: Artifact) -> ShardPlan:
    """Return the plan, verified against its manifest.

    Raises:
        UnknownSchemaError: another version of the program wrote it.
    """
    artifact.ref.expect(Kind.SHARD_PLAN)
    values = artifact.json(PLAN)
    where, version = f"{artifact.store.root}/{artifact.ref.key}/{PLAN}", values.get("schema_version")
    if version != SCHEMA:
        raise UnknownSchemaError(f"{where}: expected {SCHEMA}, found {version!r}; run plan_capture again")
    try:
        return ShardPlan.model_validate(values)
    except ValidationError as error:
        raise CorruptArtifactError(f"{where}: {error.error_count()} invalid fields; run plan_capture again") from None


def read_samples(artifact: Artifact) -> list[PlannedSample]:
    """Return all samples in the order of shards and of rows in them."""
    with artifact.verified_path(SAMPLES).open(encoding="utf-8") as file:
        return [PlannedSample.model_construct(**json.loads(line)) for line in file]


def tokens_file(index: int) -> str:
    """Return the name of the file in the plan that holds the token ids of one shard."""
    return f"tokens/{index:05d}.safetensors"


def capture_decides(
    run: RunConfig, target: TargetIdentity, layers: Sequence[int], engine: Mapping[str, Any]
) -> dict[str, Any]:
    """Return everything but the samples that decides hidden states, as a plan holds it."""
    return {
        "aux_layers": list(layers),
        "dtype": run.capture.dtype,
        "fp8": run.capture.fp8,
        "last_rows": run.capture.last_rows,
        "target_dtype": run.target.dtype,
        "prefill_tokens": run.capture.prefill_tokens,
        "hidden_size": target.hidden_size,
        "target": target.model_dump(mode="json"),
        "engine": dict(engine),
    }


def capture_identity(decides: Mapping[str, Any]) -> str:
    """Return the name of what `capture_decides` returned."""
    return canonical_sha256({"shard": 2, "decides": decides})


def shard_digest(identity: str, answers: Sequence[Answer]) -> str:
    """Return the name of a shard's content: equal samples under an equal identity have equal hidden states."""
    samples = [[answer.id, answer.input_ids, answer.output_ids] for answer in answers]
    return canonical_sha256({"identity": identity, "samples": samples})


def shard_place(identity: str, digest: str) -> str:
    """Return where a shard belongs: its name says what is in it, so any plan that wants the same finds it."""
    return f"{shards_under(identity)}/{digest[:24]}"


def shards_under(identity: str) -> str:
    """Return the prefix of all shards captured under one identity."""
    return f"{STAGES['capture'].name}/{identity[:24]}"


def cut(lengths: Sequence[int], shard_tokens: int, max_shards: int) -> list[range]:
    """Cut consecutive samples into shards of at most `shard_tokens`, or more where there would be too many shards.

    A longer sample has a shard of its own. Depends on its arguments alone.
    """
    assert max_shards >= 1
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
