"""A disk that fills up while states are captured: one clear line at once, nothing half-written, and on it goes."""

import contextlib
import errno
import re
import shutil
import subprocess
import threading
import uuid
from collections import namedtuple
from pathlib import Path

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.data.plan import read_plan
from eagle3_core.data.room import Room
from eagle3_core.data.shards import WAITING_BYTES, ShardWriter
from eagle3_core.engine.spool import CALLERS
from eagle3_core.errors import EXIT_CODES, Remedy, StorageFullError, StoreUnreachableError
from eagle3_core.repair import inspect
from eagle3_core.stages import capture
from eagle3_core.storage import load
from eagle3_core.storage.local import LocalStore


class QuotaStore(LocalStore):
    """Says that what others left of a quota is free."""

    free = 1 << 40

    def free_bytes(self):
        return self.free


def rows(flow, index):
    plan = read_plan(load(flow.store, flow.refs[Kind.SHARD_PLAN]))
    return plan.bytes_of(plan.shards[index])


def needed(flow, index):
    plan = read_plan(load(flow.store, flow.refs[Kind.SHARD_PLAN]))
    return capture.need(plan, plan.shards[index])


def left_over(flow):
    return list((flow.tmp_path / "jobs").rglob("features.safetensors"))


def test_capture_stops_while_it_writes_when_others_fill_the_disk_and_goes_on_when_they_free_it(planned, engine):
    planned.store = store = QuotaStore(planned.tmp_path / "root")

    def others_write(number, aux, last):
        # After the third sample of the second shard.
        if len(engine.captured) == first + 3 + 4:
            store.free = 100
        return aux, last

    first = len(read_plan(load(store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids)
    engine.disturb = others_write
    planned.run("capture", 0)
    states = [finding.state for finding in inspect(store, planned.refs[Kind.SHARD_PLAN])]
    assert states == ["ok", "missing", "missing", "missing", "missing"]
    assert left_over(planned) == []
    captured = len(engine.captured)
    with pytest.raises(StorageFullError, match=r"plus a reserve of 0, found 100 free; free space and resume") as caught:
        planned.run("capture", 1)
    assert EXIT_CODES[caught.value.remedy] == 76
    assert caught.value.remedy is Remedy.RESUME
    assert len(engine.captured) == captured
    store.free = 1 << 40
    planned.capture_all()
    assert planned.run("seal").facts["shards"] == 5


def test_a_disk_that_fills_while_working_ahead_fails_no_task_and_leaves_nothing(planned, engine, monkeypatch):
    own = len(read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids)
    real, calls = ShardWriter.append, []

    def append(writer, *states):
        calls.append(writer)
        if len(calls) > own + 2:
            raise OSError(errno.ENOSPC, "No space left on device")
        return real(writer, *states)

    monkeypatch.setattr(ShardWriter, "append", append)
    planned.run("capture", 0)
    # Each of those who work meets it, and those who try again with fewer at once.
    assert own + 3 <= len(calls) <= own + 2 + 4 * CALLERS
    assert [finding.state for finding in inspect(planned.store, planned.refs[Kind.SHARD_PLAN])].count("ok") == 1
    assert left_over(planned) == []


def test_a_task_whose_own_shard_cannot_be_committed_says_so_at_once_and_works_no_further_ahead(planned, monkeypatch):
    monkeypatch.setattr("eagle3_core.engine.spool.UNDER_WAY", 2)
    real = capture._commit

    def refuse_own(context, plan, shard, staged):
        if shard.index == context.index:
            raise StoreUnreachableError("try again")
        return real(context, plan, shard, staged)

    monkeypatch.setattr(capture, "_commit", refuse_own)
    with pytest.raises(StoreUnreachableError):
        planned.run("capture", 0)
    # What was begun meanwhile is brought to its end.
    assert [finding.state for finding in inspect(planned.store, planned.refs[Kind.SHARD_PLAN])].count("ok") <= 1


def test_the_asked_shard_stops_in_its_middle_and_gives_back_what_it_had_written(planned, engine):
    planned.store = store = QuotaStore(planned.tmp_path / "root")

    def others_write(number, aux, last):
        store.free = 100 if number == 3 else store.free
        return aux, last

    engine.disturb = others_write
    with pytest.raises(StorageFullError, match="committed shards are kept"):
        planned.run("capture", 0)
    assert len(engine.captured) == 4  # not one more is asked for
    assert left_over(planned) == []
    assert store.list_keys("capture") == []


def test_a_whole_shard_is_committed_even_below_the_reserve(planned, engine):
    planned.store = store = QuotaStore(planned.tmp_path / "root")
    last = len(read_plan(load(store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids) + 2

    def others_write(number, aux, last_states):
        store.free = 0 if number == last else store.free
        return aux, last_states

    engine.disturb = others_write
    planned.run("capture", 0)
    assert [f.state for f in inspect(store, planned.refs[Kind.SHARD_PLAN])].count("ok") == 1


def test_the_disk_under_a_buckets_spool_counts_too(planned, monkeypatch):
    monkeypatch.setattr(LocalStore, "free_bytes", lambda self: None)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(0, 0, 5000))
    with pytest.raises(
        StorageFullError, match=r"jobs/capture-0/work: expected [\d,]+ bytes for the rest of a shard"
    ) as caught:
        planned.run("capture", 0)
    # Memory has no room either: the spool is there too, and with it what waits for the writers of three shards.
    waiting = int(re.search(r"shard, ([\d,]+) for states on their way", str(caught.value))[1].replace(",", ""))
    assert waiting > CALLERS * WAITING_BYTES


def test_a_shard_takes_no_more_than_was_asked_for(sealed):
    plan = read_plan(load(sealed.store, sealed.refs[Kind.SHARD_PLAN]))
    for shard in plan.shards:
        files = [file for file in Path(sealed.store.root, shard.key).iterdir() if file.is_file()]
        assert len(files) == 3
        taken = sum(-(-file.stat().st_size // 4096) * 4096 for file in files)
        assert plan.bytes_of(shard) < taken <= capture.need(plan, shard) <= taken + 10 * 4096


def test_a_shard_counts_until_its_states_are_on_the_disk(planned, engine, monkeypatch):
    """The last sample but one is captured, none is written: there has to be room for all of them."""
    planned.store = store = QuotaStore(planned.tmp_path / "root")
    go_on, real = threading.Event(), ShardWriter._store
    monkeypatch.setattr(ShardWriter, "_store", lambda *sample: go_on.wait(60) and real(*sample))
    samples = len(read_plan(load(store, planned.refs[Kind.SHARD_PLAN])).shards[0].sample_ids)

    def others_write(number, aux, last):
        store.free = rows(planned, 0) if number == samples else store.free
        return aux, last

    engine.disturb = others_write
    threading.Timer(5, go_on.set).start()
    with pytest.raises(StorageFullError, match=r"expected [\d,]+ bytes for the rest of a shard"):
        planned.run("capture", 0)


def test_the_preflight_asks_for_no_room_for_what_is_captured_already(sealed, monkeypatch):
    """Each night's run keeps the last one's shards: a disk that is half full of them is no obstacle."""
    from eagle3_core.engine import fingerprint
    from eagle3_core.stages import preflight

    monkeypatch.setattr(fingerprint, "require_known_good", lambda _device: {"sglang": "test"})
    per_token, captured = 4 * 8 * 4 + 5, sealed.refs[Kind.SHARD_PLAN].facts["tokens"]
    expected = 40 * (64 + 8) - captured
    store = QuotaStore(sealed.tmp_path / "root")
    store.free = expected * per_token
    assert preflight._space(sealed.config, store)["need_bytes"] == expected * per_token
    store.free -= 1
    with pytest.raises(StorageFullError, match=f"expected about {expected * per_token:,} bytes"):
        preflight._space(sealed.config, store)
    monkeypatch.setattr(fingerprint, "require_known_good", lambda _device: {"sglang": "newer"})
    with pytest.raises(StorageFullError, match=f"expected about {40 * 72 * per_token:,} bytes"):
        preflight._space(sealed.config, store)


class Bucket(LocalStore):
    """Stands where a bucket stands: no disk of its own, and what is put there is copied."""

    def free_bytes(self):
        return None

    def put_file(self, source, key, sha256):
        copy = Path(self.root) / f"{uuid.uuid4().hex}.upload"
        shutil.copyfile(source, copy)
        super().put_file(copy, key, sha256)


@contextlib.contextmanager
def mounted(directory, size):
    """Mount a disk of `size` bytes while the block runs."""
    directory.mkdir(exist_ok=True)
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(directory)], check=False)
    if done.returncode:
        pytest.skip("nothing can be mounted here")
    try:
        yield directory
    finally:
        subprocess.run(["umount", "-l", str(directory)], check=True)


@pytest.fixture
def three_at_once(monkeypatch):
    """Let the first three that are worked ahead on begin together once the own is committed; return who began."""
    record, commit, gate, began = capture._record, capture._commit, threading.Barrier(CALLERS), list[int]()
    committed = threading.Event()

    def record_together(context, shard, *arguments):
        if shard.index != context.index:
            began.append(shard.index)
            if len(began) <= CALLERS:
                assert committed.wait(60)
                gate.wait(60)
        return record(context, shard, *arguments)

    def commit_and_tell(context, plan, shard, staged):
        ref = commit(context, plan, shard, staged)
        if shard.index == context.index:
            committed.set()
        return ref

    monkeypatch.setattr(capture, "_record", record_together)
    monkeypatch.setattr(capture, "_commit", commit_and_tell)
    return began


def sound(flow):
    """Return how many shards are committed, each of them with every byte."""
    findings = inspect(flow.store, flow.refs[Kind.SHARD_PLAN])
    assert {finding.state for finding in findings} <= {"ok", "missing"}
    return [finding.state for finding in findings].count("ok")


def test_where_others_fill_the_disk_the_oldest_of_three_shards_is_finished(planned, engine, three_at_once, monkeypatch):
    monkeypatch.setattr("eagle3_core.data.shards.WAITING_BYTES", 0)  # what is captured is written: the room is small
    one = max(needed(planned, index) for index in range(5)) + 4096  # the ballast fills whole pages
    writing, written, abreast = threading.Lock(), [], threading.Barrier(CALLERS)
    with mounted(planned.tmp_path / "small", 16 * one) as disk:
        shutil.copytree(planned.store.root, disk / "root")
        planned.store, planned.tmp_path = LocalStore(disk / "root"), disk

        def others_write(number, aux, last):
            with writing:
                if len(three_at_once) == CALLERS and not written:
                    written.append(number)
                    (disk / "ballast").write_bytes(bytes(shutil.disk_usage(disk).free - one))
            if written:
                with contextlib.suppress(threading.BrokenBarrierError):
                    abreast.wait(5)  # until one of them stops
            return aux, last

        engine.disturb = others_write
        planned.run("capture", 0)
        states = [finding.state for finding in inspect(planned.store, planned.refs[Kind.SHARD_PLAN])]
        assert [states[index] for index in three_at_once[:CALLERS]].count("ok") == 1
        assert sound(planned) in (2, 3)  # its own, this one, and perhaps the last, which is small
        assert left_over(planned) == []
        (disk / "ballast").unlink()
        planned.capture_all()
        assert planned.run("seal").facts["shards"] == 5


@pytest.mark.parametrize("told", [True, False])
def test_shards_that_have_no_room_at_once_are_captured_one_after_the_other(planned, request, monkeypatch, told):
    """On a bucket's machine the room of one is free again when it is uploaded; `told`: whether figures say what is."""
    planned.store = Bucket(Path(planned.store.root))
    if not told:
        monkeypatch.setattr(Room, "_fits", lambda *_: True)
        request.getfixturevalue("three_at_once")
    largest = max(needed(planned, index) for index in range(5))
    with mounted(planned.tmp_path / "jobs", largest + 4 * 4096):
        planned.run("capture", 0)
        assert sound(planned) == 5
        assert left_over(planned) == []


@pytest.fixture
def small_disk(planned):
    """Mount 128 KiB where jobs work, with room for half a shard's rows; None where nothing can be mounted."""
    disk = planned.tmp_path / "jobs"
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=128k", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        yield None
        return
    (disk / "ballast").write_bytes(bytes(131072 - rows(planned, 0) // 2 // 4096 * 4096))
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def test_a_write_that_fails_fails_the_shard_at_once_and_it_is_captured_once_there_is_room(
    planned, engine, small_disk, monkeypatch
):
    shard = read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN])).shards[0]
    monkeypatch.setattr("eagle3_core.data.shards.WAITING_BYTES", 0)  # this engine computes nothing
    with monkeypatch.context() as patched:
        # The figures said that there is room: the disk says otherwise.
        patched.setattr("eagle3_core.data.room.Room._fits", lambda *_: True)
        if small_disk is None:
            simulate_a_full_disk(patched)
        with pytest.raises(StorageFullError, match=r"no space left writing .*; free space there and resume"):
            planned.run("capture", 0)
    assert len(engine.captured) < len(shard.sample_ids) + 3
    assert left_over(planned) == []
    assert planned.store.list_keys("capture") == []
    if small_disk is not None:
        (small_disk / "ballast").unlink()
    assert planned.run("capture", 0).facts["tokens"] == shard.tokens


def simulate_a_full_disk(monkeypatch):
    """Stand in where nothing can be mounted: the tenth write of a shard meets ENOSPC."""
    real, calls = Path.open, []

    class Full:
        def __init__(self, file):
            self.file = file

        def write(self, data):
            calls.append(len(data))
            if len(calls) > 10:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self.file.write(data)

        def __getattr__(self, name):
            return getattr(self.file, name)

    def opened(path, mode="r", *args, **more):
        file = real(path, mode, *args, **more)
        return Full(file) if path.name == "features.safetensors" and mode == "wb" else file

    monkeypatch.setattr(Path, "open", opened)
