"""Read the hidden states of one shard out of the target, in prefills that samples share by their lengths alone.

One engine serves all mapped tasks of a machine: whoever has started it goes on with shards that nobody works on until
none is left, and their tasks find them committed. So a start of a quarter of an hour is paid once, and once more for
every kill. An engine of its own task, started before the mapped ones and stopped after them, would do the same and hold
GPUs while no task holds the pool's slot, outlive a worker that is gone, and have to be recognised by others.
"""

from __future__ import annotations

import contextlib
import shutil
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.context import StageContext
from eagle3_core.data.plan import PlannedShard, ShardPlan, read_plan
from eagle3_core.errors import Eagle3Error, EngineVersionError, StorageFullError
from eagle3_core.storage import commit, find_sound, full_disk_is_typed

if TYPE_CHECKING:
    from eagle3_core.data.recording import Capture


def run(context: StageContext) -> Ref:
    """Capture the shard `context.index`; if it is committed this costs one read and no import.

    The engine then goes on with shards nobody works on, so that their tasks find them committed. What stops it there
    fails no task but theirs.

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
            shutil.rmtree(_out(context), ignore_errors=True)
            raise


def _capture(context: StageContext, plan: ShardPlan) -> Ref:
    from eagle3_core.engine.backend import capturing
    from eagle3_core.identity import require_target

    assert context.index is not None
    shard = plan.shards[context.index]
    _check_engine(context, plan)
    _check_space(context, plan.bytes_of(shard))
    shutil.rmtree(_out(context), ignore_errors=True)
    target = require_target(context.run, plan.target)
    stopped: Eagle3Error | None = None
    with capturing(context, plan, target) as capture:
        # A shard goes to the disk while the engine computes the next one.
        with ThreadPoolExecutor(1, thread_name_prefix="commit") as pool:
            _record(context, plan, shard, capture)
            own = pool.submit(_commit, context, plan, shard)
            try:
                with full_disk_is_typed(context.work):
                    _go_on(context, plan, capture, Commits(pool, own))
            except Eagle3Error as error:
                stopped = error
        if stopped is not None:
            # Whose shard it is will see the same error and report it; what was written of it is of no use to anyone.
            shutil.rmtree(_out(context), ignore_errors=True)
            context.progress.phase(f"stopped working ahead: {stopped}")
    return own.result()


@dataclass
class Commits:
    """Where shards are committed one after the other, and the last one that was begun."""

    pool: ThreadPoolExecutor
    last: Future[Ref]


def _out(context: StageContext) -> Path:
    return context.work / "out"


def _record(context: StageContext, plan: ShardPlan, shard: PlannedShard, capture: Capture) -> None:
    """Capture one shard into its directory."""
    from eagle3_core.data.recording import ShardSamples, record

    staged = _out(context) / f"{shard.index:05d}"
    staged.mkdir(parents=True)
    samples = ShardSamples.read(context.input("shard_plan"), shard.index)
    max_bad = context.run.capture.max_bad_samples
    record(capture, plan, shard, samples, staged, max_bad, _reporter(context, plan, shard))


def _commit(context: StageContext, plan: ShardPlan, shard: PlannedShard) -> Ref:
    return commit(
        context.store,
        shard.key,
        _out(context) / f"{shard.index:05d}",
        Kind.SHARD,
        facts={"engine": plan.engine},
        ref_facts={"samples": len(shard.sample_ids), "tokens": shard.tokens},
    )


def _go_on(context: StageContext, plan: ShardPlan, capture: Capture, commits: Commits) -> None:
    """Capture every further shard that is neither committed nor claimed."""
    assert context.index is not None
    behind = context.index + 1
    for shard in [*plan.shards[behind:], *plan.shards[: context.index]]:
        if find_sound(context.store, shard.key) is not None:
            continue
        with contextlib.ExitStack() as held:
            ours = held.enter_context(context.store.claim(shard.key))
            if not ours or find_sound(context.store, shard.key) is not None:
                continue
            _check_space(context, plan.bytes_of(shard))
            _record(context, plan, shard, capture)
            commits.last.result()
            commits.last = commits.pool.submit(_commit_held, held.pop_all(), context, plan, shard)
    commits.last.result()


def _commit_held(
    held: contextlib.ExitStack,
    context: StageContext,
    plan: ShardPlan,
    shard: PlannedShard,
) -> Ref:
    with held:
        return _commit(context, plan, shard)


def _reporter(context: StageContext, plan: ShardPlan, shard: PlannedShard) -> Callable[[int], None]:
    """Return what is called after every sample: report, and stop before the root has less than its reserve."""
    started = time.monotonic()

    def report(done: int) -> None:
        rate = done / max(time.monotonic() - started, 1e-6)
        context.progress.update(done, shard.tokens, "tokens", shard=shard.index, tokens_per_s=round(rate, 1))
        if done < shard.tokens:
            _check_space(context, plan.bytes_of(shard) * (shard.tokens - done) // shard.tokens)

    return report


def _check_engine(context: StageContext, plan: ShardPlan) -> None:
    """Refuse to mix hidden states of another engine into this plan."""
    from eagle3_core.engine.backend import capture_engine

    engine = capture_engine(context.run)
    different = [name for name, value in engine.items() if plan.engine.get(name) != value]
    if different:
        name = different[0]
        raise EngineVersionError(
            f"capture: expected the plan's engine {name} {plan.engine.get(name)!r:.120}, found {engine[name]!r:.120}; "
            "run plan_capture again here, or use the machine and environment the plan was made in"
        )


def _check_space(context: StageContext, need: int) -> None:
    """Refuse to write `need` bytes more where less than the reserve would be left.

    A bucket has no such limit, but its shards are written to this machine's disk first.
    """
    free, reserve, where = context.store.free_bytes(), context.run.capture.reserve_bytes, context.store.root
    if free is None:
        free, where = shutil.disk_usage(context.work).free, str(context.work)
    if free < need + reserve:
        raise StorageFullError(
            f"{where}: expected {need:,} bytes for the rest of a shard plus a reserve of {reserve:,}, found {free:,} "
            "free; free space and resume: committed shards are kept"
        )
