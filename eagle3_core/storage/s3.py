"""An S3 prefix as an ObjectStore; the only boto3 import."""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from eagle3_core.errors import InputError, StoreUnreachableError

ATTEMPTS = 10
_ABSENT = ("404", "NoSuchKey", "NotFound")
_REFUSED = ("403", "AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled")


def s3_client() -> Any:
    """Return the one way this project talks to S3.

    Credentials, region and endpoint come from the environment (AWS_ENDPOINT_URL for other stores). Path style and
    checksums only "when required", because non-AWS stores reject virtual hosts and trailing checksums.
    """
    import boto3
    from botocore.config import Config

    config = Config(
        retries={"mode": "adaptive", "max_attempts": ATTEMPTS},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
    )
    # A session of its own, because the default one remembers credentials that may have been replaced.
    return boto3.session.Session().client("s3", config=config)


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
        with self._typed():
            self._client = s3_client()

    @property
    def root(self) -> str:
        """Return the URI."""
        return f"s3://{self._bucket}/{self._prefix}".rstrip("/")

    def _key(self, key: str) -> str:
        return f"{self._prefix}/{key}".lstrip("/")

    @contextlib.contextmanager
    def _typed(self, key: str = "") -> Iterator[None]:
        """Turn botocore's errors into one line: absent, refused (fix) or unreachable (retry)."""
        from boto3.exceptions import Boto3Error
        from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError

        where = f"{self.root}/{key}".rstrip("/")
        try:
            yield
        except (NoCredentialsError, NoRegionError) as error:
            raise InputError(f"root {self.root}: {error}; set the AWS environment variables") from None
        except ClientError as error:
            code, text = error.response["Error"]["Code"], error.response["Error"].get("Message", "")
            if code in _ABSENT:
                raise FileNotFoundError(where) from None
            if code in _REFUSED:
                raise InputError(f"root {where}: the store refuses ({code}: {text}); check bucket and rights") from None
            raise StoreUnreachableError(f"{where}: the store answers {code}: {text}; try again") from None
        except (BotoCoreError, Boto3Error) as error:
            raise StoreUnreachableError(f"{where}: {' '.join(str(error).split()):.300}; try again") from None

    def _head(self, key: str) -> dict[str, Any]:
        with self._typed(key):
            head: dict[str, Any] = self._client.head_object(Bucket=self._bucket, Key=self._key(key))
        return head

    def read_bytes(self, key: str) -> bytes:
        """Return the object."""
        with self._typed(key):
            data: bytes = self._client.get_object(Bucket=self._bucket, Key=self._key(key))["Body"].read()
        return data

    def write_bytes(self, key: str, data: bytes) -> None:
        """Put the object; S3 shows it whole or not at all."""
        with self._typed(key):
            self._client.put_object(Bucket=self._bucket, Key=self._key(key), Body=data)

    def put_file(self, source: Path, key: str) -> None:
        """Upload (multipart where large) and check the size that arrived.

        Raises:
            StoreUnreachableError: the stored size differs from the file's.
        """
        size = source.stat().st_size
        with self._typed(key):
            self._client.upload_file(str(source), self._bucket, self._key(key))
        found = self._head(key)["ContentLength"]
        if found != size:
            raise StoreUnreachableError(
                f"{self.root}/{key}: expected {size} bytes after upload, found {found}; try again"
            )

    def remove(self, key: str) -> None:
        """Delete the object."""
        with self._typed(key):
            self._client.delete_object(Bucket=self._bucket, Key=self._key(key))

    def local_path(self, key: str) -> Path:
        """Return a cached copy, downloaded once per ETag."""
        head = self._head(key)
        name = hashlib.sha256(f"{self.root}/{key}:{head['ETag']}".encode()).hexdigest()
        target = self._cache / name[:2] / name / Path(key).name
        if not target.exists() or target.stat().st_size != head["ContentLength"]:
            target.parent.mkdir(parents=True, exist_ok=True)
            temp = target.with_name(f".{target.name}.{os.getpid()}.tmp")
            with self._typed(key):
                self._client.download_file(self._bucket, self._key(key), str(temp))
            temp.replace(target)
        return target

    def exists(self, key: str) -> bool:
        """Tell whether the object is there."""
        try:
            self._head(key)
        except FileNotFoundError:
            return False
        return True

    def modified_at(self, key: str) -> float:
        """Return when the object was written."""
        return float(self._head(key)["LastModified"].timestamp())

    def list_keys(self, prefix: str) -> list[str]:
        """Return all keys below `prefix/`, sorted."""
        skip = len(self._prefix) + 1 if self._prefix else 0
        found: list[str] = []
        with self._typed(prefix):
            pages = self._client.get_paginator("list_objects_v2")
            for page in pages.paginate(Bucket=self._bucket, Prefix=self._key(prefix).rstrip("/") + "/"):
                found += [item["Key"][skip:] for item in page.get("Contents", [])]
        return sorted(found)

    def move_prefix(self, source: str, target: str) -> None:
        """Copy every object, then delete the originals, the manifest first: what is half moved is not committed."""
        keys = self.list_keys(source)
        for key in keys:
            with self._typed(key):
                origin = {"Bucket": self._bucket, "Key": self._key(key)}
                self._client.copy(origin, self._bucket, self._key(target + key[len(source) :]))
        for key in sorted(keys, key=lambda key: not key.endswith("/manifest.json")):
            self.remove(key)

    def free_bytes(self) -> int | None:
        """Return None: a bucket has no such limit."""
        return None

    @contextlib.contextmanager
    def claim(self, key: str, on_wait: Callable[[], None] | None = None) -> Iterator[bool]:
        """Yield True to who would wait: a bucket has no locks, so only the job that owns `key` may work on it."""
        del key
        yield on_wait is not None
