"""Read the hidden states of one shard out of the target, one prefill a sample."""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.context import StageContext
from eagle3_core.data.plan import PlannedShard, ShardPlan, read_plan
from eagle3_core.data.shards import CHECKSUMS
from eagle3_core.errors import Eagle3Error, EngineVersionError, StorageFullError
from eagle3_core.estimate import feature_bytes_per_token
from eagle3_core.storage import commit, find_sound, full_disk_is_typed

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
    plan = read_plan(context.input("shard_plan"))
    assert context.index is not None
    key = plan.shards[context.index].key
    if done := find_sound(context.store, key):
        return done
    waiting = "waiting for another task that works on this shard"
    with context.store.claim(key, lambda: context.progress.phase(waiting)):
        if done := find_sound(context.store, key):
            return done
        try:
            with full_disk_is_typed(context.work):
                return _capture(context, plan)
        except StorageFullError:
            # What was written of this shard is of no use to anyone, and takes the space that is missing.
            shutil.rmtree(context.work / "out", ignore_errors=True)
            raise


def _capture(context: StageContext, plan: ShardPlan) -> Ref:
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.identity import require_target

    run = context.run
    assert context.index is not None
    shard = plan.shards[context.index]
    _check_engine(context, plan)
    _check_space(context, plan, shard.tokens)
    launch = LaunchPlan.capture(
        require_target(run, plan.target), plan.target_dtype, run.serving, plan.aux_layers, plan.max_sample_tokens,
        plan.prefill_tokens,
    )  # fmt: skip
    with (
        SglangServer.of_stage(launch, context) as server,
        server.client() as client,
    ):
        ref = _shard(context, plan, shard, client)
        try:
            with full_disk_is_typed(context.work):
                _go_on(context, plan, client, time.monotonic() + AHEAD * server.ready_s)
        except Eagle3Error as error:
            # Whose shard it is will see the same error and report it; what was written of it is of no use to anyone.
            shutil.rmtree(context.work / "out", ignore_errors=True)
            context.progress.phase(f"stopped working ahead: {error}")
    return ref


def _shard(context: StageContext, plan: ShardPlan, shard: PlannedShard, client: EngineClient) -> Ref:
    """Capture and commit one shard."""
    from eagle3_core.data.recording import ShardSamples, record

    staged = context.staged()
    samples = ShardSamples.read(context.input("shard_plan"), shard.index)
    checksums = record(client.capture, plan, shard, samples, staged, _reporter(context, plan, shard))
    return commit(
        context.store,
        shard.key,
        staged,
        Kind.SHARD,
        facts={CHECKSUMS: checksums, "engine": plan.engine},
        ref_facts={"samples": len(shard.sample_ids), "tokens": shard.tokens},
    )


def _go_on(context: StageContext, plan: ShardPlan, client: EngineClient, until: float) -> None:
    """Capture further shards that are neither committed nor claimed, until the time is up."""
    assert context.index is not None
    behind = context.index + 1
    for shard in [*plan.shards[behind:], *plan.shards[: context.index]]:
        if time.monotonic() > until:
            return
        with context.store.claim(shard.key) as ours:
            if ours and find_sound(context.store, shard.key) is None:
                _check_space(context, plan, shard.tokens)
                _shard(context, plan, shard, client)


def _reporter(context: StageContext, plan: ShardPlan, shard: PlannedShard) -> Callable[[int], None]:
    """Return what is called after every sample: report, and stop before the root has less than its reserve."""
    started = time.monotonic()

    def report(done: int) -> None:
        rate = done / max(time.monotonic() - started, 1e-6)
        context.progress.update(done, shard.tokens, "tokens", shard=shard.index, tokens_per_s=round(rate, 1))
        if done < shard.tokens:
            _check_space(context, plan, shard.tokens - done)

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
    """Refuse to write `tokens` more where less than the reserve would be left.

    A bucket has no such limit, but its shards are written to this machine's disk first.
    """
    need = tokens * feature_bytes_per_token(plan.hidden_size, len(plan.aux_layers), plan.dtype)
    free, reserve, where = context.store.free_bytes(), context.run.capture.reserve_bytes, context.store.root
    if free is None:
        free, where = shutil.disk_usage(context.work).free, str(context.work)
    if free < need + reserve:
        raise StorageFullError(
            f"{where}: expected {need:,} bytes for the rest of a shard plus a reserve of {reserve:,}, found {free:,} "
            "free; free space and resume: committed shards are kept"
        )
