"""Committed or absent, at any moment of a crash; every damaged byte is found."""

import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.errors import ArtifactError, CorruptArtifactError, NotCommittedError, UnknownSchemaError
from eagle3_core.storage import commit, find, load, open_store, quarantine, verify
from eagle3_core.storage.local import LocalStore

KEY = "seal/abc"


class CrashError(Exception):
    """The machine went down."""


class CrashingStore(LocalStore):
    """Dies before its n-th change."""

    def __init__(self, directory, alive):
        super().__init__(directory)
        self.alive = alive

    def _change(self):
        if self.alive == 0:
            raise CrashError
        self.alive -= 1

    def write_bytes(self, key, data):
        self._change()
        super().write_bytes(key, data)

    def swap(self, key, data, seen):
        self._change()
        return super().swap(key, data, seen)

    def put_file(self, source, key, sha256):
        self._change()
        super().put_file(source, key, sha256)

    def remove(self, key):
        self._change()
        super().remove(key)


def stage(tmp_path, version):
    staged = tmp_path / "staged"
    (staged / "deep").mkdir(parents=True, exist_ok=True)
    (staged / "one.bin").write_bytes(bytes([version]) * 1000)
    (staged / "deep" / "two.bin").write_bytes(bytes([version + 100]) * 500)
    return staged


@pytest.fixture
def store(tmp_path):
    return open_store(str(tmp_path / "root"))


@pytest.fixture
def committed(store, tmp_path):
    return commit(store, KEY, stage(tmp_path, 1), Kind.FEATURE_SET, facts={"hidden": 1}, ref_facts={"samples": 3})


def test_what_was_committed_is_found_and_verified(store, committed):
    assert find(store, KEY) == committed
    artifact = verify(store, committed)
    assert artifact.path("deep/two.bin").read_bytes() == b"e" * 500
    assert committed.facts == {"samples": 3}
    assert artifact.manifest.facts["hidden"] == 1


def test_equal_content_has_an_equal_reference(store, committed, tmp_path):
    again = commit(
        store, "seal/other", stage(tmp_path, 1), Kind.FEATURE_SET, facts={"hidden": 1}, ref_facts={"samples": 3}
    )
    assert again.manifest_sha256 == committed.manifest_sha256


@pytest.mark.parametrize("alive", range(7))
def test_a_crash_at_any_write_leaves_the_old_the_new_or_none_but_no_mixture(tmp_path, alive):
    old = commit(LocalStore(tmp_path / "root"), KEY, stage(tmp_path, 1), Kind.FEATURE_SET)
    store = CrashingStore(tmp_path / "root", alive)
    new = None
    try:
        new = commit(store, KEY, stage(tmp_path, 2), Kind.FEATURE_SET, replace=True)
    except CrashError:
        assert alive < 4
    after = LocalStore(tmp_path / "root")
    found = find(after, KEY)
    if found is not None:
        verify(after, found)
        assert found == (new or old)
    whole = commit(after, KEY, stage(tmp_path, 2), Kind.FEATURE_SET, replace=True)
    verify(after, whole)


@pytest.mark.parametrize("alive", range(3))
def test_a_crash_of_the_first_commit_leaves_nothing_committed(tmp_path, alive):
    with pytest.raises(CrashError):
        commit(CrashingStore(tmp_path / "root", alive), KEY, stage(tmp_path, 1), Kind.FEATURE_SET)
    assert find(LocalStore(tmp_path / "root"), KEY) is None


def test_a_write_that_fails_leaves_no_temporary_file(store, tmp_path, monkeypatch):
    monkeypatch.setattr("os.fsync", lambda _: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(OSError, match="Input/output"):
        store.write_bytes("a/b", b"data")
    assert store.list_keys("a") == []
    assert list((tmp_path / "root" / "a").iterdir()) == []


@pytest.mark.parametrize("position", range(0, 420, 7))
def test_every_damaged_byte_of_a_manifest_is_found(store, committed, tmp_path, position):
    path = tmp_path / "root" / KEY / "manifest.json"
    data = bytearray(path.read_bytes())
    position %= len(data)
    if data[position : position + 1].isspace():
        position = data.index(b"0")
    data[position] ^= 1
    path.write_bytes(data)
    with pytest.raises(ArtifactError):
        load(store, KEY)


@pytest.mark.parametrize("damage", ["truncated", "zeroed half", "one bit", "missing", "empty"])
@pytest.mark.parametrize("name", ["one.bin", "deep/two.bin", "manifest.json"])
def test_every_kind_of_damage_is_found_and_goes_to_quarantine_with_its_reason(store, committed, tmp_path, name, damage):
    path = tmp_path / "root" / KEY / name
    data = bytearray(path.read_bytes())
    half = len(data) // 2
    if damage == "missing":
        path.unlink()
    else:
        if damage == "one bit":
            data[half] ^= 4
        if damage == "zeroed half":
            data[half:] = bytes(len(data) - half)
        path.write_bytes({"truncated": data[:half], "empty": b""}.get(damage, data))
    with pytest.raises((CorruptArtifactError, NotCommittedError)) as caught:
        verify(store, committed)
    moved = quarantine(store, KEY, str(caught.value))
    assert find(store, KEY) is None
    assert json.loads(store.read_bytes(f"{moved}/reason.json"))["reason"] == str(caught.value)
    assert store.exists(f"{moved}/deep/two.bin") or damage == "missing"


def test_of_two_that_find_the_same_damage_neither_fails(store, committed):
    first, second = quarantine(store, KEY, "damaged"), quarantine(store, KEY, "damaged")
    assert store.exists(f"{first}/one.bin")
    assert store.list_keys(second) == [f"{second}/reason.json"]


def test_a_reference_to_another_manifest_is_refused(store, committed, tmp_path):
    commit(store, KEY, stage(tmp_path, 2), Kind.FEATURE_SET, replace=True)
    with pytest.raises(CorruptArtifactError, match="expected manifest"):
        load(store, committed)


def test_a_newer_schema_is_refused_with_what_to_do(store, committed, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.manifest.SCHEMA", "eagle3/manifest/0")
    with pytest.raises(UnknownSchemaError, match="upgrade eagle3-pipeline"):
        load(store, committed)
