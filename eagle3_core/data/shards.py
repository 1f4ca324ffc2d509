"""Write one shard: unpadded safetensors of known size, sample by sample, in bounded memory.

N tokens of all samples one after the other, D target width, A aux layers.
"""

from __future__ import annotations

import json
import math
import os
import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Self

import xxhash
from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.data.encoding import Encoding, bytes_of, label_rows, num_label_rows, quantise
from eagle3_core.errors import CaptureMismatchError, CorruptArtifactError, UnknownSchemaError
from eagle3_core.storage import Artifact
from eagle3_core.storage.manifest import file_sha256
from eagle3_core.storage.scan import OnBytes, scan
from eagle3_core.storage.tensors import DTYPE_BITS, make_header, write_at

if TYPE_CHECKING:
    import torch

FEATURES = "features.safetensors"
INDEX = "index.json"
SCHEMA: Literal["eagle3/shard-index/2"] = "eagle3/shard-index/2"

_WRITERS = min(4, os.cpu_count() or 1)
WAITING_BYTES = 1 << 28
"""States of a shard that may wait for their turn to be written; whoever captures waits then."""


class ShardIndex(Section):
    """index.json of a shard: what its rows are."""

    schema_version: Literal["eagle3/shard-index/2"] = SCHEMA
    sample_ids: tuple[str, ...]
    lengths: tuple[int, ...]
    label_rows: tuple[int, ...] = Field(description="Rows of each sample's last hidden state that a loss can read.")
    digest: str
    not_finite: tuple[str, ...] = Field(description="Samples stored as zeros without supervision.")
    checksums: dict[str, tuple[str, ...]] = Field(
        description="Tensor to the xxh3 (64 bits, hex) of each sample's rows, taken before they went to the disk."
    )

    @staticmethod
    def most_bytes(sample_ids: Sequence[str], tensors: int) -> int:
        """Return what index.json of so many tensors takes at most: a line for each figure, a bad id twice."""
        ids = sum(len(json.dumps(name)) for name in sample_ids)
        return 4096 + 2 * ids + len(sample_ids) * (40 + 24 * tensors)

    @classmethod
    def of(cls, shard: Artifact) -> ShardIndex:
        """Return the index of a committed shard, verified.

        Raises:
            UnknownSchemaError: another version of the program wrote it.
            ConfigError: it is none.
        """
        values, where = shard.json(INDEX), f"{shard.store.root}/{shard.ref.key}/{INDEX}"
        if isinstance(values, dict) and values.get("schema_version") != SCHEMA:
            raise UnknownSchemaError(
                f"{where}: expected {SCHEMA}, found {values.get('schema_version')!r}; run plan_capture again: this "
                "version captures it under another name"
            )
        return cls.parse(values, where)


def checksum(values: torch.Tensor) -> str:
    """Return the xxh3 (64 bits, hex) of a tensor's bytes, row after row."""
    return xxhash.xxh3_64_hexdigest(bytes_of(values))


class ShardWriter:
    """Writes the header first, because all sizes are known, then each sample's rows at their place.

    Samples are encoded, summed and written by a few threads, each sample by one: a single one moves less than a GPU
    computes. What they write does not depend on their order.

    Attributes:
        on_disk: tokens of the samples that are written; those of others wait in memory, up to WAITING_BYTES of states.
        not_finite: which of the samples that are on the disk have a value that is not finite in the shard's precision.
            Zeros are stored for them and no token is supervised, so that nothing is learnt from them.
    """

    def __init__(self, path: Path, encoding: Encoding, tokens: int, label_rows: int) -> None:
        """Prepare; `path` is made when the block is entered."""
        self._path, self._encoding, self._layout = path, encoding, encoding.layout(tokens, label_rows)
        self._header, self._starts, self._end = make_header(self._layout)
        self._rows = dict.fromkeys(self._layout, 0)
        self._checksums: list[dict[str, str]] = []
        self._pool = ThreadPoolExecutor(_WRITERS, thread_name_prefix="shard-writer")
        self._pending: deque[tuple[int, Future[tuple[bool, dict[str, str]]]]] = deque()
        self._waiting = self.on_disk = 0
        self._counting = threading.Lock()
        self.not_finite: list[int] = []

    def append(self, input_ids: Sequence[int], supervised: int, aux: torch.Tensor, last: torch.Tensor) -> None:
        """Write one sample of T tokens, of which the last `supervised` are the answer; it may be done later.

        Args:
            input_ids: [T].
            supervised: answer tokens.
            aux: [T, A * D], any float dtype; stored in the shard's. Nobody may change it any more.
            last: [T, D], likewise.

        Raises:
            CaptureMismatchError: rows or widths differ.
            OSError: this or a sample before it could not be written.
        """
        encoding, length = self._encoding, len(input_ids)
        for name, states, layers in (("aux_hidden_states", aux, encoding.num_aux), ("last_hidden_state", last, 1)):
            expected = (length, layers * encoding.hidden_size)
            if tuple(states.shape) != expected:
                raise CaptureMismatchError(f"{name}: expected shape {expected}, found {tuple(states.shape)}; recapture")
        offsets = {}
        for name, rows in encoding.rows(length, num_label_rows(length, supervised)).items():
            kind, shape = self._layout[name]
            offsets[name] = self._starts[name] + self._rows[name] * math.prod(shape[1:]) * DTYPE_BITS[kind] // 8
            self._rows[name] += rows
            if self._rows[name] > shape[0]:
                raise CaptureMismatchError(f"shard: expected {shape[0]} rows of {name}, found more; recapture")
        size = aux.nbytes + last.nbytes
        self._pending.append((size, self._pool.submit(self._store, offsets, input_ids, supervised, aux, last)))
        self._waiting += size
        self._wait(WAITING_BYTES)

    def checksums(self) -> dict[str, tuple[str, ...]]:
        """Wait for all samples; return the xxh3 of each one's rows of every tensor: the disk must return the same."""
        self._wait(0)
        return {name: tuple(sums[name] for sums in self._checksums) for name in self._layout}

    def __enter__(self) -> Self:
        self._file = self._path.open("wb", buffering=0)
        try:
            self._file.truncate(self._end)
            write_at(self._file.fileno(), self._header, 0)
        except BaseException:
            self._file.close()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Close the file.

        Raises:
            CaptureMismatchError: fewer rows were written than planned.
            OSError: a sample could not be written.
        """
        try:
            if error is None:
                self._wait(0)
        finally:
            self._pool.shutdown(cancel_futures=True)
            self._file.close()
        short = [name for name, rows in self._rows.items() if rows != self._layout[name][1][0]]
        if error is None and short:
            raise CaptureMismatchError(
                f"shard: expected {self._layout[short[0]][1][0]} rows of {short[0]}, found {self._rows[short[0]]}; "
                "recapture"
            )

    def _store(
        self, offsets: dict[str, int], input_ids: Sequence[int], supervised: int, aux: torch.Tensor, last: torch.Tensor
    ) -> tuple[bool, dict[str, str]]:
        """Write one sample; return whether all its values are finite, and the checksums of its rows."""
        import torch

        mask = torch.zeros(len(input_ids), dtype=torch.bool)
        mask[len(input_ids) - supervised :] = True
        kept = last if self._encoding.last_rows == "all" else last[label_rows(mask)]
        states = {
            **self._encoded("aux_hidden_states", "aux_scales", aux, self._encoding.num_aux),
            **self._encoded("last_hidden_state", "last_scales", kept, 1),
            "loss_mask": mask.to(torch.uint8),
        }
        finite = all(map(_is_finite, states.values()))
        stored = states if finite else {name: torch.zeros_like(values) for name, values in states.items()}
        stored["input_ids"] = torch.tensor(input_ids, dtype=torch.int32)
        sums = {}
        for name, values in stored.items():
            data = bytes_of(values)
            sums[name] = xxhash.xxh3_64_hexdigest(data)
            write_at(self._file.fileno(), data, offsets[name])
        with self._counting:
            self.on_disk += len(input_ids)
        return finite, sums

    def _encoded(self, name: str, scales_name: str, states: torch.Tensor, layers: int) -> dict[str, torch.Tensor]:
        import torch

        if scales_name not in self._layout:
            return {name: states.to(getattr(torch, self._encoding.dtype))}
        stored, scales = quantise(states, layers)
        return {name: stored, scales_name: scales}

    def _wait(self, most: int) -> None:
        """Wait until at most so many bytes of states are still to be written; see what became of those that are."""
        while self._waiting > most or (self._pending and self._pending[0][1].done()):
            size, done = self._pending.popleft()
            self._waiting -= size
            finite, sums = done.result()
            if not finite:
                self.not_finite.append(len(self._checksums))
            self._checksums.append(sums)


def _is_finite(values: torch.Tensor) -> bool:
    """Whether every value is; one in 8 bits is where its scale is."""
    import torch

    if not values.is_floating_point() or values.element_size() == 1:
        return True
    # A sum is not finite where a value is not (and seldom else): one pass without a second tensor.
    return bool(torch.isfinite(values.sum())) or bool(torch.isfinite(values).all())


def check_values(shard: Artifact, index: ShardIndex, encoding: Encoding, deep: OnBytes | None = None) -> None:
    """Compare a shard's tensors with the checksums in its manifest and its index.

    `deep` hears how much was read, and asks for more than the checksum of the file: those of the rows as they were
    handed to the disk, and finite values.

    Raises:
        CorruptArtifactError: says where the damage is.
    """
    path, where = shard.path(FEATURES), f"{shard.store.root}/{shard.ref.key}/{FEATURES}"
    wanted = shard.manifest.files[FEATURES].sha256
    if deep is None and file_sha256(path) == wanted:
        return
    every = [encoding.rows(*sizes) for sizes in zip(index.lengths, index.label_rows, strict=True)]
    try:
        found = scan(path, {name: [rows[name] for rows in every] for name in every[0]}, deep)
    except ValueError as error:
        raise CorruptArtifactError(f"{where}: {error}") from None
    bad = _other_rows(index, found.checksums)
    if found.sha256 != wanted:
        place = f"in {bad}" if bad else "outside the tensors"
        raise CorruptArtifactError(f"{where}: expected sha256 {wanted[:12]}, found {found.sha256[:12]}: damage {place}")
    if bad:
        raise CorruptArtifactError(f"{where}: {bad}: not what the capture handed to the disk")
    for name, row in found.not_finite.items():
        raise CorruptArtifactError(f"{where}: {name}: a value in row {row} is not finite")


def _other_rows(index: ShardIndex, found: dict[str, tuple[str, ...]]) -> str:
    """Return which tensors have other rows than were handed over, and of which samples; empty for none."""
    told = []
    for name, sums in index.checksums.items():
        others = found.get(name, ())
        ids = [*index.sample_ids, *["rows behind the samples"] * (len(others) - len(sums))]
        samples = [sample for one, other, sample in zip_longest(sums, others, ids) if one != other]
        if samples:
            told.append(f"{name} of {samples[0]}" + (f" and {len(samples) - 1} more samples" if samples[1:] else ""))
    return ", ".join(told)
