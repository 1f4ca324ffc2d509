"""Acceptance length, defined once. Pure arithmetic on counts.

Two figures are reported for a chain of K draft tokens:

`tau`        what the drafter would get if every position started a verify pass: 1 + sum of `full_acc`.
`tau_chain`  what a server gets: the walk of verify passes over each answer, pooled over answers.

Both are also computed for sampling at temperature 1, by the rule of SGLang's EAGLE on a GPU (0.5.23): the draft is the
same greedy one, and a draft token is accepted with the target's own probability of it (`eagle_sample` calls
`tree_speculative_sampling_target_only`, which compares that with a uniform number; how likely the drafter found it is
not asked). Speculative sampling as published would draw from the drafter's q and accept with probability
sum(min(p, q)); SGLang does so only with `--speculative-use-rejection-sampling`, where the draft vocab is the target's.
The estimate follows the captured answers, which are greedy: where the drafter guesses another token than the answer's,
what comes after is judged along the answer, and a sampled answer also goes where no greedy one does.

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

import numpy as np
import numpy.typing as npt

from eagle3_core.errors import NotSpeculatingError

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Walk:
    """Tokens answered and the verify passes that took: counted, or to be expected."""

    completion_tokens: int
    verify_passes: float

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


def expected_passes(likely: Floats, max_tokens: int | None = None) -> list[float]:
    """Return the verify passes that a server that samples needs for one answer, in the mean, by length of the chain.

    Args:
        likely: [tokens, K]; for each token of the answer and k from 0 the probability that more than k draft tokens are
            accepted when a verify pass starts with that token as the last known one. The last token's is not used.
        max_tokens: Where the server stops, if before the end of the answer.
    """
    tokens, depth = likely.shape
    length = tokens if max_tokens is None else min(tokens, max_tokens)
    reached = np.concatenate((np.ones((tokens, 1)), likely), axis=1)
    # [tokens, chain length - 1, accepted]: a chain of n ends after fewer, or is accepted in whole.
    exactly = np.zeros((tokens, depth, depth + 1))
    for steps in range(1, depth + 1):
        exactly[:, steps - 1, :steps] = reached[:, :steps] - reached[:, 1 : steps + 1]
        exactly[:, steps - 1, steps] = reached[:, steps]
    begun = np.zeros((depth, length + depth + 2))  # probability that a pass begins with so many tokens known
    begun[:, 1] = 1
    for known in range(1, length):
        begun[:, known + 1 : known + depth + 2] += begun[:, known, None] * exactly[known - 1]
    passes: list[float] = begun[:, 1:length].sum(axis=1).tolist()
    return passes


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
