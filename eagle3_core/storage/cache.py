"""A directory of downloaded files that keeps to a number of bytes: what was not used for longest goes first."""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.storage.local import full_disk_is_typed, locked

_LOCK, _TEMP = "lock", ".tmp"


@dataclass(frozen=True)
class ByteCache:
    """Files of at most `limit` bytes together, shared by all processes of a machine.

    Never more than half of the free disk either. Files in use (see `using`) are not removed.
    """

    directory: Path
    limit: int

    def file(self, name: str, filename: str, size: int, download: Callable[[Path], None]) -> Path:
        """Return the file called `name`, downloaded where it is not there yet, whatever room there is."""
        target = self._entry(name, filename)
        if not self._there(target, size):
            with self._alone():
                self._make_room(size)
                self._fill(target, size, download)
        return target

    def using(self, name: str, filename: str, size: int, download: Callable[[Path], None]) -> tuple[Path, int] | None:
        """Return the same, and a descriptor that keeps the file while it is open; None where there is no room."""
        target = self._entry(name, filename)
        with self._alone():
            if not self._there(target, size):
                if not self._make_room(size):
                    return None
                self._fill(target, size, download)
            descriptor = os.open(target, os.O_RDONLY)
            fcntl.flock(descriptor, fcntl.LOCK_SH)
        return target, descriptor

    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(path.stat().st_size for path in self._files())

    def _entry(self, name: str, filename: str) -> Path:
        return self.directory / name[:2] / name / filename

    def _there(self, target: Path, size: int) -> bool:
        try:
            there = target.stat().st_size == size
        except FileNotFoundError:
            return False
        if there:
            # The time of its last use; a file system may be mounted without.
            with contextlib.suppress(FileNotFoundError):
                os.utime(target)
        return there

    def _fill(self, target: Path, size: int, download: Callable[[Path], None]) -> None:
        if self._there(target, size):
            return
        target.parent.mkdir(parents=True, exist_ok=True)
        temp = target.with_name(f".{target.name}{_TEMP}")
        try:
            with full_disk_is_typed(target):
                download(temp)
            temp.replace(target)
        finally:
            temp.unlink(missing_ok=True)

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Let one process at a time change the directory, so that the bytes are counted right."""
        self.directory.mkdir(parents=True, exist_ok=True)
        with locked(self.directory / _LOCK, on_wait=lambda: None):
            # Whoever was killed in a download left a part of it: a library may have added to the name.
            for left in self.directory.glob(f"*/*/.*{_TEMP}*"):
                left.unlink(missing_ok=True)
            yield

    def _make_room(self, size: int) -> bool:
        """Remove what was not used for longest until `size` more fit; tell whether they do."""
        files = {path: path.stat() for path in self._files()}
        held = sum(status.st_size for status in files.values())
        limit = min(self.limit, held + shutil.disk_usage(self.directory).free // 2)
        for path, status in sorted(files.items(), key=lambda item: item[1].st_mtime_ns):
            if held + size <= limit:
                break
            if size <= limit and _remove_unused(path):
                held -= status.st_size
        return held + size <= limit

    def _files(self) -> Iterator[Path]:
        return (path for path in self.directory.glob("*/*/*") if path.is_file() and not path.name.startswith("."))


def _remove_unused(path: Path) -> bool:
    try:
        with path.open("rb") as file:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            path.unlink()
    except (BlockingIOError, FileNotFoundError):
        return False
    with contextlib.suppress(OSError):
        path.parent.rmdir()
    return True
