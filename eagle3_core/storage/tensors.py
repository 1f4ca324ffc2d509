"""Read the header of a safetensors file and check it against the file's size, or make one, without any library."""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DTYPE_BITS = {
    "F64": 64, "F32": 32, "F16": 16, "BF16": 16, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "F4": 4,
    "I64": 64, "I32": 32, "I16": 16, "I8": 8, "U64": 64, "U32": 32, "U16": 16, "U8": 8, "BOOL": 8,
}  # fmt: skip

TORCH_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16",
               "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "I32": "int32"}  # fmt: skip
"""What PyTorch calls the dtypes that hidden states, token ids and weights have."""
KINDS = {name: kind for kind, name in TORCH_NAMES.items()}
"""The same the other way round."""

Layout = Mapping[str, tuple[str, tuple[int, ...]]]
"""Tensor name to safetensors' name of its dtype and its shape."""


@dataclass(frozen=True)
class TensorHeader:
    """Where one tensor lies: `start` and `end` are offsets in the file."""

    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int


def read_header(path: Path) -> dict[str, TensorHeader]:
    """Return the tensors of a safetensors file.

    Raises:
        ValueError: the header is damaged, contradicts itself, or the file has another size than it says.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        (length,) = struct.unpack("<Q", prefix) if len(prefix) == 8 else (size,)
        if not 2 <= length <= size - 8:
            raise ValueError("expected a safetensors header, found none")
        return parse_header(file.read(length), size)


def parse_header(raw: bytes, size: int) -> dict[str, TensorHeader]:
    """Return the tensors that a header of a file of `size` bytes tells of.

    Raises:
        ValueError: see `read_header`.
    """
    length = len(raw)
    try:
        tensors = {name: _tensor(item, 8 + length) for name, item in json.loads(raw).items() if name != "__metadata__"}
    except (ValueError, AttributeError, KeyError, TypeError, RecursionError):
        raise ValueError("expected a safetensors header, found damage") from None
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda pair: pair[1].start):
        bits = DTYPE_BITS.get(tensor.dtype)
        if bits is not None and tensor.end - tensor.start != math.prod(tensor.shape) * bits // 8:
            raise ValueError(f"tensor {name}: {tensor.dtype}{list(tensor.shape)} does not fit its offsets")
        if tensor.start != end:
            raise ValueError(f"tensor {name}: expected offset {end}, found {tensor.start}")
        end = tensor.end
    if end != size:
        raise ValueError(f"expected {end} bytes, found {size}")
    return tensors


def make_header(layout: Layout) -> tuple[bytes, dict[str, int], int]:
    """Return the first bytes of a safetensors file, the offset in it where each tensor starts, and the file's size."""
    values: dict[str, Any] = {}
    offset = 0
    # The widest values first: readers map tensors into memory, where they must be aligned.
    for name in sorted(layout, key=lambda name: -DTYPE_BITS[layout[name][0]]):
        kind, shape = layout[name]
        end = offset + math.prod(shape) * DTYPE_BITS[kind] // 8
        values[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(values, separators=(",", ":")).encode()
    # Padded as the format asks, so that the tensors are aligned for a memory map.
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + item["data_offsets"][0] for name, item in values.items()}
    return struct.pack("<Q", len(text)) + text, starts, 8 + len(text) + offset


def write_at(descriptor: int, data: memoryview | bytes, offset: int) -> None:
    """Write all of `data` at `offset` of an open file, from any thread.

    Raises:
        OSError: as the system says.
    """
    while data:
        written = os.pwrite(descriptor, data, offset)
        data, offset = data[written:], offset + written


def _tensor(item: Any, base: int) -> TensorHeader:
    start, end = item["data_offsets"]
    shape = tuple(int(size) for size in item["shape"])
    return TensorHeader(str(item["dtype"]), shape, base + int(start), base + int(end))
