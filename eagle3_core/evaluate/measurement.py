"""What was measured with one draft shape, and how single answers are pooled into it. Pure."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.errors import NotSpeculatingError
from eagle3_core.evaluate.acceptance import Walk

BASELINE = "baseline"
MAX_COUNTER_DIFFERENCE = 0.5
"""The server's own average covers only whole logging intervals, a part of all passes: a witness, not a measure."""

MAX_PRETENDED_DIFFERENCE = 0.1
"""The first token is no pass's, and the last pass of an answer is cut off: short answers miss a length by a little."""


class ServedAnswer(Section):
    """One request, as the server counted it; speculation counters are None where the server does not speculate."""

    id: str
    domain: str
    repeat: int = Field(ge=0)
    prompt_tokens: int = Field(ge=0)
    output_ids: tuple[int, ...]
    completion_tokens: int = Field(ge=1)
    finish_reason: str
    verify_passes: int | None = None
    accept_histogram: tuple[int, ...] | None = Field(None, description="[j]: verify passes that accepted j drafts.")
    latency_s: float = Field(gt=0)


class Pool(Section):
    """Figures over some answers; lengths are pooled, tokens over verify passes, never a mean of means."""

    answers: int
    completion_tokens: int
    stream_tokens_per_s: float = Field(description="Tokens of an answer per second of its own latency.")
    verify_passes: int | None
    acceptance_length: float | None = Field(description="Completion tokens per verify pass, as SGLang counts.")
    accept_histogram: tuple[int, ...] | None


class Measurement(Section):
    """One draft shape, or none, on the held-out prompts."""

    shape: str
    device: str
    engine: dict[str, Any] = Field(description="SGLang's effective arguments that bear on the figures.")
    prompts: int
    repeats: int
    concurrency: int
    max_new_tokens: int
    temperature: float
    startup_s: float
    wall_s: tuple[float, ...] = Field(description="Seconds of each pass over the prompts.")
    tokens_per_s: float = Field(description="Output tokens per second of a whole pass, median over passes.")
    latency_p50_s: float
    latency_p99_s: float
    server_acceptance_length: float | None = Field(
        description="SGLang's own running average over the last pass, where it has one."
    )
    overall: Pool
    domains: dict[str, Pool]

    @property
    def acceptance_at(self) -> list[float | None]:
        """Return P(draft k+1 right | drafts before it right) for each position k; None where none got that far."""
        return acceptance_at(self.overall.accept_histogram)


def acceptance_at(histogram: Sequence[int] | None) -> list[float | None]:
    """Return P(draft k+1 right | drafts before it right) for each position k of a histogram of accepted drafts."""
    counts = histogram or ()
    reached = [sum(counts[k:]) for k in range(len(counts))]
    return [after / before if before else None for before, after in itertools.pairwise(reached)]


def pool(answers: Sequence[ServedAnswer], speculating: bool, *, histograms: bool = True) -> Pool:
    """Pool answers; `histograms` says that verify passes must come with what each accepted.

    Raises:
        NotSpeculatingError: the server should speculate, and an answer has no counters, or they contradict each other.
    """
    tokens = sum(answer.completion_tokens for answer in answers)
    speed = tokens / sum(answer.latency_s for answer in answers)
    if not speculating:
        return Pool(answers=len(answers), completion_tokens=tokens, stream_tokens_per_s=speed,
                    verify_passes=None, acceptance_length=None, accept_histogram=None)  # fmt: skip
    walks = [Walk(answer.completion_tokens, _verify_passes(answer, histograms)) for answer in answers]
    total = Walk.pool(walks)
    return Pool(
        answers=len(answers), completion_tokens=tokens, stream_tokens_per_s=speed,
        verify_passes=int(total.verify_passes), acceptance_length=total.accept_length,
        accept_histogram=_added(answer.accept_histogram or () for answer in answers),
    )  # fmt: skip


def by_domain(answers: Sequence[ServedAnswer], speculating: bool, *, histograms: bool = True) -> dict[str, Pool]:
    """Return the pool of each domain; one whose answers all have a single token has no acceptance and is left out."""
    domains: dict[str, list[ServedAnswer]] = {}
    for answer in answers:
        domains.setdefault(answer.domain, []).append(answer)
    return {
        name: pool(found, speculating, histograms=histograms)
        for name, found in sorted(domains.items())
        if not speculating or any(answer.verify_passes for answer in found)
    }


def check_counters(measured: Pool, server: float | None, where: str) -> None:
    """Compare the tokens emitted per verify pass, which the server also averages by itself.

    Raises:
        NotSpeculatingError: they are too far apart to be counts of the same thing.
    """
    histogram = measured.accept_histogram
    if server is None or not histogram:
        return
    emitted = 1 + sum(accepted * count for accepted, count in enumerate(histogram)) / sum(histogram)
    if abs(server - emitted) > MAX_COUNTER_DIFFERENCE * emitted:
        raise NotSpeculatingError(
            f"{where}: the answers' counters say {emitted:.2f} tokens per verify pass, the server's own average says "
            f"{server:.2f}; is another client using the server?"
        )


def check_pretended(measured: Pool, length: float, where: str) -> None:
    """Compare the acceptance length with the one the server was told to pretend.

    Raises:
        NotSpeculatingError: this SGLang does not heed the switch.
    """
    found = measured.acceptance_length
    if found is None or abs(found - length) > MAX_PRETENDED_DIFFERENCE * length:
        raise NotSpeculatingError(
            f"{where}: expected SGLang to pretend acceptance length {length:g} (SGLANG_SIMULATE_ACC_LEN), found "
            f"{found}; leave evaluation.simulated_lengths empty with this version"
        )


def quantile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that at least `share` of all values do not exceed."""
    ranked = sorted(values)
    return ranked[min(len(ranked) - 1, max(0, -(-int(share * 1000) * len(ranked) // 1000) - 1))]


def first_difference(mine: Sequence[int], other: Sequence[int]) -> int:
    """Return the first position at which two different answers part; where one has ended, its length."""
    parted = (at for at, (a, b) in enumerate(zip(mine, other, strict=False)) if a != b)
    return next(parted, min(len(mine), len(other)))


def summarise(
    answers: Sequence[ServedAnswer], wall_s: Sequence[float], run: Mapping[str, Any], speculating: bool
) -> Measurement:
    """Put a measurement together; `run` holds the fields of `Measurement` that describe the circumstances."""
    rates = [
        sum(answer.completion_tokens for answer in answers if answer.repeat == repeat) / seconds
        for repeat, seconds in enumerate(wall_s)
    ]
    latencies = [answer.latency_s for answer in answers]
    return Measurement(
        **run,
        wall_s=tuple(wall_s),
        tokens_per_s=statistics.median(rates),
        latency_p50_s=quantile(latencies, 0.5),
        latency_p99_s=quantile(latencies, 0.99),
        overall=pool(answers, speculating),
        domains=by_domain(answers, speculating),
    )


def _verify_passes(answer: ServedAnswer, histogram: bool) -> int:
    if answer.verify_passes is None or (histogram and answer.accept_histogram is None):
        raise NotSpeculatingError(
            f"prompt {answer.id}: the server sent no speculation counters; is the drafter loaded, "
            "and the algorithm EAGLE3?"
        )
    if answer.completion_tokens > 1 and answer.verify_passes == 0:
        raise NotSpeculatingError(f"prompt {answer.id}: {answer.completion_tokens} tokens and no verify pass counted")
    if answer.accept_histogram is not None and sum(answer.accept_histogram) != answer.verify_passes:
        raise NotSpeculatingError(
            f"prompt {answer.id}: expected {answer.verify_passes} verify passes in the histogram, found "
            f"{sum(answer.accept_histogram)}"
        )
    return answer.verify_passes


def _added(histograms: Any) -> tuple[int, ...]:
    total: list[int] = []
    for histogram in histograms:
        total += [0] * (len(histogram) - len(total))
        for accepted, count in enumerate(histogram):
            total[accepted] += count
    return tuple(total)
