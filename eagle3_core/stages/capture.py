"""Read the hidden states of one shard out of the target, one prefill a sample."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.data.plan import ShardPlan, read_plan
from eagle3_core.errors import EngineVersionError, StorageFullError
from eagle3_core.estimate import feature_bytes_per_token


def run(context: StageContext) -> Ref:
    """Capture the shard `context.index`; if it is committed this costs one read and no import.

    Raises:
        CaptureMismatchError: states came back that are not those of the request.
        EngineVersionError: this engine is not the one the plan was made for.
        StorageFullError: no room; resume after freeing space.
    """
    if done := context.done():
        return done
    assert context.index is not None
    return capture_shards(context, [context.index])[0]


def capture_shards(context: StageContext, indexes: Sequence[int]) -> list[Ref]:
    """Capture several shards with one engine; committed ones are left alone."""
    each = {index: dataclasses.replace(context, index=index) for index in indexes}
    refs = {index: ref for index, part in each.items() if (ref := part.done())}
    missing = {index: part for index, part in each.items() if index not in refs}
    if missing:
        refs |= _capture(context, missing)
    return [refs[index] for index in indexes]


def _capture(context: StageContext, missing: dict[int, StageContext]) -> dict[int, Ref]:
    from eagle3_core.data.recording import ShardSamples, record
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.identity import require_target

    run, artifact = context.run, context.input("shard_plan")
    plan = read_plan(artifact)
    _check_engine(context, plan)
    target = require_target(run, plan.target)
    launch = LaunchPlan.capture(target, plan.target_dtype, run.serving, plan.aux_layers, plan.max_sample_tokens)
    for index in missing:
        _check_space(context, plan, plan.shards[index].tokens)
    refs = {}
    with (
        SglangServer(
            launch,
            log=context.work / "sglang.log",
            startup_timeout_s=run.serving.startup_timeout_s,
            threads=run.serving.threads,
            on_phase=context.progress.phase,
        ) as server,
        server.client() as client,
    ):
        for index, part in missing.items():
            shard, staged = plan.shards[index], part.staged()
            samples = ShardSamples.read(artifact, index)
            record(
                lambda asked: client.capture(asked, concurrency=run.serving.max_running_requests),
                plan, shard, samples, staged, _reporter(part, shard.tokens),
            )  # fmt: skip
            _check_space(context, plan, 0)
            refs[index] = part.commit(staged, ref_facts={"samples": len(shard.sample_ids), "tokens": shard.tokens})
    return refs


def _reporter(context: StageContext, total: int) -> Callable[[int], None]:
    started = time.monotonic()

    def report(done: int) -> None:
        rate = done / max(time.monotonic() - started, 1e-6)
        context.progress.update(done, total, "tokens", shard=context.index, tokens_per_s=round(rate, 1))

    return report


def _check_engine(context: StageContext, plan: ShardPlan) -> None:
    """Refuse to mix hidden states of another engine into this plan."""
    from eagle3_core.engine.fingerprint import require_known_good
    from eagle3_core.engine.platform import resolve_device

    engine = {"fingerprint": require_known_good(), "device": resolve_device(context.run.serving.device)}
    different = [name for name, value in engine.items() if plan.engine.get(name) != value]
    if different:
        name = different[0]
        raise EngineVersionError(
            f"capture: expected the plan's engine {name} {plan.engine.get(name)!r:.120}, found {engine[name]!r:.120}; "
            "run plan_capture again here, or use the machine and environment the plan was made in"
        )


def _check_space(context: StageContext, plan: ShardPlan, tokens: int) -> None:
    need = tokens * feature_bytes_per_token(plan.hidden_size, len(plan.aux_layers), plan.dtype)
    free, reserve = context.store.free_bytes(), context.run.capture.reserve_bytes
    if free is not None and free < need + reserve:
        raise StorageFullError(
            f"{context.store.root}: expected {need:,} bytes for a shard plus a reserve of {reserve:,}, found {free:,} "
            "free; free space and resume: committed shards are kept"
        )
