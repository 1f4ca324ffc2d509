"""Which samples share a prefill: decided by their lengths alone, never by when a request happens to arrive. Light.

Kernels round differently for another batch, so the same samples must always meet the same others.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from dataclasses import dataclass

_LEAST = 16
"""Tokens a shorter sample counts for, which bounds the samples of a prefill."""


@dataclass(frozen=True)
class SentPrefill:
    """One that was sent or waits for its turn, and whether it is over."""

    group: str
    over: threading.Event


def most_samples(prefill_tokens: int) -> int:
    """Return the most samples `prefills` puts together."""
    return max(1, prefill_tokens // _LEAST)


def prefills(lengths: Sequence[int], prefill_tokens: int, page_size: int = 1) -> list[range]:
    """Cut consecutive samples into prefills of at most `prefill_tokens`; a longer sample has one of its own.

    The engine takes KV cache in whole pages and counts them, so a sample counts for its pages.
    """
    groups: list[range] = []
    start = filled = 0
    for position, length in enumerate(lengths):
        cost = max(_LEAST, -(-length // page_size) * page_size)
        if position > start and filled + cost > prefill_tokens:
            groups.append(range(start, position))
            start, filled = position, 0
        filled += cost
    return [*groups, range(start, len(lengths))] if lengths else []
