"""Write one shard: unpadded safetensors of known size, sample by sample, in bounded memory.

N tokens of all samples one after the other, D target width, A aux layers.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import struct
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.data.encoding import KIND_BYTES, Encoding, Layout, label_rows, quantise
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

_UNHASHED = 64
"""Pieces of tensors that may wait for their checksum."""


class ShardIndex(Section):
    """index.json of a shard."""

    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    digest: str
    not_finite: tuple[str, ...] = Field(description="Samples stored as zeros without supervision.")


class ShardWriter:
    """Writes the header first, because all sizes are known, then each sample's rows at their place.

    Checksums are taken in a thread of their own, beside the writes.
    """

    def __init__(self, path: Path, encoding: Encoding, tokens: int, label_rows: int) -> None:
        """Prepare; `path` is made when the block is entered."""
        self._path, self._encoding, self._layout = path, encoding, encoding.layout(tokens, label_rows)
        self._header, self._starts, self._end = _header(self._layout)
        self._rows = dict.fromkeys(self._layout, 0)
        self._hashes = {name: hashlib.sha256() for name in self._layout}
        self._hashing = ThreadPoolExecutor(1, thread_name_prefix="shard-checksums")
        self._pending: deque[Future[None]] = deque()

    def append(self, input_ids: Sequence[int], supervised: int, aux: torch.Tensor, last: torch.Tensor) -> bool:
        """Write one sample of T tokens, of which the last `supervised` are the answer.

        Args:
            input_ids: [T].
            supervised: answer tokens.
            aux: [T, A * D], any float dtype; stored in the shard's.
            last: [T, D].

        Returns:
            Whether all its values are finite in the shard's precision. Where one is not, zeros are stored and no token
            is supervised, so that nothing is learnt from it.

        Raises:
            CaptureMismatchError: rows or widths differ.
        """
        import torch

        rows, encoding = len(input_ids), self._encoding
        for name, states, layers in (("aux_hidden_states", aux, encoding.num_aux), ("last_hidden_state", last, 1)):
            expected = (rows, layers * encoding.hidden_size)
            if tuple(states.shape) != expected:
                raise CaptureMismatchError(f"{name}: expected shape {expected}, found {tuple(states.shape)}; recapture")
        mask = torch.zeros(rows, dtype=torch.bool)
        mask[rows - supervised :] = True
        kept = last if encoding.last_rows == "all" else last[label_rows(mask)]
        stored = {
            **self._encoded("aux_hidden_states", "aux_scales", aux, encoding.num_aux),
            **self._encoded("last_hidden_state", "last_scales", kept, 1),
            "loss_mask": mask.to(torch.uint8),
        }
        finite = all(map(_is_finite, stored.values()))
        for name, values in stored.items():
            self._put(name, values if finite else torch.zeros_like(values))
        self._put("input_ids", torch.tensor(input_ids, dtype=torch.int32))
        return finite

    def checksums(self) -> dict[str, str]:
        """Return the sha256 of every tensor as it was handed over: what the disk returns must equal it."""
        self._wait(0)
        return {name: digest.hexdigest() for name, digest in self._hashes.items()}

    def __enter__(self) -> Self:
        self._file = self._path.open("wb", buffering=0)
        try:
            self._file.truncate(self._end)
            self._write(self._header, 0)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the file.

        Raises:
            CaptureMismatchError: fewer rows were written than planned.
        """
        self._hashing.shutdown()
        self._file.close()
        short = [name for name, rows in self._rows.items() if rows != self._layout[name][1][0]]
        if error is None and short:
            raise CaptureMismatchError(
                f"shard: expected {self._layout[short[0]][1][0]} rows of {short[0]}, found {self._rows[short[0]]}; "
                "recapture"
            )

    def _encoded(self, name: str, scales_name: str, states: torch.Tensor, layers: int) -> dict[str, torch.Tensor]:
        import torch

        if scales_name not in self._layout:
            return {name: states.to(getattr(torch, self._encoding.dtype))}
        stored, scales = quantise(states, layers)
        return {name: stored, scales_name: scales}

    def _put(self, name: str, values: torch.Tensor) -> None:
        import torch

        kind, shape = self._layout[name]
        row, rows, width = self._rows[name], len(values), math.prod(shape[1:]) * KIND_BYTES[kind]
        if row + rows > shape[0]:
            raise CaptureMismatchError(f"shard: expected {shape[0]} rows of {name}, found more; recapture")
        array: Any = values.contiguous().view(torch.uint8).numpy().reshape(-1)
        data = memoryview(array)
        self._pending.append(self._hashing.submit(self._hashes[name].update, data))
        self._write(data, self._starts[name] + row * width)
        self._rows[name] += rows
        self._wait(_UNHASHED)

    def _write(self, data: memoryview | bytes, offset: int) -> None:
        while data:
            written = os.pwrite(self._file.fileno(), data, offset)
            data, offset = data[written:], offset + written

    def _wait(self, most: int) -> None:
        """Wait until at most so many pieces are without their checksum; their memory is free then."""
        while len(self._pending) > most:
            self._pending.popleft().result()


def _is_finite(values: torch.Tensor) -> bool:
    """Whether every value is; one in 8 bits is where its scale is."""
    import torch

    if not values.is_floating_point() or values.element_size() == 1:
        return True
    # A sum is not finite where a value is not (and seldom else): one pass without a second tensor.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


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


def _header(layout: Layout) -> tuple[bytes, dict[str, int], int]:
    """Return the file's header, where each tensor starts, and where the last one ends."""
    values: dict[str, Any] = {}
    offset = 0
    # The widest values first: readers map tensors into memory, where they must be aligned.
    for name in sorted(layout, key=lambda name: -KIND_BYTES[layout[name][0]]):
        kind, shape = layout[name]
        end = offset + math.prod(shape) * KIND_BYTES[kind]
        values[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(values, separators=(",", ":")).encode()
    # Padded as the format asks, so that the tensors are aligned for a memory map.
    text += b" " * (-len(text) % 8)
    starts = {name: 8 + len(text) + item["data_offsets"][0] for name, item in values.items()}
    return struct.pack("<Q", len(text)) + text, starts, 8 + len(text) + offset
