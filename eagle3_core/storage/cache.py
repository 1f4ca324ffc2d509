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


class Held:
    """A file of the cache, which nobody removes as long as this object lives."""

    def __init__(self, path: Path) -> None:
        """Open and share it.

        Raises:
            FileNotFoundError: it is not there, or was removed this very moment.
        """
        self._descriptor = os.open(path, os.O_RDONLY)
        self.path = path
        fcntl.flock(self._descriptor, fcntl.LOCK_SH)
        if not os.path.samestat(os.fstat(self._descriptor), path.stat()):
            raise FileNotFoundError(path)

    def __del__(self) -> None:
        """Let it go."""
        if hasattr(self, "_descriptor"):
            os.close(self._descriptor)


@dataclass(frozen=True)
class ByteCache:
    """Files of at most `limit` bytes together, shared by all processes of a machine.

    Never more than half of the free disk either. Files that somebody holds are not removed.
    """

    directory: Path
    limit: int

    def hold(
        self, name: str, filename: str, size: int, download: Callable[[Path], None], *, needed: bool = True
    ) -> Held | None:
        """Return the file called `name`, downloaded where it is not there yet.

        One that is not `needed` as a file is None where there is no room for it; another comes in spite of the limit.
        """
        target = self.directory / name[:2] / name / filename
        if (held := self._held(target, size)) is not None:
            return held
        with self._alone():
            # Another process may have fetched it meanwhile.
            if (held := self._held(target, size)) is None and (self._make_room(size) or needed):
                self._fill(target, download)
                held = Held(target)
            return held

    def bytes(self) -> int:
        """Return the bytes of all files."""
        return sum(path.stat().st_size for path in self._files())

    def _held(self, target: Path, size: int) -> Held | None:
        try:
            held = Held(target)
            if target.stat().st_size != size:
                return None
            # The time of its last use; a file system may be mounted without.
            os.utime(target)
        except FileNotFoundError:
            return None
        return held

    def _fill(self, target: Path, download: Callable[[Path], None]) -> None:
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
