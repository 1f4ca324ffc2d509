"""Requests to S3: the one client factory, bounded retries, and a look at what arrived."""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable
from datetime import datetime
from email.utils import parsedate_to_datetime
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

from eagle3_core.errors import InputError, StoreUnreachableError
from eagle3_core.storage.s3_faults import (
    CONFLICT,
    UNKNOWN_CONDITION,
    RefusedConditionError,
    is_unknown_certificate,
    typed,
)

ATTEMPTS = 10
"""Of one request; the waits between them grow to 20 s, so that a storm of 503 may last two minutes."""
BODY_ATTEMPTS = 5
"""Of one answer that is cut off, reset or stalls while it is read."""
CONNECT_S, READ_S = 20.0, 60.0
"""Longest silence of a store before the request is made again."""
PART_BYTES = 64 << 20
"""Files of this size and more go up in parts, several at a time."""

T = TypeVar("T")


def s3_client() -> Any:
    """Return the one way this project talks to S3.

    Credentials, region, endpoint and a private CA come from the environment (AWS_ENDPOINT_URL, AWS_CA_BUNDLE). Path
    style and checksums only "when required", because non-AWS stores reject virtual hosts and trailing checksums.
    """
    import boto3
    import botocore.session
    from botocore.config import Config

    config = Config(
        retries={"mode": "standard", "total_max_attempts": ATTEMPTS},
        s3={"addressing_style": "path"},
        request_checksum_calculation="when_required",
        response_checksum_validation="when_required",
        connect_timeout=CONNECT_S,
        read_timeout=READ_S,
    )
    # A session of its own, because the default one remembers credentials that may have been replaced.
    session = botocore.session.Session()
    session.register_component("data_loader", _models())
    client = boto3.session.Session(botocore_session=session).client("s3", config=config)
    client.meta.events.register_first("needs-retry.s3", _no_retry_of_an_unknown_certificate)
    return client


@cache
def _models() -> Any:
    """Return S3's description, which takes ten times as long to read as all else of a client."""
    import botocore.session

    return botocore.session.Session().get_component("data_loader")


class Bucket:
    """Typed requests to one bucket; keys are whole, without a leading slash."""

    def __init__(self, name: str) -> None:
        """Make a client; nothing is asked yet."""
        self.name = name
        with typed(f"s3://{name}"):
            self._client = s3_client()

    def _where(self, key: str) -> str:
        return f"s3://{self.name}/{key}".rstrip("/")

    def _asked(self, key: str, request: str, **arguments: Any) -> dict[str, Any]:
        with typed(self._where(key)):
            answer: dict[str, Any] = getattr(self._client, request)(Bucket=self.name, Key=key, **arguments)
        return answer

    def head(self, key: str) -> dict[str, Any]:
        """Return size, ETag and time of an object; FileNotFoundError if there is none."""
        return self._asked(key, "head_object")

    def get(self, key: str, start: int = 0, size: int | None = None) -> tuple[bytes, str]:
        """Return an object, or `size` bytes of it from `start`, and its ETag; FileNotFoundError if there is none."""
        part = {} if size is None else {"Range": f"bytes={start}-{start + size - 1}"}

        def read() -> tuple[bytes, str]:
            answer = self._client.get_object(Bucket=self.name, Key=key, **part)
            return answer["Body"].read(), answer["ETag"]

        with typed(self._where(key)):
            data, etag = _read_again(read)
        if size is not None and len(data) != size:
            raise StoreUnreachableError(f"{self._where(key)}: expected {size} bytes, found {len(data)}; try again")
        return data, etag

    def put(self, key: str, data: bytes, **condition: str) -> None:
        """Write an object; S3 shows it whole or not at all.

        Raises:
            StoreUnreachableError: other bytes arrived.
        """
        etag = self._asked(key, "put_object", Body=data, **condition)["ETag"]
        # Stores that encrypt have ETags of another kind: what they hold is read back then.
        if etag.strip('"') != _md5(data).hexdigest() and self.get(key)[0] != data:
            raise StoreUnreachableError(f"{self._where(key)}: other bytes arrived than were sent; try again")

    def put_if(self, key: str, data: bytes, **condition: str) -> bool:
        """Write an object under `IfNoneMatch="*"` or `IfMatch=etag`; tell whether the condition held.

        Raises:
            InputError: the store does not know such conditions.
        """
        for _ in range(ATTEMPTS):
            try:
                self.put(key, data, **condition)
            except RefusedConditionError as error:
                if error.code == UNKNOWN_CONDITION:
                    raise InputError(
                        f"{self._where(key)}: the store knows no conditional writes ({', '.join(condition)}), without "
                        "which two runs could overwrite each other; use a store that does, or a directory"
                    ) from None
                if error.code != CONFLICT:
                    # Where an answer was lost on its way, the request made again finds its own object there.
                    return self._holds(key, data)
            except FileNotFoundError:
                return False
            else:
                return True
        raise StoreUnreachableError(f"{self._where(key)}: {ATTEMPTS} conditional writes in conflict; try again")

    def _holds(self, key: str, data: bytes) -> bool:
        try:
            return self.get(key)[0] == data
        except FileNotFoundError:
            return False

    def delete(self, key: str) -> None:
        """Delete an object; absent is fine."""
        self._asked(key, "delete_object")

    def copy(self, source: str, target: str) -> None:
        """Copy an object within the bucket."""
        with typed(self._where(source)):
            self._client.copy({"Bucket": self.name, "Key": source}, self.name, target)

    def listing(self, prefix: str) -> tuple[dict[str, datetime], datetime]:
        """Return when every key that begins with `prefix` was written, and the present time of the store's clock."""
        found: dict[str, datetime] = {}
        now = None
        with typed(self._where(prefix)):
            for page in self._client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix):
                found |= {item["Key"]: item["LastModified"] for item in page.get("Contents", [])}
                now = parsedate_to_datetime(page["ResponseMetadata"]["HTTPHeaders"]["date"])
        assert now is not None
        return found, now

    def upload(self, source: Path, key: str) -> None:
        """Upload a file, in parts where it is large, and compare what arrived: size and checksum.

        Raises:
            StoreUnreachableError: other bytes arrived, twice.
        """
        for _ in range(2):
            with typed(self._where(key)):
                self._client.upload_file(str(source), self.name, key, Config=_transfer())
            found = self.head(key)
            if found["ContentLength"] == source.stat().st_size and self._arrived(source, key, found["ETag"]):
                return
        raise StoreUnreachableError(f"{self._where(key)}: other bytes arrived than were sent, twice; try again")

    def _arrived(self, source: Path, key: str, etag: str) -> bool:
        if etag.strip('"') == _etag(source):
            return True
        # An ETag of another kind, or other bytes: only reading them tells.
        with source.open("rb") as file:
            return self._content(key) == hashlib.file_digest(file, "sha256").hexdigest()

    def _content(self, key: str) -> str:
        def read() -> str:
            digest = hashlib.sha256()
            for chunk in self._client.get_object(Bucket=self.name, Key=key)["Body"].iter_chunks(1 << 20):
                digest.update(chunk)
            return digest.hexdigest()

        with typed(self._where(key)):
            return _read_again(read)

    def download(self, key: str, target: Path) -> None:
        """Write an object to a local file; FileNotFoundError if there is none."""
        with typed(self._where(key)):
            self._client.download_file(self.name, key, str(target), Config=_transfer())

    def uploads(self, prefix: str) -> list[tuple[str, str, datetime]]:
        """Return key, id and start of every unfinished upload in parts; no listing of objects shows them."""
        found = []
        with typed(self._where(prefix)):
            for page in self._client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name, Prefix=prefix):
                found += [(item["Key"], item["UploadId"], item["Initiated"]) for item in page.get("Uploads", [])]
        return found

    def abort(self, key: str, upload: str) -> None:
        """Give up an unfinished upload; its parts are freed."""
        with contextlib.suppress(FileNotFoundError):
            self._asked(key, "abort_multipart_upload", UploadId=upload)


def _no_retry_of_an_unknown_certificate(caught_exception: Exception | None, **_: object) -> None:
    """Stop botocore from asking ten times for a certificate that will not change."""
    if caught_exception is not None and is_unknown_certificate(caught_exception):
        raise caught_exception


def _read_again(read: Callable[[], T]) -> T:
    """Return what `read` returns; botocore repeats requests, but no answer that breaks while it is read."""
    from botocore.exceptions import IncompleteReadError, ReadTimeoutError, ResponseStreamingError

    for attempt in range(1, BODY_ATTEMPTS + 1):
        try:
            return read()
        except (IncompleteReadError, ReadTimeoutError, ResponseStreamingError):
            if attempt == BODY_ATTEMPTS:
                raise
    raise AssertionError("unreachable")


def _transfer() -> Any:
    from boto3.s3.transfer import TransferConfig

    return TransferConfig(
        multipart_threshold=PART_BYTES, multipart_chunksize=PART_BYTES, num_download_attempts=BODY_ATTEMPTS,
        preferred_transfer_client="classic",
    )  # fmt: skip


def _md5(data: bytes = b"") -> Any:
    return hashlib.md5(data, usedforsecurity=False)


def _etag(source: Path) -> str:
    """Return the ETag S3 gives a file: its MD5, or the MD5 of its parts' MD5s."""
    with source.open("rb") as file:
        if source.stat().st_size < PART_BYTES:
            return str(_md5(file.read()).hexdigest())
        parts = [_md5(part).digest() for part in iter(lambda: file.read(PART_BYTES), b"")]
    return f"{_md5(b''.join(parts)).hexdigest()}-{len(parts)}"
