"""Every fault of S3 as one typed line: absent, refused (fix) or unreachable (retry)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from eagle3_core.errors import InputError, StoreUnreachableError

_ABSENT = ("404", "NoSuchKey", "NotFound")
_ABORTED_BEFORE = ("NoSuchUpload", "AbortMultipartUpload")
_REFUSED = (
    "403", "AccessDenied", "NoSuchBucket", "InvalidAccessKeyId", "SignatureDoesNotMatch", "AllAccessDisabled",
    "RequestTimeTooSkewed", "ExpiredToken", "InvalidToken",
)  # fmt: skip
_UNMET, CONFLICT, UNKNOWN_CONDITION = ("412", "PreconditionFailed"), "ConditionalRequestConflict", "NotImplemented"


class RefusedConditionError(Exception):
    """A conditional write that did not take place; never leaves `storage.s3`."""

    def __init__(self, code: str) -> None:
        super().__init__(code)
        self.code = code


@contextlib.contextmanager
def typed(where: str) -> Iterator[None]:
    """Turn botocore's errors into one line: absent, refused (fix) or unreachable (retry)."""
    from boto3.exceptions import Boto3Error
    from botocore.exceptions import BotoCoreError, ClientError, NoCredentialsError, NoRegionError, SSLError
    from s3transfer.exceptions import S3DownloadFailedError

    try:
        yield
    except (NoCredentialsError, NoRegionError) as error:
        raise InputError(f"root {where}: {error}; set the AWS environment variables") from None
    except SSLError as error:
        if not is_unknown_certificate(error):
            raise StoreUnreachableError(f"{where}: {_line(error)}; try again") from None
        raise InputError(
            f"root {where}: nobody known here has signed the store's certificate; set AWS_CA_BUNDLE to a PEM file "
            f"with its CA ({_line(error)})"
        ) from None
    except ClientError as error:
        raise _answered(where, error) from None
    except (BotoCoreError, Boto3Error, S3DownloadFailedError) as error:
        # An upload wraps what the store answered.
        if isinstance(error.__context__, ClientError):
            raise _answered(where, error.__context__) from None
        raise StoreUnreachableError(f"{where}: {_line(error)}; try again") from None


def _answered(where: str, error: Any) -> Exception:
    code, text = str(error.response["Error"]["Code"]), error.response["Error"].get("Message", "")
    if error.operation_name == "PutObject" and code in (*_UNMET, CONFLICT, UNKNOWN_CONDITION):
        return RefusedConditionError(code)
    if code in _ABSENT or (code, error.operation_name) == _ABORTED_BEFORE:
        return FileNotFoundError(where)
    if code in _REFUSED:
        return InputError(f"root {where}: the store refuses ({code}: {text}); check bucket and rights")
    return StoreUnreachableError(f"{where}: the store answers {code}: {text}; try again")


def _line(error: Exception) -> str:
    return f"{' '.join(str(error).split()):.300}"


def is_unknown_certificate(error: object) -> bool:
    """Whether a connection failed because nobody known has signed the store's certificate."""
    return "CERTIFICATE_VERIFY_FAILED" in str(error)
