"""Put two benchmarks side by side: speed with its uncertainty, break-even, equality of answers, words. Pure.

The speed of a point is tokens per second of single answers, pooled (sum of tokens over sum of latencies): with a fixed
number in flight it is proportional to the throughput, and it can be resampled prompt by prompt. Its interval has two
parts, added as variances of the logarithm: the choice of prompts (bootstrap, each prompt with both its answers) and the
machine's own drift from pass to pass (t interval over the passes' ratios). Prompts alone would call a server faster
than itself.

Break-even is the acceptance length at which that speed would be the other server's, from the measured cost of a verify
pass with its drafts (c) and of a plain step (p): an answer of T tokens takes ttft + P * c seconds with P passes, and
ttft' + (T - 1) * p without.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.errors import InputError
from eagle3_core.evaluate.bench.plan import Point
from eagle3_core.evaluate.bench.results import BenchRun, CellResult
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.gate import DEAD_BELOW, Word
from eagle3_core.evaluate.measurement import first_difference

RESAMPLES = 2000
T95 = (12.71, 4.30, 3.18, 2.78, 2.57, 2.45, 2.36, 2.31, 2.26)
"""Student's t, 95 %, two-sided, for 1, 2, ... degrees of freedom; the last stands for more."""
ONE_PASS = 0.15
"""Drift assumed where a single pass shows none: two busy cores gave a server 13 % against itself."""
EARLY = 4
"""Answers that part among their first tokens are seldom near-ties."""


class Speedup(Section):
    """Times the other server's speed, with its 95 % interval: over prompts and over passes."""

    ratio: float
    low: float | None = Field(description="None: fewer than two prompts in common.")
    high: float | None
    prompts: int


class DomainSpeedup(Section):
    """One domain at one point of the sweep."""

    domain: str
    speedup: Speedup
    acceptance_length: float | None


class CellComparison(Point):
    """One point of the sweep."""

    word: Word
    speedup: Speedup
    throughput_ratio: float = Field(description="Output tokens per second of whole passes, medians.")
    acceptance_length: float | None
    cost_ratio: float | None = Field(description="A verify pass with its drafts against a plain step.")
    break_even: float | None = Field(description="Acceptance length at which the speeds would be equal.")
    compared: int
    equal: int | None = Field(description="Answers equal token by token; None: sampled, so they need not be.")
    parted_early: int | None = Field(description=f"Those that part within the first {EARLY} tokens.")
    domains: tuple[DomainSpeedup, ...]


class Comparison(Section):
    """One benchmark against another."""

    against: str
    baseline: bool = Field(description="The other server did not speculate.")
    cells: tuple[CellComparison, ...]


def compare(run: BenchRun, other: BenchRun) -> Comparison:
    """Compare the points that both have.

    Raises:
        InputError: no point, or no prompt, in common.
    """
    baseline = not other.server.speculating
    rows = []
    for cell in run.cells:
        theirs = other.at(cell.cell)
        pairs = paired(run.answers_at(cell.cell), other.answers_at(cell.cell))
        if theirs is not None and pairs:
            rows.append(_compare_cell(cell, theirs, pairs, baseline))
    if not rows:
        raise InputError(
            "expected a point of the sweep and prompts that both benchmarks have, found none; measure with the same "
            f"--prompts, --concurrency, --max-new-tokens and --temperature as {other.server.url}"
        )
    title = "no speculation" if baseline else f"{other.server.title} at {other.server.url}"
    return Comparison(against=title, baseline=baseline, cells=tuple(rows))


class Pair(Section):
    """What one prompt gave on both servers, in the passes that both answered."""

    domain: str
    passes: dict[int, tuple[float, float, float, float]] = Field(
        description="By pass: tokens and seconds here, tokens and seconds there."
    )
    ids: tuple[tuple[int, ...], tuple[int, ...]]


def paired(mine: Sequence[StreamedAnswer], theirs: Sequence[StreamedAnswer]) -> list[Pair]:
    """Return what both answered, prompt by prompt, in the passes that both did."""
    sides: list[dict[str, dict[int, StreamedAnswer]]] = [{}, {}]
    for side, answers in zip(sides, (mine, theirs), strict=True):
        for answer in answers:
            side.setdefault(answer.id, {})[answer.repeat] = answer
    found = []
    for name in sorted(set(sides[0]) & set(sides[1])):
        ours, others = sides[0][name], sides[1][name]
        passes = {repeat: (*_pace(ours[repeat]), *_pace(others[repeat])) for repeat in sorted(set(ours) & set(others))}
        if passes:
            first = next(iter(passes))
            ids = (ours[first].output_ids, others[first].output_ids)
            found.append(Pair(domain=ours[first].domain, passes=passes, ids=ids))
    return found


def _pace(answer: StreamedAnswer) -> tuple[float, float]:
    return float(answer.completion_tokens), answer.latency_s


def _compare_cell(mine: CellResult, theirs: CellResult, pairs: Sequence[Pair], baseline: bool) -> CellComparison:
    speed, acceptance = speedup(pairs), mine.acceptance_length
    differing = [pair.ids for pair in pairs if pair.ids[0] != pair.ids[1]]
    costs = mine.step_s / theirs.step_s if mine.step_s and theirs.step_s and acceptance and baseline else None
    domains = sorted({pair.domain for pair in pairs})
    return CellComparison(
        **mine.cell._asdict(), word=word(speed, acceptance), speedup=speed,
        throughput_ratio=mine.tokens_per_s / theirs.tokens_per_s, acceptance_length=acceptance, cost_ratio=costs,
        break_even=break_even(mine, theirs) if costs else None, compared=len(pairs),
        equal=len(pairs) - len(differing) if mine.temperature == 0 else None,
        parted_early=sum(first_difference(*ids) < EARLY for ids in differing) if mine.temperature == 0 else None,
        domains=tuple(
            DomainSpeedup(
                domain=name, speedup=speedup([pair for pair in pairs if pair.domain == name]),
                acceptance_length=mine.domains[name].acceptance_length if name in mine.domains else None,
            )
            for name in domains
        ),
    )  # fmt: skip


def speedup(pairs: Sequence[Pair], seed: int = 0) -> Speedup:
    """Return the ratio of the pooled speeds and its interval."""
    rows = np.array([np.sum(list(pair.passes.values()), axis=0) for pair in pairs])
    ratio = float(ratios(rows.sum(0)))
    low = high = None
    if len(pairs) > 1:
        edges = np.log(np.quantile(resampled(rows, seed), (0.025, 0.975)) / ratio)
        below, above = np.hypot(edges, drift(pairs))
        low, high = float(ratio * np.exp(-below)), float(ratio * np.exp(above))
    return Speedup(ratio=ratio, low=low, high=high, prompts=len(pairs))


def resampled(rows: Any, seed: int = 0) -> Any:
    """Return the ratios of `RESAMPLES` draws, with replacement, of rows [prompts, 4]: a bootstrap."""
    count = len(rows)
    drawn = np.random.default_rng(seed).multinomial(count, np.full(count, 1 / count), RESAMPLES)
    return ratios(drawn @ rows)


def ratios(sums: Any) -> Any:
    """Return speed here over speed there, of [..., 4] tokens and seconds here and there."""
    return (sums[..., 0] / sums[..., 1]) / (sums[..., 2] / sums[..., 3])


def drift(pairs: Sequence[Pair]) -> float:
    """Return half the 95 % interval of the logarithm of the ratio that passes over the same prompts show."""
    passes = sorted({repeat for pair in pairs for repeat in pair.passes})
    if len(passes) < 2:
        return ONE_PASS
    sums = [np.sum([pair.passes[at] for pair in pairs if at in pair.passes], axis=0) for at in passes]
    logs = np.log([ratios(one) for one in sums])
    return float(T95[min(len(passes) - 1, len(T95)) - 1] * logs.std(ddof=1) / len(passes) ** 0.5)


def break_even(mine: CellResult, theirs: CellResult) -> float | None:
    """Return the acceptance length at which an answer would take as long as on the other server; None: none would."""
    if mine.step_s is None or theirs.step_s is None:
        return None
    answers, tokens = mine.overall.answers, mine.overall.completion_tokens
    without = answers * theirs.ttft_mean_s + (tokens - answers) * theirs.step_s
    for_passes = without - answers * mine.ttft_mean_s
    return tokens / (for_passes / mine.step_s) if for_passes > 0 else None


def word(speed: Speedup, acceptance: float | None) -> Word:
    """Return the verdict on one point."""
    if acceptance is not None and acceptance < DEAD_BELOW:
        return "drafter dead"
    if speed.low is None or speed.high is None or speed.low <= 1 <= speed.high:
        return "no difference shown"
    return "faster" if speed.low > 1 else "slower"
