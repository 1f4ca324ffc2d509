"""Acceptance length, defined once. Pure arithmetic on counts.

Two figures are reported for a chain of K draft tokens:

`tau`        what the drafter would get if every position started a verify pass: 1 + sum of `full_acc`.
`tau_chain`  what a server gets: the walk of verify passes over each answer, pooled over answers.

`tau` is also computed for sampling at temperature 1: a draft token drawn from the drafter's q is accepted by the
target's p with probability sum(min(p, q)), which a chain multiplies up, along the answer's own tokens.

SGLang (0.5.23) reports per request `spec_accept_length = completion_tokens / spec_verify_ct`:

* The first token of an answer comes from the prefill, without a verify pass, and is counted in `completion_tokens`.
* Every verify pass emits the accepted draft tokens and one more, the bonus; each is counted in `spec_verify_ct`,
  the last one included.
* What the last pass emits after the stop token or past `max_new_tokens` is cut off: `completion_tokens` does not count
  it. (`spec_num_correct_drafts` and its histogram do.)
* An answer of one token has no verify pass and no accept length.

`chain_walk` does the same, so the two can be compared digit by digit. Trees (topk > 1) are not predicted.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Self

from eagle3_core.errors import NotSpeculatingError


@dataclass(frozen=True, slots=True)
class Walk:
    """Tokens answered and the verify passes that took."""

    completion_tokens: int = 0
    verify_passes: int = 0

    def __add__(self, other: Walk) -> Walk:
        """Pool two walks."""
        return Walk(self.completion_tokens + other.completion_tokens, self.verify_passes + other.verify_passes)

    @classmethod
    def pool(cls, walks: Iterable[Walk]) -> Self:
        """Return the sum over answers that needed a verify pass; the others say nothing about the drafter."""
        counted = [walk for walk in walks if walk.verify_passes]
        return cls(sum(walk.completion_tokens for walk in counted), sum(walk.verify_passes for walk in counted))

    @property
    def accept_length(self) -> float:
        """Return tokens per verify pass.

        Raises:
            NotSpeculatingError: no verify pass was counted.
        """
        if not self.verify_passes:
            raise NotSpeculatingError("no verify pass counted, so no acceptance length exists; is the drafter loaded?")
        return self.completion_tokens / self.verify_passes


def chain_walk(accepted: Sequence[int], num_steps: int, max_tokens: int | None = None) -> Walk:
    """Replay the server's verify passes over one answer.

    Args:
        accepted: For each token of the answer, how many draft tokens in a row are right when a verify pass starts with
            that token as the last known one. Values beyond `num_steps` are cut to it; the last token's is not used.
        num_steps: Draft tokens of one chain.
        max_tokens: Where the server stops, if before the end of the answer.
    """
    length = len(accepted) if max_tokens is None else min(len(accepted), max_tokens)
    known, passes = 1, 0
    while known < length:
        known += min(accepted[known - 1], num_steps) + 1
        passes += 1
    return Walk(length, passes)


@dataclass(frozen=True, slots=True)
class DepthCounts:
    """For each depth k (from 0): chains with k+1 supervised steps, and those of them right at all of these steps.

    Greedy, `correct` is a count; sampling, the sum of the chains' probabilities to be accepted so far.
    """

    valid: tuple[int, ...]
    correct: tuple[float, ...]

    @property
    def full_acc(self) -> list[float]:
        """Return the share of chains right up to and including each depth.

        Raises:
            NotSpeculatingError: a depth no chain reaches.
        """
        if not all(self.valid):
            raise NotSpeculatingError(
                f"no supervised chain is {self.valid.index(0) + 1} steps deep; use longer answers"
            )
        return [right / of for right, of in zip(self.correct, self.valid, strict=True)]

    @property
    def cond_acc(self) -> list[float | None]:
        """Return the share right at each depth among those right before it; None where there are none."""
        full = [1.0, *self.full_acc]
        return [after / before if before else None for before, after in itertools.pairwise(full)]

    def tau(self, num_steps: int) -> float:
        """Return 1 + the sum of `full_acc` over `num_steps` depths."""
        return 1.0 + sum(self.full_acc[:num_steps])
