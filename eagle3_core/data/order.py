"""Sample order as a pure function of seed and epoch; no rank, no world size, no state."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def epoch_generator(seed: int, epoch: int) -> np.random.Generator:
    """Return the one source of randomness of an epoch."""
    return np.random.Generator(np.random.Philox(key=[seed, epoch]))


def epoch_order(samples: Sequence[int], seed: int, epoch: int) -> list[int]:
    """Return `samples` in the order of an epoch: each exactly once."""
    shuffled = epoch_generator(seed, epoch).permutation(len(samples))
    return [samples[index] for index in shuffled]
