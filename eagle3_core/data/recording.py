"""Record one shard: every sample's states once, with a canary first, in the middle and last.

The canary is one sample asked for three times. Its states must come back equal: an engine that mixes up requests, loses
rows or drifts cannot do that.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from eagle3_core.data.encoding import num_label_rows
from eagle3_core.data.plan import PlannedShard, ShardPlan, tokens_file
from eagle3_core.data.shards import FEATURES, INDEX, ShardIndex, ShardWriter
from eagle3_core.errors import CaptureMismatchError
from eagle3_core.storage import Artifact

if TYPE_CHECKING:
    import torch

TOLERANCE = {"float32": 1e-3, "float16": 2e-2, "bfloat16": 1e-1}
"""Largest mean relative error of a canary's rows: kernels differ with the batch; another request's rows are near 1."""


class Captured(Protocol):
    """What an engine hands back for one sample of T tokens: ids [T], aux [T, A*D], last [T, D]."""

    @property
    def index(self) -> int:
        """Return the position in what was asked for."""

    @property
    def input_ids(self) -> torch.Tensor:
        """Return the ids the engine ran."""

    @property
    def aux_hidden_states(self) -> torch.Tensor:
        """Return the aux states."""

    @property
    def last_hidden_state(self) -> torch.Tensor:
        """Return the last states, after the final norm."""


Capture = Callable[[Sequence[Sequence[int]]], Iterable[Captured]]


@dataclass(frozen=True)
class ShardSamples:
    """Token ids of a shard's samples, and how many of each are the answer."""

    input_ids: list[list[int]]
    supervised: list[int]

    @classmethod
    def read(cls, plan: Artifact, index: int) -> ShardSamples:
        """Read them from the plan, verified."""
        from safetensors.numpy import load_file

        tensors = load_file(plan.verified_path(tokens_file(index)))
        ends = tensors["lengths"].cumsum().tolist()
        ids = tensors["input_ids"].tolist()
        starts = [0, *ends[:-1]]
        return cls([ids[a:b] for a, b in zip(starts, ends, strict=True)], tensors["supervised"].tolist())


def record(
    capture: Capture,
    plan: ShardPlan,
    shard: PlannedShard,
    samples: ShardSamples,
    directory: Path,
    max_bad: float,
    on_tokens: Callable[[int, int], None],
) -> None:
    """Write features.safetensors and index.json of one shard into `directory`.

    `on_tokens` hears after every sample how many tokens were captured, and of how many the states are on the disk.

    Raises:
        CaptureMismatchError: ids, rows or order differ, more samples than a share of `max_bad` (at least one, unless it
            is 0) have values that are not finite, or the canary's states differ.
    """
    canary = min(range(len(samples.input_ids)), key=lambda sample: len(samples.input_ids[sample]))
    every, middle = list(range(len(samples.input_ids))), len(samples.input_ids) // 2
    order = [None, *every[:middle], None, *every[middle:], None]
    asked = [samples.input_ids[canary if sample is None else sample] for sample in order]
    first: Captured | None = None
    written = 0
    with ShardWriter(directory / FEATURES, plan.encoding, shard.tokens, shard.label_rows) as writer:
        for sample, ids, got in _in_order(capture, order, asked):
            if sample is not None:
                states = got.aux_hidden_states, got.last_hidden_state
                writer.append(ids, samples.supervised[sample], *states)
                _check_budget(writer.not_finite, shard, plan.dtype, max_bad)
                written += len(ids)
                on_tokens(written, writer.on_disk)
            elif first is None:
                first = got
            else:
                check_canary(first, got, plan)
        checksums = writer.checksums()
        on_tokens(written, writer.on_disk)
        _check_budget(writer.not_finite, shard, plan.dtype, max_bad)
    lengths = tuple(len(ids) for ids in samples.input_ids)
    index = ShardIndex(
        sample_ids=shard.sample_ids, lengths=lengths,
        label_rows=tuple(map(num_label_rows, lengths, samples.supervised)), digest=shard.digest,
        not_finite=tuple(shard.sample_ids[sample] for sample in writer.not_finite), checksums=checksums,
    )  # fmt: skip
    (directory / INDEX).write_text(index.model_dump_json(indent=1), encoding="utf-8")


def _check_budget(bad: Sequence[int], shard: PlannedShard, dtype: str, max_bad: float) -> None:
    """Refuse more bad samples than are allowed: it is not the samples then.

    Raises:
        CaptureMismatchError: names the last one.
    """
    allowed = max(1, int(max_bad * len(shard.sample_ids))) if max_bad else 0
    if len(bad) > allowed:
        raise CaptureMismatchError(
            f"capture: {len(bad)} samples of a shard have states that are not finite in {dtype}, {allowed} are allowed "
            f"(capture.max_bad_samples), the last is {shard.sample_ids[bad[-1]]}; choose a wider "
            "capture.dtype or target.dtype"
        )


def _in_order(
    capture: Capture, order: Sequence[int | None], asked: Sequence[list[int]]
) -> Iterator[tuple[int | None, list[int], Captured]]:
    """Yield sample (None: the canary), its ids and its states, exactly as asked."""
    received = 0
    for got in capture(asked):
        if received >= len(order) or got.index != received:
            raise CaptureMismatchError(
                f"capture: expected sample {received} of {len(order)}, found {got.index}; recapture"
            )
        if got.input_ids.tolist() != asked[received]:
            raise CaptureMismatchError(f"capture: sample {received} came back with other token ids than were sent")
        yield order[received], asked[received], got
        received += 1
    if received != len(order):
        raise CaptureMismatchError(f"capture: expected {len(order)} samples, found {received}; recapture")


def check_canary(first: Captured, later: Captured, plan: ShardPlan) -> None:
    """Compare two captures of the same sample, layer by layer.

    Raises:
        CaptureMismatchError: a layer's rows differ by more than the tolerance of the target's dtype.
    """
    import torch

    bound = TOLERANCE[plan.target_dtype]
    pairs = {"last_hidden_state": (first.last_hidden_state, later.last_hidden_state)}
    size = plan.hidden_size
    for number, layer in enumerate(plan.aux_layers):
        columns = slice(number * size, (number + 1) * size)
        pairs[f"output of layer {layer}"] = (first.aux_hidden_states[:, columns], later.aux_hidden_states[:, columns])
    for name, (one, other) in pairs.items():
        if one.shape != other.shape:
            raise CaptureMismatchError(f"canary: {name}: expected shape {tuple(one.shape)}, found {tuple(other.shape)}")
        if not torch.equal(torch.isfinite(one), torch.isfinite(other)):
            raise CaptureMismatchError(f"canary: {name}: expected equal states, found NaN or infinity in one alone")
        one, other = (states.double().nan_to_num(0.0, 0.0, 0.0) for states in (one, other))
        norms = one.norm(dim=1).clamp_min(1e-12)
        # The mean over rows: a first token of huge norm must not hide the others.
        error = float(((one - other).norm(dim=1) / norms).mean())
        if not error <= bound:
            raise CaptureMismatchError(
                f"canary: {name}: expected equal states within {bound}, found a relative difference of {error:.3g} "
                f"between requests {first.index} and {later.index}; the engine mixes up requests: recapture"
            )
