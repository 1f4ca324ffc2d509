"""An S3 prefix as an ObjectStore: files are named by content, so that no writer can harm what another has committed."""

from __future__ import annotations

import hashlib
import os
import tempfile
from collections import deque
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import ClassVar
from urllib.parse import urlsplit

from eagle3_core.errors import CorruptArtifactError, InputError
from eagle3_core.pipeline import STAGES
from eagle3_core.storage.cache import ByteCache, Held
from eagle3_core.storage.claims import BucketClaims
from eagle3_core.storage.s3 import Bucket

CACHE_BYTES = 64 << 30
_NAME_DIGITS = 16
_DOWNLOADS = 2
_RECENT = 5
"""Files that were asked for last, which stay a while: more than there are readers at once."""


class S3Store:
    """Objects below one bucket prefix; downloads go to a local cache of bounded size."""

    in_place: ClassVar[bool] = False

    def __init__(self, root: str, cache_bytes: int = CACHE_BYTES) -> None:
        """Use s3://bucket/prefix; downloads lie in EAGLE3_S3_CACHE or the system's directory for temporary files.

        Raises:
            InputError: the URI has no bucket.
        """
        parts = urlsplit(root)
        if not parts.netloc:
            raise InputError(f"root {root!r}: expected s3://bucket/prefix")
        self._prefix = parts.path.strip("/")
        default = Path(tempfile.gettempdir()) / f"eagle3-s3-cache-{os.getuid()}"
        directory = Path(os.environ.get("EAGLE3_S3_CACHE", default))
        self.cache = ByteCache(directory / "files", cache_bytes)
        self._bucket = Bucket(parts.netloc)
        mine = hashlib.sha256(self.root.encode()).hexdigest()[:16]
        self._claims = BucketClaims(self._bucket, self._key("claims"), directory / "claims" / mine)
        self._conditions_hold = False
        self._recent: deque[Held] = deque(maxlen=_RECENT)
        self._kept: list[Held] = []

    @property
    def root(self) -> str:
        """Return the URI."""
        return f"s3://{self._bucket.name}/{self._prefix}".rstrip("/")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}".lstrip("/")

    def _named(self, key: str, sha256: str) -> str:
        folder, _, name = self._key(key).rpartition("/")
        return f"{folder}/{sha256[:_NAME_DIGITS]}/{name}"

    def read_bytes(self, key: str) -> bytes:
        """Return the object."""
        return self._bucket.get(self._key(key))[0]

    def write_bytes(self, key: str, data: bytes) -> None:
        """Put the object; S3 shows it whole or not at all."""
        self._bucket.put(self._key(key), data)

    def swap(self, key: str, data: bytes, seen: bytes | None) -> bool:
        """Write the object if it still is `seen` (None: absent); tell whether it did.

        Raises:
            InputError: the store does not know, or does not heed, conditional writes.
        """
        self._require_conditions()
        if seen is None:
            return self._bucket.put_if(self._key(key), data, IfNoneMatch="*")
        try:
            found, etag = self._bucket.get(self._key(key))
        except FileNotFoundError:
            return False
        return found == data or (found == seen and self._bucket.put_if(self._key(key), data, IfMatch=etag))

    def _require_conditions(self) -> None:
        """Prove once that a second write under "if none is there" is refused: some stores answer as if it were not."""
        probe = self._key("conditional-write-probe")
        if not self._conditions_hold:
            wrote = [self._bucket.put_if(probe, os.urandom(16), IfNoneMatch="*") for _ in range(2)]
            if wrote[1]:
                raise InputError(
                    f"root {self.root}: the store overwrites an object in spite of If-None-Match, so that two runs "
                    "could overwrite each other; use a store that heeds it, or a directory"
                )
            self._conditions_hold = True

    def put_file(self, source: Path, key: str, sha256: str) -> None:
        """Upload a file, its bytes compared after; two writers of different content never share an object.

        Raises:
            StoreUnreachableError: other bytes arrived.
        """
        self._bucket.upload(source, self._named(key, sha256))

    def remove(self, key: str) -> None:
        """Delete the object."""
        self._bucket.delete(self._key(key))

    def local_path(self, key: str, sha256: str) -> Path:
        """Return a cached copy, downloaded once per ETag and compared with `sha256` then."""
        held = self.cache.hold(*self._cached(key, sha256))
        assert held is not None
        # Whoever asked opens it in a moment: another reader's download must not take it away before.
        self._recent.append(held)
        return held.path

    def keep_local(self, key: str, sha256: str) -> Path | None:
        """Return a cached copy that stays while this store lives; None where the cache has no room for it."""
        held = self.cache.hold(*self._cached(key, sha256), needed=False)
        if held is None:
            return None
        self._kept.append(held)
        return held.path

    def size(self, key: str, sha256: str) -> int:
        """Return the size of the object."""
        return int(self._bucket.head(self._named(key, sha256))["ContentLength"])

    def read_range(self, key: str, sha256: str, start: int, size: int) -> bytes:
        """Return a part of a file; nothing is kept."""
        return self._bucket.get(self._named(key, sha256), start, size)[0]

    def _cached(self, key: str, sha256: str) -> tuple[str, str, int, Callable[[Path], None]]:
        """Return what the cache wants to know of an object."""
        name = self._named(key, sha256)
        head = self._bucket.head(name)
        entry = hashlib.sha256(f"{self.root}/{name}:{head['ETag']}".encode()).hexdigest()
        return entry, Path(key).name, head["ContentLength"], lambda path: self._download(name, path, sha256)

    def _download(self, name: str, path: Path, sha256: str) -> None:
        found = ""
        for _ in range(_DOWNLOADS):
            self._bucket.download(name, path)
            with path.open("rb") as file:
                found = hashlib.file_digest(file, "sha256").hexdigest()
            if found == sha256:
                return
        raise CorruptArtifactError(
            f"s3://{self._bucket.name}/{name}: expected sha256 {sha256[:12]}, found {found[:12]} in {_DOWNLOADS} "
            "downloads; repair it"
        )

    def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        try:
            self._bucket.head(self._key(key))
        except FileNotFoundError:
            return False
        return True

    def modified_at(self, key: str) -> float:
        """Return when the object was written."""
        return float(self._bucket.head(self._key(key))["LastModified"].timestamp())

    def list_keys(self, prefix: str) -> list[str]:
        """Return all keys below `prefix/`, sorted."""
        skip = len(self._prefix) + 1 if self._prefix else 0
        found, _ = self._bucket.listing(self._key(prefix).rstrip("/") + "/")
        return sorted(key[skip:] for key in found)

    def move_prefix(self, source: str, target: str) -> None:
        """Copy every object, then delete the originals, the manifest first: what is half moved is not committed."""
        keys = self.list_keys(source)
        for key in keys:
            self._bucket.copy(self._key(key), self._key(target + key[len(source) :]))
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest.json")):
            self.remove(key)

    def leftovers(self, older_than_s: float, *, remove: bool) -> list[str]:
        """Return the keys of unfinished uploads of stages below this root; with `remove` give them up.

        Such an upload is invisible and paid for. Younger ones may still be going on; others' are none of ours.
        """
        found = []
        _, now = self._bucket.listing(self._key("claims") + "/")
        for key, upload, started in self._bucket.uploads(self._key("").rstrip("/") + "/" if self._prefix else ""):
            below = key.removeprefix(self._key(""))
            if below.split("/")[0] in STAGES and (now - started).total_seconds() > older_than_s:
                found.append(below)
                if remove:
                    self._bucket.abort(key, upload)
        return sorted(found)

    def free_bytes(self) -> int | None:
        """Return None: a bucket has no such limit."""
        return None

    def claim(self, key: str, on_wait: Callable[[], None] | None = None) -> AbstractContextManager[bool]:
        """Hold `key` against other processes of all machines; see `LocalStore.claim`."""
        return self._claims.hold(key, on_wait)

    def claimed(self) -> dict[str, str]:
        """Return who holds what, on all machines."""
        return self._claims.holders()
