"""A directory as an ObjectStore: temp file, fsync, rename, fsync of the directory."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import ClassVar

from eagle3_core.errors import InputError, StorageFullError
from eagle3_core.storage.store import claim_name


class LocalStore:
    """Objects are files below one directory."""

    in_place: ClassVar[bool] = True

    def __init__(self, directory: Path) -> None:
        """Use `directory`, made if absent.

        Raises:
            InputError: it cannot be made or written.
        """
        try:
            self._directory = directory.expanduser().resolve()
            self._directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise InputError(f"root {directory}: cannot be made ({error.strerror}); choose a writable root") from None
        if not os.access(self._directory, os.W_OK | os.X_OK):
            raise InputError(f"root {directory}: not writable by this user; choose a writable root")

    @property
    def root(self) -> str:
        """Return the directory."""
        return str(self._directory)

    def _file(self, key: str) -> Path:
        path = (self._directory / key).resolve()
        if not path.is_relative_to(self._directory):
            raise InputError(f"key {key!r} leaves the root {self._directory}")
        return path

    def read_bytes(self, key: str) -> bytes:
        """Return the object."""
        return self._file(key).read_bytes()

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write or replace the object atomically and durably."""
        target = self._file(key)
        with full_disk_is_typed(target), _temp_beside(target) as temp:
            temp.write_bytes(data)
            to_disk(temp)
            temp.replace(target)
            to_disk(target.parent)

    def swap(self, key: str, data: bytes, seen: bytes | None) -> bool:
        """Write the object if it still is `seen` (None: absent); tell whether it did."""
        target = self._file(key)
        with full_disk_is_typed(target), _temp_beside(target) as temp:
            temp.write_bytes(data)
            to_disk(temp)
            if seen is None:
                try:
                    os.link(temp, target)
                except FileExistsError:
                    return target.read_bytes() == data
            else:
                # Only reading and replacing under one lock is one step.
                with self.claim("swap", on_wait=lambda: None):
                    if not target.is_file() or target.read_bytes() not in (seen, data):
                        return False
                    temp.replace(target)
            to_disk(target.parent)
        return True

    def put_file(self, source: Path, key: str, sha256: str) -> None:
        """Move a local file to `key`, durably."""
        del sha256
        target = self._file(key)
        with full_disk_is_typed(target), _temp_beside(target) as temp:
            # safetensors gives its files to their maker alone; an engine may run as somebody else.
            source.chmod(_file_mode())
            if source.stat().st_dev == target.parent.stat().st_dev:
                to_disk(source)
                source.replace(target)
            else:
                shutil.copyfile(source, temp)
                to_disk(temp)
                temp.replace(target)
            to_disk(target.parent)

    def remove(self, key: str) -> None:
        """Remove one file durably."""
        target = self._file(key)
        if target.exists():
            target.unlink()
            to_disk(target.parent)

    def local_path(self, key: str, sha256: str) -> Path:
        """Return the file itself."""
        del sha256
        path = self._file(key)
        if not path.is_file():
            raise FileNotFoundError(path)
        return path

    def keep_local(self, key: str, sha256: str) -> Path | None:
        """Return the file itself."""
        return self.local_path(key, sha256)

    def size(self, key: str, sha256: str) -> int:
        """Return the size of the file."""
        return self.local_path(key, sha256).stat().st_size

    def read_range(self, key: str, sha256: str, start: int, size: int) -> bytes:
        """Return a part of the file."""
        with self.local_path(key, sha256).open("rb") as file:
            file.seek(start)
            return file.read(size)

    def exists(self, key: str) -> bool:
        """Tell whether the file is there."""
        return self._file(key).is_file()

    def modified_at(self, key: str) -> float:
        """Return when the file was written."""
        return self._file(key).stat().st_mtime

    def list_keys(self, prefix: str) -> list[str]:
        """Return all keys below `prefix/`, temporary files left out."""
        top = self._file(prefix)
        found = (path for path in top.rglob("*") if path.is_file() and not path.name.endswith(".tmp"))
        return sorted(str(path.relative_to(self._directory)) for path in found)

    def move_prefix(self, source: str, target: str) -> None:
        """Rename a directory."""
        origin, destination = self._file(source), self._file(target)
        with full_disk_is_typed(destination):
            _make_directory(destination.parent)
            origin.rename(destination)
        to_disk(destination.parent)
        to_disk(origin.parent)

    def leftovers(self, older_than_s: float, *, remove: bool) -> list[str]:
        """Return the temporary files that killed writers left; with `remove` delete them."""
        now, found = time.time(), []
        for path in self._directory.rglob(".*.tmp"):
            if path.is_file() and now - path.stat().st_mtime > older_than_s:
                found.append(str(path.relative_to(self._directory)))
                if remove:
                    path.unlink(missing_ok=True)
        return sorted(found)

    def free_bytes(self) -> int | None:
        """Return what this user may still write."""
        return shutil.disk_usage(self._directory).free

    @contextlib.contextmanager
    def claim(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
        """Hold `key` against other processes while the block runs; a process that dies loses its claim.

        Yields:
            Whether it is ours. Where another process has it: False at once, or after `on_wait` and a wait True.
        """
        path = self._file(f"claims/{claim_name(key)}")
        path.parent.mkdir(parents=True, exist_ok=True)
        with locked(path, on_wait) as ours:
            yield ours

    def claimed(self) -> dict[str, str]:
        """Return who holds what, as the kernel tells it of this machine's processes; nothing is locked to find out."""
        held = {}
        with contextlib.suppress(OSError):
            for line in Path("/proc/locks").read_text(encoding="ascii").splitlines():
                fields = line.split()
                if fields[1] == "FLOCK":  # who waits has an arrow there
                    held[fields[5]] = f"process {fields[4]}"
        found = {}
        for path in self._file("claims").glob("*"):
            status = path.stat()
            place = f"{os.major(status.st_dev):02x}:{os.minor(status.st_dev):02x}:{status.st_ino}"
            if place in held:
                found[path.name] = held[place]
        return found


@contextlib.contextmanager
def locked(path: Path, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
    """Hold the file `path` against other processes; see `LocalStore.claim` for what is yielded."""
    with path.open("wb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if on_wait is None:
                yield False
                return
            on_wait()
            fcntl.flock(file, fcntl.LOCK_EX)
        yield True


_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def full_disk_is_typed(where: Path) -> Iterator[None]:
    """Turn a full disk or quota into a StorageFullError that names `where`."""
    try:
        yield
    except Exception as error:
        if not _says_full(error):
            raise
        raise StorageFullError(f"no space left writing {where}; free space there and resume") from None


def _says_full(error: Exception) -> bool:
    """Whether the disk or the quota is full; safetensors writes by itself and names the cause in its text alone."""
    if isinstance(error, OSError):
        return error.errno in _FULL
    return type(error).__name__ == "SafetensorError" and any(f"(os error {code})" in str(error) for code in _FULL)


@contextlib.contextmanager
def _temp_beside(target: Path) -> Iterator[Path]:
    """Make the target's directory, yield a fresh name in it, leave nothing under that name."""
    _make_directory(target.parent)
    temp = target.with_name(f".{target.name}.{uuid.uuid4().hex[:8]}.tmp")
    try:
        yield temp
    finally:
        temp.unlink(missing_ok=True)


def _make_directory(path: Path) -> None:
    """Make a directory; a new one is durable only when its parent is synced too."""
    if path.is_dir():
        return
    _make_directory(path.parent)
    path.mkdir(exist_ok=True)
    to_disk(path.parent)


def _file_mode() -> int:
    """Return the mode a new file gets from this process's umask, which only /proc tells without changing it."""
    status = Path("/proc/self/status")
    lines = status.read_text(encoding="ascii", errors="replace").splitlines() if status.is_file() else []
    masks = [line.split()[1] for line in lines if line.startswith("Umask:")]
    return 0o666 & ~int(masks[0] if masks else "022", 8)


def to_disk(path: Path) -> None:
    """Return once the content of a file, or the names in a directory, have reached the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
