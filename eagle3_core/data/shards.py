"""Write one shard: unpadded safetensors of known size, sample by sample, in bounded memory.

N tokens of all samples one after the other, D target width, A aux layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from eagle3_core.config.base import Section
from eagle3_core.errors import CaptureMismatchError, CorruptArtifactError
from eagle3_core.storage import Artifact
from eagle3_core.storage.manifest import file_sha256
from eagle3_core.storage.scan import OnBytes, scan

if TYPE_CHECKING:
    import torch

FEATURES = "features.safetensors"
INDEX = "index.json"

CHECKSUMS = "tensors"
"""Fact in a shard's manifest: tensor name to the sha256 of its bytes, taken before they went to the disk."""

_NAMES = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "I32": 4, "U8": 1}


def tensor_layout(tokens: int, aux_width: int, hidden_size: int, dtype: str) -> dict[str, tuple[str, tuple[int, ...]]]:
    """Return dtype and shape of every tensor of a shard of `tokens` tokens, in the order in which they are stored.

    `aux_hidden_states [N, A*D]`, `last_hidden_state [N, D]` (after the target's final norm), `input_ids [N]` int32,
    `loss_mask [N]` uint8.
    """
    states = _NAMES[dtype]
    return {
        "aux_hidden_states": (states, (tokens, aux_width)),
        "last_hidden_state": (states, (tokens, hidden_size)),
        "input_ids": ("I32", (tokens,)),
        "loss_mask": ("U8", (tokens,)),
    }


class ShardIndex(Section):
    """index.json of a shard."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    digest: str


class ShardWriter:
    """Writes the header first, because all sizes are known, then each sample's rows at their place."""

    def __init__(self, path: Path, tokens: int, aux_width: int, hidden_size: int, dtype: str) -> None:
        """Create `path` at its final size."""
        import torch

        self._layout = tensor_layout(tokens, aux_width, hidden_size, dtype)
        self._dtype: torch.dtype = getattr(torch, dtype)
        self._tokens, self._row = tokens, 0
        header, self._starts = _header(self._layout)
        end = self._starts["loss_mask"] + tokens
        self._hashes = {name: hashlib.sha256() for name in self._layout}
        self._file = path.open("wb")
        self._file.write(header)
        self._file.truncate(end)

    def append(self, input_ids: Sequence[int], supervised: int, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Write one sample of T tokens, of which the last `supervised` are the answer.

        Args:
            input_ids: [T].
            supervised: answer tokens.
            aux: [T, A * D], any float dtype; stored in the shard's.
            last: [T, D].

        Raises:
            CaptureMismatchError: rows, widths, or a value that is not finite.
        """
        import torch

        rows = len(input_ids)
        for name, states in (("aux_hidden_states", aux), ("last_hidden_state", last)):
            expected = (rows, self._layout[name][1][1])
            if tuple(states.shape) != expected:
                raise CaptureMismatchError(f"{name}: expected shape {expected}, found {tuple(states.shape)}; recapture")
            stored = states.to(self._dtype)
            if not bool(torch.isfinite(stored).all()):
                raise CaptureMismatchError(
                    f"{name}: {int((~torch.isfinite(stored)).sum())} values are not finite in {self._dtype}; "
                    "choose a wider capture.dtype or target.dtype"
                )
            self._put(name, stored.contiguous().view(torch.uint8).numpy().tobytes())
        self._put("input_ids", struct.pack(f"<{rows}i", *input_ids))
        self._put("loss_mask", bytes(rows - supervised) + b"\x01" * supervised)
        self._row += rows

    def checksums(self) -> dict[str, str]:
        """Return the sha256 of every tensor as it was handed over: what the disk returns must equal it."""
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the file.

        Raises:
            CaptureMismatchError: fewer rows were written than planned.
        """
        self._file.close()
        if error is None and self._row != self._tokens:
            raise CaptureMismatchError(f"shard: expected {self._tokens} rows, found {self._row}; recapture")

    def _put(self, name: str, data: bytes) -> None:
        kind, shape = self._layout[name]
        width = math.prod(shape[1:]) * _BYTES[kind]
        if self._row * width + len(data) > shape[0] * width:
            raise CaptureMismatchError(f"shard: expected {self._tokens} rows, found more; recapture")
        self._file.seek(self._starts[name] + self._row * width)
        self._file.write(data)
        self._hashes[name].update(data)


def write_index(path: Path, sample_ids: Sequence[str], lengths: Sequence[int], facts: Mapping[str, Any]) -> None:
    """Write the shard's own index: what its rows are."""
    values = {"sample_ids": list(sample_ids), "lengths": [int(length) for length in lengths], **facts}
    path.write_text(json.dumps(values, indent=1, sort_keys=True), encoding="utf-8")


def check_values(shard: Artifact, deep: OnBytes | None = None) -> None:
    """Compare a shard's tensors with the checksums in its manifest.

    `deep` hears how much was read, and asks for more than the checksum of the file: those of the tensors as they were
    handed to the disk, and finite values.

    Raises:
        CorruptArtifactError: says where the damage is.
    """
    path, where = shard.path(FEATURES), f"{shard.store.root}/{shard.ref.key}/{FEATURES}"
    wanted, checksums = shard.manifest.files[FEATURES].sha256, shard.manifest.facts.get(CHECKSUMS, {})
    if deep is None and file_sha256(path) == wanted:
        return
    try:
        found = scan(path, deep)
    except ValueError as error:
        raise CorruptArtifactError(f"{where}: {error}") from None
    bad = [name for name, value in checksums.items() if found.tensors.get(name) != value]
    if found.sha256 != wanted:
        place = f"in {', '.join(bad)}" if bad else "outside the tensors" if checksums else "somewhere"
        raise CorruptArtifactError(f"{where}: expected sha256 {wanted[:12]}, found {found.sha256[:12]}: damage {place}")
    if bad:
        raise CorruptArtifactError(f"{where}: {', '.join(bad)}: not what the capture handed to the disk")
    for name, row in found.not_finite.items():
        raise CorruptArtifactError(f"{where}: {name}: a value in row {row} is not finite")


def _header(layout: Mapping[str, tuple[str, tuple[int, ...]]]) -> tuple[bytes, dict[str, int]]:
    values: dict[str, Any] = {}
    offset = 0
    for name, (kind, shape) in layout.items():
        end = offset + math.prod(shape) * _BYTES[kind]
        values[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(values, separators=(",", ":")).encode()
    # Padded as the format asks, so that the tensors are aligned for a memory map.
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + item["data_offsets"][0] for name, item in values.items()}
    return struct.pack("<Q", len(text)) + text, starts
