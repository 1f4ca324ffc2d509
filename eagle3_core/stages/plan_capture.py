"""Cut what is not captured yet into shards of bounded size, and refuse what the root has no room for."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.checks import aux_layers
from eagle3_core.config.base import canonical_sha256
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import Answer, read_corpus
from eagle3_core.data.encoding import num_label_rows
from eagle3_core.data.plan import (
    PLAN,
    SAMPLES,
    PlannedSample,
    PlannedShard,
    ShardPlan,
    capture_decides,
    capture_identity,
    shard_digest,
    shard_place,
    tokens_file,
)
from eagle3_core.data.reuse import arrange, captured_shards
from eagle3_core.engine.backend import capture_engine
from eagle3_core.errors import ConfigError, StorageFullError
from eagle3_core.identity import TargetIdentity
from eagle3_core.storage import PLANNING


def run(context: StageContext) -> Ref:
    """Write the shard plan: shards that hold samples of this corpus already are taken, the others cut anew.

    Raises:
        ConfigError: samples longer than data.max_sample_tokens.
        StorageFullError: the hidden states would not fit.
    """
    engine = capture_engine(context.run)
    content = {"engine": canonical_sha256(engine), "max_sample_tokens": str(context.run.data.max_sample_tokens)}
    if done := context.done(content):
        return done
    corpus = context.input("corpus")
    target = TargetIdentity.model_validate(corpus.manifest.facts["target"])
    answers = list(read_corpus(corpus))
    _check_lengths(answers, context.run.data.max_sample_tokens)
    decides = capture_decides(context.run, target, aux_layers(context.run.target, target), engine)
    with context.store.claim(PLANNING, lambda: context.progress.phase("waiting for another plan or for gc")):
        return _plan(context, answers, decides, content)


def _plan(
    context: StageContext, answers: Sequence[Answer], decides: Mapping[str, Any], content: Mapping[str, str]
) -> Ref:
    """Arrange the samples in shards and commit the plan."""
    capture, identity = context.run.capture, capture_identity(decides)
    context.progress.phase("looking for shards that are captured already")
    found = arrange(
        answers, identity, captured_shards(context.store, identity), capture.shard_tokens, capture.max_tasks
    )
    staged = context.staged()
    shards = [
        _write_shard(staged, index, [answers[position] for position in positions], identity)
        for index, positions in enumerate(found.shards)
    ]
    plan = ShardPlan.model_validate(
        {**decides, "shards": shards, "max_sample_tokens": context.run.data.max_sample_tokens}
    )
    tokens = sum(shard.tokens for shard in shards)
    _check_space(context, sum(plan.bytes_of(shards[index]) for index in found.fresh))
    (staged / PLAN).write_text(json.dumps(plan.model_dump(mode="json"), indent=1), encoding="utf-8")
    context.progress.update(len(shards), len(shards), "shards", captured_already=len(shards) - len(found.fresh))
    return context.commit(
        staged,
        content=content,
        ref_facts={
            "num_shards": len(shards),
            "samples": len(answers),
            "tokens": tokens,
            "bytes": plan.bytes,
            "bytes_per_token": round(plan.bytes / tokens),
            "captured_shards": len(shards) - len(found.fresh),
            "tokens_to_capture": sum(shards[index].tokens for index in found.fresh),
        },
    )


def _check_lengths(answers: Sequence[Answer], longest: int) -> None:
    long = [answer for answer in answers if answer.length > longest]
    if long:
        raise ConfigError(
            f"corpus: expected samples of at most data.max_sample_tokens {longest}, found {len(long)} longer, "
            f"{long[0].id} of {long[0].length}; give the value the corpus was made with"
        )


def _check_space(context: StageContext, need: int) -> None:
    free, reserve = context.store.free_bytes(), context.run.capture.reserve_bytes
    if free is not None and free < need + reserve:
        raise StorageFullError(
            f"{context.store.root}: expected {need:,} bytes for the hidden states plus a reserve of {reserve:,}, found "
            f"{free:,} free; free space and resume, or lower data.max_prompts"
        )


def _write_shard(staged: Path, index: int, answers: Sequence[Answer], identity: str) -> PlannedShard:
    import numpy as np
    from safetensors.numpy import save_file

    ids = [answer.input_ids + answer.output_ids for answer in answers]
    path = staged / tokens_file(index)
    path.parent.mkdir(exist_ok=True)
    tensors = {
        "input_ids": np.array([token for sample in ids for token in sample], dtype=np.int32),
        "lengths": np.array([answer.length for answer in answers], dtype=np.int32),
        "supervised": np.array([len(answer.output_ids) for answer in answers], dtype=np.int32),
    }
    save_file(tensors, path)
    with (staged / SAMPLES).open("a", encoding="utf-8") as file:
        for answer in answers:
            sample = PlannedSample(
                id=answer.id,
                shard=index,
                length=answer.length,
                supervised=len(answer.output_ids),
                held_out=answer.held_out,
                domain=answer.domain,
            )
            file.write(json.dumps(sample.model_dump()) + "\n")
    digest = shard_digest(identity, answers)
    return PlannedShard(
        index=index,
        digest=digest,
        sample_ids=tuple(answer.id for answer in answers),
        tokens=int(tensors["lengths"].sum()),
        label_rows=sum(num_label_rows(answer.length, len(answer.output_ids)) for answer in answers),
        key=shard_place(identity, digest),
    )
