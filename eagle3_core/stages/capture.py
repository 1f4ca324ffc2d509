"""Read the hidden states of one shard out of the target, in prefills that samples share by their lengths alone.

One engine serves all mapped tasks of a machine: whoever has started it goes on with shards that nobody works on until
none is left, and their tasks find them committed. So a start of a quarter of an hour is paid once, and once more for
every kill. An engine of its own task, started before the mapped ones and stopped after them, would do the same and hold
GPUs while no task holds the pool's slot, outlive a worker that is gone, and have to be recognised by others.
"""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.context import StageContext
from eagle3_core.data.plan import PlannedShard, ShardPlan, read_plan
from eagle3_core.data.room import Free, GiveWayError, Room
from eagle3_core.errors import Eagle3Error, EngineVersionError, StorageFullError
from eagle3_core.storage import commit, find_sound, full_disk_is_typed

if TYPE_CHECKING:
    from eagle3_core.data.recording import Capture

_PAGE = 4096
"""What a disk gives a file at a time, as a rule."""


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
        with full_disk_is_typed(context.work):
            return _capture(context, plan)


def _capture(context: StageContext, plan: ShardPlan) -> Ref:
    from eagle3_core.engine.backend import capturing, spool_on_disk
    from eagle3_core.engine.spool import CALLERS, UNDER_WAY
    from eagle3_core.identity import require_target

    assert context.index is not None
    shard = plan.shards[context.index]
    _check_engine(context, plan)
    # What a killed attempt left.
    shutil.rmtree(context.work / "out", ignore_errors=True)
    target = require_target(context.run, plan.target)
    reserve, on_their_way = context.run.capture.reserve_bytes, spool_on_disk(context.run, plan, target)
    room = Room(lambda: _free(context), reserve, on_their_way, CALLERS)
    room.enter(shard.index, need(plan, shard))
    stopped: Eagle3Error | None = None
    with capturing(context, plan, target) as capture, ThreadPoolExecutor(UNDER_WAY, thread_name_prefix="shard") as pool:
        tally = _Tally(context, plan, room)
        own = pool.submit(_finish, context, shard, capture, tally)
        own.add_done_callback(lambda _: room.leave(shard.index))
        # Alone, since what fails another shard may stop the engine; it is summed and committed beside others.
        room.wait_written(shard.index)
        try:
            _go_on(context, capture, tally, pool, own)
        except Eagle3Error as error:
            stopped = error
        ref = own.result()
    if stopped is not None:
        # Whose shard it is will see the same error and report it.
        context.progress.phase(f"stopped working ahead: {stopped}")
    return ref


class _Tally:
    """Tokens of the shards that this task records, several at once; `plan` has all that it may come to."""

    def __init__(self, context: StageContext, plan: ShardPlan, room: Room) -> None:
        self.plan, self.room, self._context = plan, room, context
        self._lock, self._done = threading.Lock(), dict[int, int]()
        self._total = sum(shard.tokens for shard in plan.shards)

    def leave_out(self, shard: PlannedShard) -> None:
        """Expect nothing of a shard that somebody else has recorded, or does."""
        with self._lock:
            self._total -= shard.tokens

    def put_off(self, shard: PlannedShard, why: str) -> None:
        """Count a shard that is captured anew later from its beginning."""
        with self._lock:
            self._done.pop(shard.index, None)
            self._context.progress.phase(f"fewer shards at once: {why}")

    def of(self, shard: PlannedShard) -> Callable[[int, int], None]:
        """Return what is called after every sample: report, and stop before the root has less than its reserve."""
        beside_rows = _beside_rows(self.plan, shard)

        def report(done: int, on_disk: int) -> None:
            with self._lock:
                self._done[shard.index] = done
                whole = sum(tokens == self.plan.shards[index].tokens for index, tokens in self._done.items())
                self._context.progress.update(sum(self._done.values()), self._total, "tokens", shards=whole)
            rest = beside_rows + self.plan.bytes_of(shard) * (shard.tokens - on_disk) // shard.tokens
            if on_disk == shard.tokens:
                self.room.written(shard.index, rest)
            else:
                self.room.keep(shard.index, rest)

        return report


def need(plan: ShardPlan, shard: PlannedShard) -> int:
    """Return the bytes that a shard takes on a disk while it is made, with what tensors and files waste of pages."""
    return plan.bytes_of(shard) + _beside_rows(plan, shard) + (_tensors(plan) + 2) * _PAGE


def _beside_rows(plan: ShardPlan, shard: PlannedShard) -> int:
    """Return what comes when the rows are written: the index and the manifest."""
    from eagle3_core.data.shards import ShardIndex

    return ShardIndex.most_bytes(shard.sample_ids, _tensors(plan)) + 2 * _PAGE


def _tensors(plan: ShardPlan) -> int:
    return len(plan.encoding.rows(2, 2))


def _finish(context: StageContext, shard: PlannedShard, capture: Capture, tally: _Tally) -> Ref:
    """Capture one shard and commit it; nothing of it stays in the work directory, whatever becomes of it."""
    staged = context.work / "out" / f"{shard.index:05d}"
    try:
        _record(context, shard, staged, capture, tally)
        return _commit(context, tally.plan, shard, staged)
    finally:
        # A bucket has a copy, half a shard is of no use to anyone, and others want the room.
        shutil.rmtree(staged, ignore_errors=True)


def _record(context: StageContext, shard: PlannedShard, staged: Path, capture: Capture, tally: _Tally) -> None:
    """Capture one shard into a directory."""
    from eagle3_core.data.recording import ShardSamples, record

    staged.mkdir(parents=True)
    samples = ShardSamples.read(context.input("shard_plan"), shard.index)
    max_bad = context.run.capture.max_bad_samples
    record(capture, tally.plan, shard, samples, staged, max_bad, tally.of(shard))


def _commit(context: StageContext, plan: ShardPlan, shard: PlannedShard, staged: Path) -> Ref:
    return commit(
        context.store,
        shard.key,
        staged,
        Kind.SHARD,
        facts={"engine": plan.engine},
        ref_facts={"samples": len(shard.sample_ids), "tokens": shard.tokens},
    )


def _go_on(context: StageContext, capture: Capture, tally: _Tally, pool: ThreadPoolExecutor, own: Future[Ref]) -> None:
    """Capture every further shard that is neither committed nor claimed, a few at once.

    At the end of a shard its states are written, summed and committed while the engine has nothing of it left to do.
    Once the task's `own` shard has failed, none is begun: the task is to say so now.
    """
    assert context.index is not None
    failed = threading.Event()

    def over() -> bool:
        return failed.is_set() or (own.done() and own.exception() is not None)

    def attempt(shard: PlannedShard) -> None:
        try:
            while not over() and not _in_room(context, shard, capture, tally, over):
                pass
        except BaseException:
            failed.set()
            raise

    behind = context.index + 1
    shards = [*tally.plan.shards[behind:], *tally.plan.shards[: context.index]]
    for done in [pool.submit(attempt, shard) for shard in shards]:
        done.result()


def _in_room(
    context: StageContext, shard: PlannedShard, capture: Capture, tally: _Tally, over: Callable[[], bool]
) -> bool:
    """Capture a shard once there is room for it; tell whether that is done, by us or by somebody else, or all is over.

    It is not where the shard gave way to older ones: there may be room again when they are finished.

    Raises:
        StorageFullError: it is alone, and there is no room.
    """
    room = tally.room
    if find_sound(context.store, shard.key) is not None:
        tally.leave_out(shard)
        return True
    room.enter(shard.index, need(tally.plan, shard))
    try:
        with context.store.claim(shard.key) as ours, full_disk_is_typed(context.work):
            if over() or not ours or find_sound(context.store, shard.key) is not None:
                tally.leave_out(shard)
                return True
            _finish(context, shard, capture, tally)
            return True
    except (GiveWayError, StorageFullError) as error:
        if isinstance(error, StorageFullError) and not room.fewer(shard.index):
            raise
        tally.put_off(shard, str(error))
        return False
    finally:
        room.leave(shard.index)


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


def _free(context: StageContext) -> Free:
    """Return what may be written: a shard is made on this machine's disk, maybe another than the root's."""
    here = Free(shutil.disk_usage(context.work).free, str(context.work))
    there = context.store.free_bytes()
    return here if there is None or here.bytes < there else Free(there, context.store.root)
