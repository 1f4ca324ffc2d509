"""What a benchmark found: figures of each point of the sweep, and the answers they rest on. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.sweep import BenchPlan, Cell
from eagle3_core.errors import EngineError, NotSpeculatingError
from eagle3_core.evaluate.acceptance import Walk
from eagle3_core.evaluate.bench.endpoint import ServerFacts
from eagle3_core.evaluate.bench.plan import Point
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.measurement import Pool, acceptance_at, by_domain, pool, quantile

MAX_FAILED = 0.1
"""With more requests lost than this share, the others no longer say what the server does."""
Source = Literal["requests", "server"]


@dataclass
class Passes:
    """The raw outcome of all passes at one point of the sweep."""

    answers: list[StreamedAnswer] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    wall_s: list[float] = field(default_factory=list)
    client_busy: list[float] = field(default_factory=list)
    verify_calls: float | None = None


class CellResult(Point):
    """One point of the sweep."""

    requests: int
    failed: int
    failures: tuple[str, ...] = Field(description="The first few reasons.")
    wall_s: tuple[float, ...] = Field(description="Seconds of each pass.")
    tokens_per_s: float = Field(description="Output tokens per second of a whole pass, median over passes.")
    mean_in_flight: float = Field(description="Requests in flight on average; less than asked where a pass runs out.")
    ttft_mean_s: float
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float | None = Field(description="Time per token after the first, each chunk's time over its tokens.")
    itl_p99_s: float | None
    gap_p99_s: float | None = Field(description="Longest wait between two chunks, but for one in a hundred.")
    latency_p50_s: float
    latency_p99_s: float
    step_s: float | None = Field(description="A verify pass with its drafts, or a plain step: time after the first "
                                             "token, over passes or tokens.")  # fmt: skip
    acceptance_length: float | None = Field(description="Completion tokens per verify pass, the bonus included.")
    acceptance_source: Source | None = Field(description="Counters of the requests, or differences of the server's.")
    acceptance_at: tuple[float | None, ...] = Field(description="By draft position; empty: the server does not say.")
    overall: Pool
    domains: dict[str, Pool]
    prompt_tokens: int
    cached_tokens: int
    empty: int = Field(description="Answers without a visible character.")
    loops: int = Field(description="Answers that end in a short piece repeated over and over.")
    client_busy: float = Field(description="Share of one core that the load generator used.")


class BenchRun(Section):
    """One server, measured."""

    server: ServerFacts
    plan: BenchPlan
    prompts: dict[str, str] = Field(description="Id to domain.")
    started_at: str
    seconds: float
    cells: tuple[CellResult, ...]
    answers: tuple[StreamedAnswer, ...]

    def at(self, cell: Cell) -> CellResult | None:
        """Return the figures of one point."""
        return next((found for found in self.cells if found.cell == cell), None)

    def answers_at(self, cell: Cell) -> list[StreamedAnswer]:
        """Return the answers of one point."""
        return [answer for answer in self.answers if answer.cell == cell]

    @property
    def last_pass(self) -> list[StreamedAnswer]:
        """Return what was asked last: each pass empties the cache first, which sets SGLang's own averages back."""
        repeat = self.plan.repeats - 1
        return [answer for answer in self.answers_at(self.plan.order(repeat)[-1]) if answer.repeat == repeat]


def summarise_cell(cell: Cell, passes: Passes, speculating: bool) -> CellResult:
    """Put the figures of one point together.

    Raises:
        EngineError: too many requests failed.
        NotSpeculatingError: the server says it speculates, and no counter says how well.
    """
    answers = passes.answers
    requests = len(answers) + len(passes.failures)
    check_failures(passes, requests, f"concurrency {cell.concurrency}")
    each = not speculating or counted_by_request(answers)
    if not each and passes.verify_calls is None:
        raise NotSpeculatingError(
            f"concurrency {cell.concurrency}: the server says it speculates, but neither its answers (meta_info."
            "spec_verify_ct) nor its metrics (--enable-metrics) count verify passes; an acceptance length is unknown, "
            "not 1"
        )
    histograms = all(answer.accept_histogram is not None for answer in answers)
    overall = pool(answers, speculating and each, histograms=histograms)
    acceptance, verify = overall.acceptance_length, overall.verify_passes
    if speculating and not each:
        tokens = sum(answer.completion_tokens for answer in answers if answer.completion_tokens > 1)
        verify = round(passes.verify_calls or 0)
        acceptance = Walk(tokens, verify).accept_length
    return CellResult(
        **cell._asdict(), requests=requests,
        failed=len(passes.failures), failures=tuple(dict.fromkeys(passes.failures))[:3], wall_s=tuple(passes.wall_s),
        tokens_per_s=_rate(answers, passes.wall_s), overall=overall,
        mean_in_flight=sum(answer.latency_s for answer in answers) / sum(passes.wall_s),
        step_s=_step_s(answers, verify if speculating else None), acceptance_length=acceptance,
        acceptance_source=("requests" if each else "server") if speculating else None,
        acceptance_at=tuple(acceptance_at(overall.accept_histogram)) if histograms else (),
        domains=by_domain(answers, speculating and each, histograms=histograms),
        prompt_tokens=sum(answer.prompt_tokens for answer in answers),
        cached_tokens=sum(answer.cached_tokens for answer in answers),
        empty=sum(answer.empty for answer in answers), loops=sum(answer.loop for answer in answers),
        client_busy=max(passes.client_busy), **_times(answers),
    )  # fmt: skip


def counted_by_request(answers: Sequence[StreamedAnswer]) -> bool:
    """Return whether every answer that needed a verify pass has its count."""
    return all(answer.verify_passes is not None for answer in answers if answer.completion_tokens > 1)


def check_failures(passes: Passes, requests: int, where: str) -> None:
    """Refuse a pass that lost too many requests.

    Raises:
        EngineError: says how many, and the first reason.
    """
    if len(passes.failures) > MAX_FAILED * requests or not passes.answers:
        raise EngineError(
            f"{where}: {len(passes.failures)} of {requests} requests failed, the first: "
            f"{passes.failures[0] if passes.failures else 'none was sent'}; look at the server's log"
        )


def _rate(answers: Sequence[StreamedAnswer], wall_s: Sequence[float]) -> float:
    return statistics.median(
        sum(answer.completion_tokens for answer in answers if answer.repeat == repeat) / seconds
        for repeat, seconds in enumerate(wall_s)
    )


def _step_s(answers: Sequence[StreamedAnswer], verify: int | None) -> float | None:
    after_first = sum(answer.latency_s - answer.ttft_s for answer in answers)
    steps = sum(max(0, answer.completion_tokens - 1) for answer in answers) if verify is None else verify
    return after_first / steps if steps else None


def _times(answers: Sequence[StreamedAnswer]) -> dict[str, float | None]:
    latencies, firsts = [answer.latency_s for answer in answers], [answer.ttft_s for answer in answers]
    gaps = [gap for answer in answers for gap, _ in answer.gaps]
    by_token = [gap / tokens for answer in answers for gap, tokens in answer.gaps for _ in range(tokens)]
    return {
        "ttft_mean_s": statistics.fmean(firsts),
        "ttft_p50_s": quantile(firsts, 0.5), "ttft_p99_s": quantile(firsts, 0.99),
        "itl_p50_s": quantile(by_token, 0.5) if by_token else None,
        "itl_p99_s": quantile(by_token, 0.99) if by_token else None,
        "gap_p99_s": quantile(gaps, 0.99) if gaps else None,
        "latency_p50_s": quantile(latencies, 0.5), "latency_p99_s": quantile(latencies, 0.99),
    }  # fmt: skip
