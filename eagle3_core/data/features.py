"""FeatureSet: random access to captured hidden states; opening reads lengths and names, never a tensor.

N samples, T tokens of one sample, D target width, A aux layers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.data.encoding import Encoding, dequantise, label_rows
from eagle3_core.data.remote import open_shard
from eagle3_core.data.shards import FEATURES, checksum
from eagle3_core.errors import CorruptArtifactError, NotCommittedError, UnknownSchemaError
from eagle3_core.storage import Artifact, ObjectStore, load

if TYPE_CHECKING:
    import numpy as np
    import torch

INDEX = "index.safetensors"
SAMPLES = "samples.json"
SCHEMA = "eagle3/feature-set/3"
_READS = 3
"""How often rows are asked for whose checksum is wrong: what came over a network may come whole the next time."""


@dataclass(frozen=True, slots=True)
class FeatureSample:
    """One sample of T tokens.

    Attributes:
        input_ids: int64 [T], prompt and answer.
        loss_mask: bool [T], true on the tokens of the answer, its EOS included.
        aux_hidden_states: [T, A * D], lowest layer first, in the stored dtype.
        last_hidden_state: [T, D], after the target's final norm; NaN in rows that are not stored.
        aux_scales: float32 [T, A] with which states in 8 bits are still to be multiplied; None for others.
        last_scales: float32 [T, 1], likewise; here NaN stands in the rows that are not stored.
    """

    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_state: torch.Tensor
    aux_scales: torch.Tensor | None = None
    last_scales: torch.Tensor | None = None

    def restored(self) -> FeatureSample:
        """Return the sample with its states in 8 bits turned back into float32."""
        aux, last = self.aux_hidden_states, self.last_hidden_state
        return FeatureSample(
            self.input_ids, self.loss_mask,
            aux if self.aux_scales is None else dequantise(aux, self.aux_scales),
            last if self.last_scales is None else dequantise(last, self.last_scales),
        )  # fmt: skip


class FeatureSet:
    """A sealed feature set. Shards are mapped into memory when first read; a read copies one sample's rows.

    What was read is compared with the checksums that capture took before the disk, so nothing else is ever trained on.
    """

    def __init__(self, artifact: Artifact, index: Mapping[str, np.ndarray], values: Mapping[str, Any]) -> None:
        """Use `open` instead."""
        self.artifact = artifact
        self.lengths: np.ndarray = index["length"]
        self.supervised: np.ndarray = index["supervised"]
        self.held_out: np.ndarray = index["held_out"]
        self.domain: np.ndarray = index["domain"]
        self.domains: Sequence[str] = values["domains"]
        self.sample_ids: Sequence[str] = values["sample_ids"]
        self.aux_layers: tuple[int, ...] = tuple(values["aux_layers"])
        self.encoding = Encoding.parse(values["encoding"], f"{artifact.ref.key}/{SAMPLES}")
        self.target: Mapping[str, Any] = values["target"]
        self._offsets, self._shard_of = index["offset"], index["shard"]
        self._label_rows, self._last_offsets = index["label_rows"], index["last_offset"]
        self._checksums = index["checksums"]
        self._shards: Sequence[Mapping[str, str]] = values["shards"]
        self._open: dict[int, Any] = {}

    @classmethod
    def open(cls, store: ObjectStore, ref: Ref) -> FeatureSet:
        """Open the feature set at `ref`.

        Raises:
            ArtifactError: it is not committed, not a feature set of this version, or its index is damaged.
        """
        from safetensors.numpy import load_file

        artifact = load(store, ref.expect(Kind.FEATURE_SET))
        values = artifact.json(SAMPLES)
        if values.get("schema_version") != SCHEMA:
            raise UnknownSchemaError(
                f"{store.root}/{ref.key}/{SAMPLES}: expected {SCHEMA}, found {values.get('schema_version')!r}; "
                "run seal again"
            )
        return cls(artifact, load_file(artifact.verified_path(INDEX)), values)

    def __len__(self) -> int:
        """Return N."""
        return len(self.sample_ids)

    def read(self, sample: int) -> FeatureSample:
        """Return one sample as it is stored: what has 8 bits is turned back where it is used, which may be a GPU.

        Raises:
            CorruptArtifactError: its shard is missing, is another one than was sealed, has another size, or the rows
                are not those that were captured.
        """
        import torch

        stored = self._stored(sample)
        loss_mask = stored["loss_mask"].to(torch.bool)
        return FeatureSample(
            input_ids=stored["input_ids"].to(torch.int64),
            loss_mask=loss_mask,
            aux_hidden_states=stored["aux_hidden_states"],
            last_hidden_state=self._every_row(stored["last_hidden_state"], loss_mask),
            aux_scales=stored.get("aux_scales"),
            last_scales=self._every_row(stored["last_scales"], loss_mask) if "last_scales" in stored else None,
        )

    def _stored(self, sample: int) -> dict[str, torch.Tensor]:
        """Return the sample's rows of every tensor, as they are stored, compared with their checksums."""
        shard = self._shard(int(self._shard_of[sample]))
        first, last = int(self._offsets[sample]), int(self._last_offsets[sample])
        rows = self.encoding.rows(int(self.lengths[sample]), int(self._label_rows[sample]))
        found = {}
        for number, (name, count) in enumerate(sorted(rows.items())):
            start = last if name.startswith("last_") else first
            wanted = f"{int(self._checksums[sample, number]):016x}"
            for _ in range(_READS):
                found[name] = shard.get_slice(name)[start : start + count]
                if (got := checksum(found[name])) == wanted:
                    break
            else:
                key = self._shards[int(self._shard_of[sample])]["key"]
                raise CorruptArtifactError(
                    f"{self.artifact.store.root}/{key}/{FEATURES}: {name} of {self.sample_ids[sample]}: expected xxh3 "
                    f"{wanted}, found {got} {_READS} times; repair it"
                )
        return found

    def _every_row(self, stored: torch.Tensor, loss_mask: torch.Tensor) -> torch.Tensor:
        """Return [T, ...] of which the rows that are not stored are NaN, or 0 in 8 bits: their scale is NaN."""
        import torch

        if self.encoding.last_rows == "all":
            return stored
        # A sample that was not finite has rows, and no label that could read them. Whoever reads another is to notice.
        kept, eight_bits = label_rows(loss_mask), stored.element_size() == 1
        shape = (len(loss_mask), *stored.shape[1:])
        every = (
            torch.zeros(shape, dtype=torch.uint8) if eight_bits else torch.full(shape, torch.nan, dtype=stored.dtype)
        )
        every[kept] = (stored.view(torch.uint8) if eight_bits else stored)[: len(kept)]
        return every.view(stored.dtype)

    def _shard(self, number: int) -> Any:
        if number not in self._open:
            entry = self._shards[number]
            sealed = Ref(kind=Kind.SHARD, key=entry["key"], manifest_sha256=entry["manifest_sha256"])
            try:
                self._open[number] = open_shard(load(self.artifact.store, sealed), FEATURES)
            except NotCommittedError:
                raise CorruptArtifactError(
                    f"{self.artifact.store.root}/{entry['key']}: expected a shard of {self.artifact.ref.key}, found "
                    "none: a repair moves what is bad away and captures it again; wait for it, or run repair_capture"
                ) from None
        return self._open[number]


def write_feature_set(
    directory: Path, encoding: Encoding, columns: Mapping[str, Sequence[Any]], values: Mapping[str, Any]
) -> None:
    """Write the index of a feature set.

    Args:
        directory: where its files go.
        encoding: how all its shards are stored.
        columns: length, supervised, label_rows, shard, held_out, domain and checksums of every sample, in the order of
            shards and of rows; its checksums are one number a tensor, by name.
        values: aux_layers, target, engine, domains, sample_ids and, for each shard, its key and manifest_sha256.
    """
    import numpy as np
    from safetensors.numpy import save_file

    index = {
        name: np.asarray(columns[name], dtype=np.int32)
        for name in ("length", "supervised", "label_rows", "shard", "domain")
    }
    length, shard = index["length"], index["shard"]
    last = index["label_rows"] if encoding.last_rows == "labels" else length
    firsts = np.searchsorted(shard, shard)

    def within_shard(rows: Any) -> Any:
        before = np.cumsum(rows, dtype=np.int64) - rows
        return before - before[firsts]

    offsets = {"offset": within_shard(length), "last_offset": within_shard(last)}
    others = {"held_out": np.asarray(columns["held_out"], dtype=np.bool_)}
    others["checksums"] = np.asarray(columns["checksums"], dtype=np.uint64)
    save_file(index | offsets | others, directory / INDEX)
    described = {"schema_version": SCHEMA, "encoding": encoding.model_dump(mode="json"), **values}
    (directory / SAMPLES).write_text(json.dumps(described), encoding="utf-8")
