"""Pack samples into rows and rows into steps, losing none; the same steps whatever the number of ranks."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

from eagle3_core.data.order import epoch_generator, epoch_order
from eagle3_core.errors import InputError

WINDOW = 4096
"""Samples packed together: at 4096 a lognormal length mix fills rows to 99.9 %."""

Row = tuple[int, ...]
"""Samples of one packed row, by index."""


@dataclass(frozen=True, slots=True)
class Packing:
    """How many tokens make a row, and how many an optimiser step over all ranks."""

    row_tokens: int
    batch_tokens: int


@dataclass(frozen=True, slots=True)
class Accounts:
    """Tokens of one epoch: every one that comes in is trained on or masked; none is dropped."""

    samples: int
    tokens_in: int
    trained: int
    masked: int
    dropped: int
    fill: float


def pack(lengths: Sequence[int], order: Sequence[int], row_tokens: int) -> list[Row]:
    """Pack samples best-fit, longest first, within windows of the order; a sample longer than a row has its own."""
    rows: list[Row] = []
    for start in range(0, len(order), WINDOW):
        window = sorted(order[start : start + WINDOW], key=lambda sample: -lengths[sample])
        contents: list[list[int]] = []
        space: list[tuple[int, int]] = []  # (tokens left, row), rising
        for sample in window:
            found = bisect.bisect_left(space, (lengths[sample], -1))
            left, row = space.pop(found) if found < len(space) else (max(row_tokens, lengths[sample]), len(contents))
            if row == len(contents):
                contents.append([])
            contents[row].append(sample)
            bisect.insort(space, (left - lengths[sample], row))
        rows += [tuple(row) for row in contents]
    return rows


def plan_epoch(
    lengths: Sequence[int], samples: Sequence[int], packing: Packing, seed: int, epoch: int
) -> list[tuple[Row, ...]]:
    """Return the steps of an epoch, each a few rows of together at most `batch_tokens` (or one larger row)."""
    rows = pack(lengths, epoch_order(samples, seed, epoch), min(packing.row_tokens, packing.batch_tokens))
    # Packing sorts by length; a second shuffle keeps long samples from coming first.
    shuffled = epoch_generator(seed, epoch).permutation(len(rows))
    steps: list[tuple[Row, ...]] = []
    step: list[Row] = []
    filled = 0
    for row in (rows[index] for index in shuffled):
        tokens = sum(lengths[sample] for sample in row)
        if step and filled + tokens > packing.batch_tokens:
            steps.append(tuple(step))
            step, filled = [], 0
        step.append(row)
        filled += tokens
    return [*steps, tuple(step)] if step else steps


def share(rows: Sequence[Row], lengths: Sequence[int], rank: int, world: int) -> list[Row]:
    """Return one rank's rows of a step: the largest rows first, each to the rank with least work so far."""
    work, mine = [0] * world, []
    for row in sorted(rows, key=lambda row: (-sum(lengths[sample] for sample in row), row)):
        least = min(range(world), key=lambda candidate: (work[candidate], candidate))
        work[least] += sum(lengths[sample] for sample in row)
        if least == rank:
            mine.append(row)
    return mine


class TrainOrder:
    """All steps of a training run over `epochs` passes, fractions included."""

    def __init__(
        self, lengths: Sequence[int], samples: Sequence[int], packing: Packing, *, seed: int, epochs: float
    ) -> None:
        """Plan every epoch once, to know how many steps there are.

        Raises:
            InputError: there is nothing to train on.
        """
        if not samples:
            raise InputError("training: expected at least one training sample, found none; give more prompts")
        self.lengths, self.samples, self.packing, self.seed = lengths, samples, packing, seed
        self.epoch = lru_cache(maxsize=2)(self._epoch)
        counts = [len(self._epoch(epoch)) for epoch in range(math.ceil(epochs))]
        if epochs % 1:
            counts[-1] = max(1, round(counts[-1] * (epochs % 1)))
        self._counts, self.total_steps = counts, sum(counts)

    def _epoch(self, epoch: int) -> list[tuple[Row, ...]]:
        return plan_epoch(self.lengths, self.samples, self.packing, self.seed, epoch)

    def position(self, step: int) -> tuple[int, int]:
        """Return epoch and index within it of a step, both from 0."""
        for epoch, count in enumerate(self._counts):
            if step < count:
                return epoch, step
            step -= count
        return len(self._counts), 0

    def rows(self, step: int) -> tuple[Row, ...]:
        """Return the rows of a step."""
        epoch, index = self.position(step)
        return self.epoch(epoch)[index]

    def rows_of(self, rank: int, world: int, start: int) -> Iterator[Row]:
        """Yield one rank's rows from step `start` to the end, in the order in which it trains on them."""
        for step in range(start, self.total_steps):
            yield from share(self.rows(step), self.lengths, rank, world)

    def accounts(self, epoch: int, supervised: Sequence[int]) -> Accounts:
        """Count the tokens of an epoch as they are in its steps."""
        rows = [row for step in self.epoch(epoch) for row in step]
        placed = [sample for row in rows for sample in row]
        tokens_in = sum(self.lengths[sample] for sample in self.samples)
        in_rows = sum(self.lengths[sample] for sample in placed)
        trained = sum(supervised[sample] for sample in placed)
        room = sum(max(self.packing.row_tokens, sum(self.lengths[sample] for sample in row)) for row in rows)
        return Accounts(len(placed), tokens_in, trained, in_rows - trained, tokens_in - in_rows, in_rows / room)


class Samples(Protocol):
    """What training needs of a feature set."""

    def read(self, index: int) -> Any:
        """Return a FeatureSample of T tokens: ids, mask and states, with scales where those have 8 bits."""
