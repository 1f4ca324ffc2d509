"""Choose the draft vocabulary; the only module that does d2t offset arithmetic. Standard library alone.

U draft tokens stand for U of the target's V. Draft id i stands for target id `i + d2t[i]`: d2t holds offsets, as SGLang
and vLLM expect; `t2d[v]` tells whether target id v is one of them.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from eagle3_core.errors import ConfigError, CorruptArtifactError


@dataclass(frozen=True)
class VocabMap:
    """The draft vocabulary: `target_ids` [U], rising, out of `target_size` (V)."""

    target_ids: tuple[int, ...]
    target_size: int

    @property
    def d2t(self) -> list[int]:
        """Return the offsets [U]."""
        return [target - draft for draft, target in enumerate(self.target_ids)]

    @property
    def t2d(self) -> list[bool]:
        """Return the membership mask [V]."""
        member = [False] * self.target_size
        for target in self.target_ids:
            member[target] = True
        return member

    @classmethod
    def from_offsets(cls, d2t: Sequence[int], t2d: Sequence[bool]) -> VocabMap:
        """Return the map stored as offsets and mask.

        Raises:
            CorruptArtifactError: the two do not describe one vocabulary, for example absolute ids instead of offsets.
        """
        targets = tuple(draft + int(offset) for draft, offset in enumerate(d2t))
        rising = all(low < high for low, high in itertools.pairwise(targets))
        inside = bool(targets) and targets[0] >= 0 and targets[-1] < len(t2d)
        if not (rising and inside):
            raise CorruptArtifactError(
                f"d2t: expected {len(targets)} offsets to rising ids below {len(t2d)}, found {list(d2t[-3:])} last "
                "(absolute ids are not offsets); run build_vocab again"
            )
        members = [target for target, member in enumerate(t2d) if member]
        if members != list(targets):
            raise CorruptArtifactError(
                f"t2d: expected the {len(targets)} tokens of d2t, found {len(members)} others; run build_vocab again"
            )
        return cls(targets, len(t2d))

    def coverage(self, counts: Mapping[int, int]) -> float:
        """Return the share of counted tokens that the draft vocabulary holds.

        Raises:
            ConfigError: nothing was counted.
        """
        total = sum(counts.values())
        if not total:
            raise ConfigError("coverage: expected counted tokens, found none; are there answers in this split?")
        return sum(counts.get(target, 0) for target in self.target_ids) / total


def check_draft_vocab_size(size: int, target_size: int) -> None:
    """Refuse a draft vocabulary that is larger than the target's.

    Raises:
        ConfigError: U > V.
    """
    if size > target_size:
        raise ConfigError(
            f"drafter.draft_vocab_size: expected at most the target's {target_size} tokens, found {size}; lower it"
        )


def ranking(counts: Mapping[int, int], required: Iterable[int], target_size: int) -> list[int]:
    """Return all V target ids, best first: `required` (EOS and other specials), then by count, ties by id."""
    first = sorted(set(required))
    if first and not 0 <= first[0] <= first[-1] < target_size:
        raise ConfigError(f"special tokens: expected ids below {target_size}, found {first[-1]}; check config.json")
    taken = set(first)
    rest = sorted((token for token in range(target_size) if token not in taken), key=lambda t: (-counts.get(t, 0), t))
    return first + rest


def choose(counts: Mapping[int, int], required: Iterable[int], size: int, target_size: int) -> VocabMap:
    """Return the draft vocabulary of exactly `size` tokens.

    Where fewer distinct tokens were counted, tokens of count zero fill it up, lowest id first.

    Args:
        counts: supervised tokens of the training split, by target id.
        required: ids that must be in, EOS first of all.
        size: U.
        target_size: V.

    Raises:
        ConfigError: U > V, or the required tokens alone are more than U.
    """
    check_draft_vocab_size(size, target_size)
    needed = len(set(required))
    if needed > size:
        raise ConfigError(
            f"drafter.draft_vocab_size: expected room for {needed} special tokens, found {size}; raise it"
        )
    return VocabMap(tuple(sorted(ranking(counts, required, target_size)[:size])), target_size)


def sufficient_size(
    counts: Mapping[int, int], held_out: Mapping[int, int], required: Iterable[int], target_size: int, share: float
) -> int:
    """Return the least size whose vocabulary, chosen by `counts`, covers `share` of the `held_out` tokens."""
    total, covered = sum(held_out.values()), 0
    for size, token in enumerate(ranking(counts, required, target_size), start=1):
        covered += held_out.get(token, 0)
        if covered >= share * total:
            return size
    return target_size
