"""Read the hidden states of one shard out of the target, one prefill a sample."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.data.plan import ShardPlan, read_plan
from eagle3_core.errors import Eagle3Error, EngineVersionError, StorageFullError
from eagle3_core.estimate import feature_bytes_per_token
from eagle3_core.storage import full_disk_is_typed

if TYPE_CHECKING:
    from eagle3_core.engine.client import EngineClient

AHEAD = 10.0
"""An engine that took s seconds to start works for this many times s on other shards: its start is then under 10 %."""


def run(context: StageContext) -> Ref:
    """Capture the shard `context.index`; if it is committed this costs one read and no import.

    The engine then goes on with shards nobody works on, so that their tasks find them committed.

    Raises:
        CaptureMismatchError: states came back that are not those of the request.
        EngineVersionError: this engine is not the one the plan was made for.
        StorageFullError: no room; resume after freeing space.
    """
    if done := context.done():
        return done
    waiting = "waiting for another task that works on this shard"
    with context.store.claim(context.key(), lambda: context.progress.phase(waiting)):
        if done := context.done():
            return done
        with full_disk_is_typed(context.work):
            return _capture(context)


def _capture(context: StageContext) -> Ref:
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.identity import require_target

    run, plan = context.run, read_plan(context.input("shard_plan"))
    assert context.index is not None
    _check_engine(context, plan)
    _check_space(context, plan, plan.shards[context.index].tokens)
    launch = LaunchPlan.capture(
        require_target(run, plan.target), plan.target_dtype, run.serving, plan.aux_layers, plan.max_sample_tokens
    )
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
        ref = _shard(context, plan, client)
        try:
            _go_on(context, plan, client, time.monotonic() + AHEAD * server.ready_s)
        except Eagle3Error as error:
            # Whose shard it is will see the same error and report it.
            context.progress.phase(f"stopped working ahead: {error}")
    return ref


def _shard(context: StageContext, plan: ShardPlan, client: EngineClient) -> Ref:
    """Capture and commit the context's own shard."""
    from eagle3_core.data.recording import ShardSamples, record

    assert context.index is not None
    shard, staged = plan.shards[context.index], context.staged()
    samples = ShardSamples.read(context.input("shard_plan"), shard.index)
    concurrency = context.run.serving.max_running_requests
    record(
        lambda asked: client.capture(asked, concurrency=concurrency),
        plan, shard, samples, staged, _reporter(context, shard.tokens),
    )  # fmt: skip
    _check_space(context, plan, 0)
    return context.commit(staged, ref_facts={"samples": len(shard.sample_ids), "tokens": shard.tokens})


def _go_on(context: StageContext, plan: ShardPlan, client: EngineClient, until: float) -> None:
    """Capture further shards that are neither committed nor claimed, until the time is up."""
    assert context.index is not None
    behind = context.index + 1
    for shard in [*plan.shards[behind:], *plan.shards[: context.index]]:
        if time.monotonic() > until:
            return
        other = dataclasses.replace(context, index=shard.index)
        with context.store.claim(other.key()) as ours:
            if ours and other.done() is None:
                _check_space(context, plan, shard.tokens)
                _shard(other, plan, client)


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
