"""Open a shard where it lies: as a file, or in a bucket, whole in the cache where that has room, else row by row."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from eagle3_core.errors import CorruptArtifactError
from eagle3_core.storage import Artifact
from eagle3_core.storage.tensors import DTYPE_BITS, Layout, TensorHeader, parse_header

if TYPE_CHECKING:
    import torch


class Rows(Protocol):
    """One tensor of an open shard."""

    def __getitem__(self, rows: slice) -> torch.Tensor:
        """Return some of its rows."""


class OpenShard(Protocol):
    """What is read of a shard; safetensors' own handle is one."""

    def keys(self) -> Iterable[str]:
        """Return the names of its tensors."""

    def get_slice(self, name: str) -> Rows:
        """Return one tensor, of which nothing is read yet."""


def open_shard(shard: Artifact, name: str) -> OpenShard:
    """Open a safetensors file of a committed shard.

    Raises:
        CorruptArtifactError: it is missing, has another size or a damaged header.
    """
    from safetensors import safe_open

    path = shard.kept_path(name)
    return RangedShard(shard, name) if path is None else safe_open(str(path), framework="pt")


class RangedShard:
    """A shard of a bucket that is not downloaded: every read is a request for just these rows.

    The checksum of the file says nothing of them; the feature set has one of every sample's rows.
    """

    def __init__(self, shard: Artifact, name: str) -> None:
        """Read the header."""
        self._shard, self._name, size = shard, name, shard.manifest.files[name].bytes
        try:
            (length,) = struct.unpack("<Q", self._read(0, 8))
            self._tensors = parse_header(self._read(8, min(length, size - 8)), size)
        except (ValueError, FileNotFoundError) as error:
            raise CorruptArtifactError(f"{shard.store.root}/{shard.ref.key}/{name}: {error}; repair it") from None

    @property
    def layout(self) -> Layout:
        """Return dtype and shape of every tensor."""
        return {name: (tensor.dtype, tensor.shape) for name, tensor in self._tensors.items()}

    def keys(self) -> Iterable[str]:
        """Return the names of the tensors."""
        return self._tensors.keys()

    def get_slice(self, name: str) -> Rows:
        """Return one tensor, of which nothing is read yet."""
        return _RangedRows(self, self._tensors[name])

    def _read(self, start: int, size: int) -> bytes:
        entry, key = self._shard.manifest.files[self._name], self._shard.ref.key
        return self._shard.store.read_range(f"{key}/{self._name}", entry.sha256, start, size)


@dataclass(frozen=True)
class _RangedRows:
    shard: RangedShard
    tensor: TensorHeader

    def __getitem__(self, rows: slice) -> torch.Tensor:
        from safetensors.torch import load

        first, last, _ = rows.indices(self.tensor.shape[0])
        width = math.prod(self.tensor.shape[1:]) * DTYPE_BITS[self.tensor.dtype] // 8
        size = (last - first) * width
        data = self.shard._read(self.tensor.start + first * width, size) if size else b""
        # A safetensors file of these rows alone: the library knows the dtypes.
        shape = [last - first, *self.tensor.shape[1:]]
        header = json.dumps({"rows": {"dtype": self.tensor.dtype, "shape": shape, "data_offsets": [0, size]}}).encode()
        found: dict[str, Any] = load(struct.pack("<Q", len(header)) + header + data)
        return found["rows"]  # type: ignore[no-any-return]
