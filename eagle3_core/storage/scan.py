"""Read a safetensors file once: checksum of the file, checksums of rows, values that are not finite. Light."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import BinaryIO

import xxhash

from eagle3_core.storage.tensors import TensorHeader, read_header

_CHUNK = 1 << 20
_EXPONENTS = {
    "F64": (8, 0x7FF0000000000000, 0x0010000000000000),
    "F32": (4, 0x7F800000, 0x00800000),
    "BF16": (2, 0x7F80, 0x0080),
    "F16": (2, 0x7C00, 0x0400),
    "F8_E5M2": (1, 0x7C, 0x04),
    "F8_E4M3": (1, 0x7F, 0x01),  # it has no infinity, and NaN alone is all ones
}
"""Bytes of a value, its exponent's bits, the lowest of them: added to a full exponent it carries into the sign."""
FLOATS = frozenset(_EXPONENTS)

OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class Scan:
    """What a file holds.

    Attributes:
        sha256: of the whole file.
        checksums: tensor to the xxh3 (64 bits, hex) of each of its parts.
        not_finite: tensor to its first row with a NaN or an infinity, where it has one.
    """

    sha256: str
    checksums: dict[str, tuple[str, ...]]
    not_finite: dict[str, int]


def scan(path: Path, rows: Mapping[str, Sequence[int]], on_bytes: OnBytes | None = None) -> Scan:
    """Read the whole file; `on_bytes` hears of every piece of it.

    Args:
        path: the file.
        rows: tensor to the rows of its parts, one after the other; what is behind them or has no entry is one part.
        on_bytes: is told how many bytes were read.

    Raises:
        ValueError: it is no safetensors file.
    """
    header = sorted(read_header(path).items(), key=lambda item: item[1].start)
    whole = hashlib.sha256()
    checksums: dict[str, tuple[str, ...]] = {}
    not_finite: dict[str, int] = {}
    with path.open("rb") as file:
        begin = min((tensor.start for _, tensor in header), default=path.stat().st_size)
        for data in _chunks(file, begin, on_bytes):
            whole.update(data)
        for name, tensor in header:
            sums, offset = list[str](), 0
            for size in _sizes(tensor, rows.get(name, ())):
                own = xxhash.xxh3_64()
                for data in _chunks(file, size, on_bytes):
                    whole.update(data)
                    own.update(data)
                    if name not in not_finite and (at := first_not_finite(data, tensor.dtype)) is not None:
                        not_finite[name] = (offset + at) // _row_bytes(tensor)
                    offset += len(data)
                sums.append(own.hexdigest())
            checksums[name] = tuple(sums)
    return Scan(whole.hexdigest(), checksums, not_finite)


def first_not_finite(data: bytes, dtype: str) -> int | None:
    """Return the offset of the first NaN or infinity, None where there is none or `dtype` has none.

    One addition on all values at once, as one long integer: no library, several hundred MB a second.
    """
    if dtype not in _EXPONENTS or not data:
        return None
    width = _EXPONENTS[dtype][0]
    # Zeros above the values carry nothing, so masks of a few lengths do.
    exponents, lowest, signs = _masks(dtype, 1 << (len(data) // width - 1).bit_length())
    carried = ((int.from_bytes(data, "little") & exponents) + lowest) & signs
    if not carried:
        return None
    return ((carried & -carried).bit_length() - 1) // (8 * width) * width


@lru_cache(maxsize=16)
def _masks(dtype: str, values: int) -> tuple[int, int, int]:
    width, exponent, lowest = _EXPONENTS[dtype]
    sign = 1 << (8 * width - 1)
    exponents, lowests, signs = (
        int.from_bytes(one.to_bytes(width, "little") * values, "little") for one in (exponent, lowest, sign)
    )
    return exponents, lowests, signs


def _chunks(file: BinaryIO, size: int, on_bytes: OnBytes | None) -> Iterator[bytes]:
    while size > 0 and (data := file.read(min(_CHUNK, size))):
        size -= len(data)
        yield data
        if on_bytes is not None:
            on_bytes(len(data))


def _sizes(tensor: TensorHeader, rows: Sequence[int]) -> Iterator[int]:
    """Yield the bytes of each part and of what is behind them; never more than the tensor has."""
    left = tensor.end - tensor.start
    for count in rows:
        size = min(count * _row_bytes(tensor), left)
        left -= size
        yield size
    if left or not rows:
        yield left


def _row_bytes(tensor: TensorHeader) -> int:
    return (tensor.end - tensor.start) // max(tensor.shape[0] if tensor.shape else 1, 1)
