"""An S3 prefix as an ObjectStore; the only boto3 import."""

from __future__ import annotations

import hashlib
import os
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from eagle3_core.errors import InputError

if TYPE_CHECKING:
    from collections.abc import Iterator


def s3_client() -> Any:
    """Return the one way this project talks to S3.

    Credentials, region and endpoint come from the environment (AWS_ENDPOINT_URL for other stores). Path style and
    checksums only "when required", because non-AWS stores reject virtual hosts and trailing checksums.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "adaptive", "max_attempts": 10},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    return boto3.client("s3", config=config)


class S3Store:
    """Objects below one bucket prefix; downloads go to a local cache directory, keyed by content."""

    def __init__(self, root: str, cache: Path | None = None) -> None:
        """Use s3://bucket/prefix.

        Raises:
            InputError: the URI has no bucket.
        """
        parts = urlsplit(root)
        if not parts.netloc:
            raise InputError(f"root {root!r}: expected s3://bucket/prefix")
        self._bucket, self._prefix = parts.netloc, parts.path.strip("/")
        default = Path(tempfile.gettempdir()) / f"eagle3-s3-cache-{os.getuid()}"
        self._cache = cache or Path(os.environ.get("EAGLE3_S3_CACHE", default))
        self._client = s3_client()

    @property
    def root(self) -> str:
        """Return the URI."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}".lstrip("/")

    def _head(self, key: str) -> dict[str, Any] | None:
        from botocore.exceptions import ClientError

        try:
            head: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey", "NotFound"):
                return None
            raise
        return head

    def read_bytes(self, key: str) -> bytes:
        """Return the object."""
        if self._head(key) is None:
            raise FileNotFoundError(f"{self.root}/{key}")
        data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read()
        return data

    def write_bytes(self, key: str, data: bytes) -> None:
        """Put the object; S3 shows it whole or not at all."""
        self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data)

    def put_file(self, source: Path, key: str) -> None:
        """Upload (multipart where large) and check the size that arrived.

        Raises:
            OSError: the stored size differs from the file's.
        """
        size = source.stat().st_size
        self._client.upload_file(str(source), self._bucket, self._key(key))
        head = self._head(key)
        if head is None or head["ContentLength"] != size:
            found = None if head is None else head["ContentLength"]
            raise OSError(f"{self.root}/{key}: expected {size} bytes after upload, found {found}; run again")

    def local_path(self, key: str) -> Path:
        """Return a cached copy, downloaded once per ETag."""
        head = self._head(key)
        if head is None:
            raise FileNotFoundError(f"{self.root}/{key}")
        name = hashlib.sha256(f"{self.root}/{key}:{head['ETag']}".encode()).hexdigest()
        target = self._cache / name[:2] / name / Path(key).name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            self._client.download_file(self._bucket, self._key(key), str(temp))
            temp.replace(target)
        return target

    def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        return self._head(key) is not None

    def _objects(self, prefix: str) -> Iterator[str]:
        pages = self._client.get_paginator("list_objects_v2")
        for page in pages.paginate(Bucket=self._bucket, Prefix=self._key(prefix).rstrip("/") + "/"):
            for item in page.get("Contents", []):
                yield item["Key"]

    def list_keys(self, prefix: str) -> list[str]:
        """Return all keys below `prefix/`, sorted."""
        skip = len(self._prefix) + 1 if self._prefix else 0
        return sorted(key[skip:] for key in self._objects(prefix))

    def move_prefix(self, source: str, target: str) -> None:
        """Copy every object, then delete the originals."""
        keys = self.list_keys(source)
        for key in keys:
            self._client.copy(
                {"Bucket": self._bucket, "Key": self._key(key)}, self._bucket, self._key(target + key[len(source) :])
            )
        for key in keys:
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def free_bytes(self) -> int | None:
        """Return None: a bucket has no such limit."""
        return None
