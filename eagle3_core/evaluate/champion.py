"""Compare the answers of two drafters, prompt by prompt. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from eagle3_core.errors import InputError
from eagle3_core.evaluate.against import Against, DomainAgainst, Ratio
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.bench.versus import T95, drift, paired, ratios, resampled
from eagle3_core.evaluate.measurement import pool

LEAST_PROMPTS = 2
"""Of a single prompt there is no interval."""
LEAST_PASSES = 3
"""Two passes that happen to agree show no drift, and two that do not say nothing: Student's t is 12.7 there."""
_Z95 = 1.96


def compare_drafters(shape: str, challenger: Sequence[StreamedAnswer], champion: Sequence[StreamedAnswer]) -> Against:
    """Compare both at one shape.

    The interval of the acceptance length's ratio comes from a bootstrap over prompts, each with both its answers; that
    of the speed's also from how the passes differ, since a machine drifts; with fewer than three it is unknown.

    Raises:
        NotSpeculatingError: an answer has no counters, or none of a drafter needed a verify pass.
        InputError: they have fewer than two prompts in common.
    """
    pools = [pool(answers, speculating=True) for answers in (challenger, champion)]
    pairs = paired(challenger, champion)
    counts = _verify_counts(challenger, champion)
    if len(counts) < LEAST_PROMPTS or len(pairs) < LEAST_PROMPTS:
        raise InputError(
            f"challenge: expected at least {LEAST_PROMPTS} held-out prompts that both drafters answered with a verify "
            f"pass, found {len(counts)}; raise data.held_out_fraction or evaluation.max_prompts"
        )
    speeds = np.array([np.sum(list(pair.passes.values()), axis=0) for pair in pairs])
    accepted = np.array([row for _, row in counts.values()])
    tokens, verified, their_tokens, their_verified = accepted.sum(0).tolist()
    passes = max(len(pair.passes) for pair in pairs)
    unknown = Ratio(ratio=float(ratios(speeds.sum(0))), low=None, high=None)
    return Against(
        shape=shape, prompts=len(pairs), passes=passes, acceptance=_interval(accepted),
        speed=unknown if passes < LEAST_PASSES else _interval(speeds, drift(pairs)),
        challenger_acceptance=tokens / verified, champion_acceptance=their_tokens / their_verified,
        challenger_tokens_per_s=pools[0].stream_tokens_per_s, champion_tokens_per_s=pools[1].stream_tokens_per_s,
        domains=tuple(_domains(counts.values())),
    )  # fmt: skip


_Row = tuple[float, float, float, float]


def _verify_counts(
    challenger: Iterable[StreamedAnswer], champion: Iterable[StreamedAnswer]
) -> dict[str, tuple[str, _Row]]:
    """Return by prompt its domain, and tokens and verify passes of both; a prompt without a pass says nothing."""
    found: dict[str, tuple[str, list[float]]] = {}
    for side, answers in enumerate((challenger, champion)):
        for answer in answers:
            if answer.verify_passes:
                _, row = found.setdefault(answer.id, (answer.domain, [0.0] * 4))
                row[2 * side] += answer.completion_tokens
                row[2 * side + 1] += answer.verify_passes
    return {
        name: (domain, (row[0], row[1], row[2], row[3]))
        for name, (domain, row) in sorted(found.items())
        if row[1] and row[3]
    }


def _domains(rows: Iterable[tuple[str, _Row]]) -> Iterable[DomainAgainst]:
    by_domain: dict[str, list[_Row]] = {}
    for domain, row in rows:
        by_domain.setdefault(domain, []).append(row)
    for domain, found in sorted(by_domain.items()):
        table = np.array(found)
        tokens, passes, their_tokens, their_passes = table.sum(0).tolist()
        yield DomainAgainst(
            domain=domain, prompts=len(found), challenger=tokens / passes, champion=their_tokens / their_passes,
            ratio=_interval(table) if len(found) >= LEAST_PROMPTS else None,
        )  # fmt: skip


def _interval(rows: Any, drifted: float = 0.0) -> Ratio:
    """Return the ratio of the pooled figures of rows [prompts, 4] and its interval.

    A bootstrap of few prompts is too narrow: its edges are moved out by Student's t and n / (n - 1).

    Args:
        rows: Numerator and denominator here, numerator and denominator there, of each prompt.
        drifted: Half the interval of the logarithm of the ratio that the passes show.
    """
    count = len(rows)
    ratio = float(ratios(rows.sum(0)))
    edges = np.quantile(np.log(resampled(rows) / ratio), (0.025, 0.975))
    widened = _t95(count - 1) / _Z95 * (count / (count - 1)) ** 0.5
    below, above = np.hypot(edges * widened, drifted)
    return Ratio(ratio=ratio, low=float(ratio * np.exp(-below)), high=float(ratio * np.exp(above)))


def _t95(freedom: int) -> float:
    """Return Student's t, 95 %, two-sided; beyond the table by the first terms of its expansion."""
    return T95[freedom - 1] if freedom <= len(T95) else _Z95 + 2.37 / freedom + 2.82 / freedom**2
