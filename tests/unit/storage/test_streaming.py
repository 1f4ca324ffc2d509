"""Features of a bucket: what fits is kept whole on this machine, the rest is read by range, and both are the same."""

import json
import os
import threading
import time

import pytest
import torch

from eagle3_core.artifacts import Kind
from eagle3_core.data.features import FeatureSet
from eagle3_core.errors import CorruptArtifactError
from eagle3_core.storage import commit, load, open_store
from eagle3_core.storage.cache import ByteCache
from eagle3_core.train.loader import batches


@pytest.fixture
def features_on(s3, flow_on):
    """Return a function that opens the same feature set of five shards with a cache of some bytes."""
    flow = flow_on("s3://bucket/root")
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        flow.run(name)
    flow.capture_all()
    sealed = flow.run("seal")
    stored = [item for item in s3.list_objects_v2(Bucket="bucket")["Contents"] if "features" in item["Key"]]

    def opened(cache_bytes, where):
        os.environ["EAGLE3_S3_CACHE"] = str(flow.tmp_path / where)
        return FeatureSet.open(open_store("s3://bucket/root", cache_bytes), sealed)

    opened.sizes = [item["Size"] for item in stored]
    return opened


def equal(one, other):
    return all(
        torch.equal(getattr(one, name).nan_to_num(7.5), getattr(other, name).nan_to_num(7.5))
        for name in ("input_ids", "loss_mask", "aux_hidden_states", "last_hidden_state")
    )


def test_a_cache_smaller_than_the_features_gives_the_same_keeps_its_limit_and_downloads_no_shard_twice(
    features_on, server
):
    everything = features_on(1 << 30, "all")
    expected = [everything.read(sample) for sample in range(len(everything))]
    sizes = features_on.sizes
    assert len(sizes) == 5
    small = 20_000  # of the index and the names, beside the shards
    features = features_on(sum(sizes) // 2 + small, "half")
    server.requests.clear()
    for _epoch in range(2):
        for sample in torch.randperm(len(features), generator=torch.Generator().manual_seed(1)).tolist():
            assert equal(features.read(sample), expected[sample])
            assert features.artifact.store.cache.bytes() <= sum(sizes) // 2 + small
    kept = list(features.artifact.store.cache.directory.rglob("features.safetensors"))
    assert 1 <= len(kept) < 5
    nothing = features_on(0, "none")
    assert all(equal(nothing.read(sample), expected[sample]) for sample in range(len(nothing)))
    assert list(nothing.artifact.store.cache.directory.rglob("features.safetensors")) == []


@pytest.mark.parametrize("times", [1, 2, 1000])
def test_rows_that_were_damaged_on_their_way_are_asked_for_again_and_never_handed_out(features_on, monkeypatch, times):
    features, damaged = features_on(0, "none"), []
    expected = features.read(0)
    real = type(features.artifact.store).read_range

    def read_range(store, key, sha256, start, size):
        data = real(store, key, sha256, start, size)
        if start > 1000 and len(damaged) < times:  # the header is behind us
            damaged.append(start)
            return bytes([data[0] ^ 1]) + data[1:]
        return data

    monkeypatch.setattr(type(features.artifact.store), "read_range", read_range)
    if times < 3:
        assert equal(features.read(0), expected)
    else:
        with pytest.raises(CorruptArtifactError, match=r"expected xxh3 .* 3 times; repair it"):
            features.read(0)
    assert len(damaged) == min(times, 3)


def test_what_is_held_stays_and_what_was_not_used_for_longest_goes(tmp_path):
    cache = ByteCache(tmp_path, 250)
    made = []

    def download(path):
        made.append(path)
        path.write_bytes(b"x" * 100)

    def kept(name):
        return cache.hold(name, "f", 100, download, needed=False)

    first = kept("first")
    second = cache.hold("second", "f", 100, download).path
    os.utime(second, (1, 1))
    os.utime(first.path, (0, 0))
    third = kept("third")
    assert not second.exists()
    assert kept("fourth") is None
    assert kept("first").path == first.path
    assert cache.bytes() == 200
    needed = cache.hold("fifth", "f", 100, download)
    assert needed.path.read_bytes() == b"x" * 100
    gone = first.path
    del first
    os.utime(gone, (0, 0))
    del needed
    fourth = kept("fourth")
    assert fourth is not None
    assert not gone.exists()
    assert third.path.exists()
    assert cache.bytes() == 200
    assert len(made) == 5


def test_of_two_that_want_the_same_at_once_one_downloads_it_and_room_is_made_once(tmp_path):
    cache, begun, made = ByteCache(tmp_path, 250), threading.Event(), []
    cache.hold("old", "f", 100, lambda path: path.write_bytes(b"x" * 100))

    def download(path):
        made.append(path)
        begun.set()
        # The other is at the lock now, or comes once the file is there.
        time.sleep(0.3)
        path.write_bytes(b"x" * 100)

    first = threading.Thread(target=lambda: cache.hold("new", "f", 100, download))
    first.start()
    assert begun.wait(20)
    cache.hold("new", "f", 100, download)
    first.join()
    assert (len(made), cache.bytes()) == (1, 200)


def test_a_file_that_was_just_asked_for_is_there_until_it_can_be_opened(s3, tmp_path):
    store, paths = open_store("s3://bucket/root", 1000), []
    staged = tmp_path / "staged"
    for number in range(10):
        staged.mkdir(exist_ok=True)
        (staged / "f").write_bytes(bytes([number]) * 900)
        paths.append(load(store, commit(store, f"capture/i/{number}", staged, Kind.SHARD)).path("f"))
    assert [path.exists() for path in paths] == [False] * 4 + [True] * 6
    assert store.cache.bytes() == 6 * 900


def test_what_a_killed_download_left_is_removed_and_counts_for_nothing(tmp_path):
    cache = ByteCache(tmp_path, 250)
    torn = tmp_path / "ab/abc/.f.tmp.4Fa1"
    torn.parent.mkdir(parents=True)
    torn.write_bytes(b"x" * 200)
    cache.hold("second", "f", 100, lambda path: path.write_bytes(b"x" * 100))
    assert not torn.exists()
    assert cache.bytes() == 100


def test_a_shard_that_was_cut_off_is_found_by_its_header_where_it_is_read_by_range(features_on, s3, server):
    features = features_on(0, "none")
    [key, *_] = [item["Key"] for item in s3.list_objects_v2(Bucket="bucket")["Contents"] if "features" in item["Key"]]
    for item in s3.list_objects_v2(Bucket="bucket")["Contents"]:
        if "features" in item["Key"]:
            s3.put_object(Bucket="bucket", Key=item["Key"], Body=b"\x10" + bytes(200))
    assert key
    with pytest.raises(CorruptArtifactError, match="repair it"):
        features.read(0)


def test_rows_read_ahead_are_the_rows_in_order_and_a_fault_comes_where_its_row_does(sealed):
    features = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    rows = [(3, 1, 4), (1,), (5, 9, 2, 6)]
    cpu = torch.device("cpu")
    for row, batch in zip(rows, batches(features, iter(rows), cpu, torch.float32), strict=True):
        expected = torch.cat([features.read(sample).aux_hidden_states for sample in row])
        assert torch.equal(batch.aux_hidden_states, expected.float())
        assert batch.samples == row
        assert batch.lengths == tuple(int(features.lengths[sample]) for sample in row)
    path = sealed.tmp_path / "root" / sealed.shard_key(0) / "manifest.json"
    values = json.loads(path.read_text())
    path.write_text(json.dumps(values | {"kind": "corpus"}))
    fresh = FeatureSet.open(sealed.store, sealed.refs[Kind.FEATURE_SET])
    ahead = batches(fresh, iter([(len(fresh) - 1,), (0,)]), cpu, torch.float32)
    assert next(ahead).lengths
    with pytest.raises(CorruptArtifactError):
        next(ahead)
