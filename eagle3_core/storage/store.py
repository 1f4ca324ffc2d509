"""ObjectStore: the little that artifacts need from a directory or a bucket."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar, Protocol


class ObjectStore(Protocol):
    """Keys are relative, slash-separated paths below `root`; writes appear whole or not at all."""

    in_place: ClassVar[bool]
    """Whether a file that is put replaces another of its name; a bucket's files are named by content too."""

    @property
    def root(self) -> str:
        """Return the directory or the s3:// URI."""

    def read_bytes(self, key: str) -> bytes:
        """Return the object; FileNotFoundError if there is none."""

    def write_bytes(self, key: str, data: bytes) -> None:
        """Write or replace the object atomically and durably."""

    def swap(self, key: str, data: bytes, seen: bytes | None) -> bool:
        """Write the object if it still is `seen` (None: absent); tell whether it is there now.

        Of several writers that saw the same, one succeeds.
        """

    def put_file(self, source: Path, key: str, sha256: str) -> None:
        """Move (directory) or upload (bucket) a local file of that checksum to `key`, durably.

        `source` is gone or disposable after.
        """

    def remove(self, key: str) -> None:
        """Remove one object durably; absent is fine. A manifest goes before what it names."""

    def local_path(self, key: str, sha256: str) -> Path:
        """Return a local file with what `put_file` put there; FileNotFoundError if there is none.

        A directory's file is as it lies there, a bucket's was compared with `sha256` when it came.
        """

    def keep_local(self, key: str, sha256: str) -> Path | None:
        """Return the same, to stay while this store lives; None where a bucket's cache has no room for it."""

    def size(self, key: str, sha256: str) -> int:
        """Return the bytes of what `put_file` put there, none of which is read; FileNotFoundError if there is none."""

    def read_range(self, key: str, sha256: str, start: int, size: int) -> bytes:
        """Return a part of what `put_file` put there; FileNotFoundError if there is none."""

    def exists(self, key: str) -> bool:
        """Tell whether the object is there."""

    def modified_at(self, key: str) -> float:
        """Return when the object was written, in seconds since 1970; FileNotFoundError if there is none."""

    def list_keys(self, prefix: str) -> list[str]:
        """Return all keys below `prefix/`, sorted."""

    def move_prefix(self, source: str, target: str) -> None:
        """Move everything below `source/` to `target/`; for quarantine, never for commits."""

    def leftovers(self, older_than_s: float, *, remove: bool) -> list[str]:
        """Return what killed writers left behind, invisible as an object; with `remove` remove it."""

    def free_bytes(self) -> int | None:
        """Return the free space, or None where there is no such limit."""

    def claim(self, key: str, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[bool]:
        """Hold `key` against other processes; tells whether it is ours. See `LocalStore.claim`."""

    def claimed(self) -> dict[str, str]:
        """Return who holds what now: `claim_name` to words such as `process 17`, as far as this machine can tell."""


def claim_name(key: str) -> str:
    """Return the name of the claim on a key."""
    return key.replace("/", "-")


def open_store(root: str, cache_bytes: int | None = None) -> ObjectStore:
    """Return the store for a directory or an s3:// URI, of which at most `cache_bytes` are kept on this machine."""
    if root.startswith("s3://"):
        from eagle3_core.storage.s3_store import S3Store

        return S3Store(root) if cache_bytes is None else S3Store(root, cache_bytes)
    from eagle3_core.storage.local import LocalStore

    return LocalStore(Path(root))
