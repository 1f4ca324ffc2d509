"""A directory as a store: durable, confined, and clear about what it cannot do."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.errors import InputError, StorageFullError
from eagle3_core.storage import commit, find, full_disk_is_typed, open_store, verify


def test_a_root_that_cannot_be_made_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="choose a writable root"):
        open_store(str(tmp_path / "file" / "root"))


def test_a_root_that_cannot_be_written_is_refused(tmp_path, monkeypatch):
    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(os, "access", lambda *_: False)
    with pytest.raises(InputError, match="not writable by this user"):
        open_store(str(tmp_path / "root"))


def test_a_key_cannot_leave_the_root(tmp_path):
    store = open_store(str(tmp_path / "root"))
    with pytest.raises(InputError, match="leaves the root"):
        store.write_bytes("../outside", b"")


def test_temporary_files_are_not_listed(tmp_path):
    store = open_store(str(tmp_path / "root"))
    store.write_bytes("a/b/c", b"1")
    (tmp_path / "root" / "a" / ".b.123.tmp").write_bytes(b"torn")
    assert store.list_keys("a") == ["a/b/c"]
    assert store.list_keys("nothing") == []


def test_a_claim_holds_against_another_process_and_ends_with_it(tmp_path):
    store = open_store(str(tmp_path))
    code = (
        "import sys; from eagle3_core.storage import open_store\n"
        f"with open_store({str(tmp_path)!r}).claim('capture/a/00001') as ours:\n"
        "    print(ours, flush=True); sys.stdin.read()"
    )
    other = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert other.stdout.readline() == "True\n"
    with store.claim("capture/a/00001") as ours:
        assert not ours
    with store.claim("capture/a/00002") as ours:
        assert ours
    other.kill()
    other.communicate()
    with store.claim("capture/a/00001", list) as ours:
        assert ours


@pytest.fixture
def small_disk(tmp_path):
    """Return a file system of one MiB, or a failure: as root of a container this can be mounted."""
    disk = tmp_path / "small"
    disk.mkdir()
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False)
    if mounted.returncode:
        yield None
        return
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def full_file(path: Path) -> Path:
    path.mkdir(exist_ok=True)
    (path / "data.bin").write_bytes(os.urandom(900_000))
    return path


def test_a_full_disk_leaves_nothing_half_written_and_work_goes_on_once_it_is_freed(small_disk, tmp_path, monkeypatch):
    if small_disk is None:
        simulate_a_full_disk(monkeypatch)
        small_disk = tmp_path / "full"
    store = open_store(str(small_disk / "root"))
    first = commit(store, "seal/one", full_file(tmp_path / "staged"), Kind.FEATURE_SET)
    with pytest.raises(StorageFullError, match="free space there and resume"):
        commit(store, "seal/two", full_file(tmp_path / "staged"), Kind.FEATURE_SET)
    assert find(store, "seal/two") is None
    assert not (small_disk / "root" / "seal" / "two" / "data.bin").exists()
    verify(store, first)
    (small_disk / "root" / "seal" / "one" / "data.bin").unlink()
    monkeypatch.undo()
    verify(store, commit(store, "seal/two", full_file(tmp_path / "staged"), Kind.FEATURE_SET))


def simulate_a_full_disk(monkeypatch):
    """Stand in where nothing can be mounted: the second file meets ENOSPC after half of it."""
    from eagle3_core.storage import local

    real, calls = os.replace, []

    def replace(source, target):
        if str(source).endswith("data.bin"):
            calls.append(target)
            if len(calls) > 1:
                raise OSError(28, "No space left on device")
        real(source, target)

    monkeypatch.setattr(local.Path, "replace", lambda self, target: replace(self, target))


@pytest.mark.parametrize("code", [28, 122])
def test_a_full_disk_under_safetensors_own_writes_is_typed(tmp_path, code):
    from safetensors import SafetensorError

    with pytest.raises(StorageFullError, match="resume"), full_disk_is_typed(tmp_path):
        raise SafetensorError(f"Error while serializing: I/O error: no room (os error {code})")
    with pytest.raises(SafetensorError), full_disk_is_typed(tmp_path):
        raise SafetensorError("I/O error: Permission denied (os error 13)")


def test_leftovers_are_old_temporary_files_and_nothing_else(tmp_path):
    store = open_store(str(tmp_path))
    store.write_bytes("seal/a/data.bin", b"whole")
    old, young = tmp_path / "seal/a/.data.bin.12345678.tmp", tmp_path / "seal/a/.data.bin.87654321.tmp"
    for path in (old, young):
        path.write_bytes(b"torn")
    os.utime(old, (0, 0))
    assert store.leftovers(86400, remove=False) == ["seal/a/.data.bin.12345678.tmp"]
    assert old.exists()
    assert store.leftovers(86400, remove=True) == ["seal/a/.data.bin.12345678.tmp"]
    assert not old.exists()
    assert young.exists()
    assert store.list_keys("seal") == ["seal/a/data.bin"]
