"""The figures of a sweep over concurrencies, lengths and temperatures as the report shows them. Pure."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.sweep import Cell
from eagle3_core.evaluate.bench.plan import Point
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.bench.versus import Speedup, compare
from eagle3_core.evaluate.gate import Word


class SweepPoint(Point):
    """One draft shape, or none, at one point of the grid."""

    answers: int
    acceptance_length: float | None
    trainer_tau: float | None = Field(
        None, description="The trainer's estimate of it: greedy and at temperature 1, for chains at the first length."
    )
    tokens_per_s: float = Field(description="Output tokens per second of a whole pass, median over passes.")
    ttft_p50_s: float
    ttft_p99_s: float
    itl_p50_s: float | None = Field(description="Time per token after the first.")
    itl_p99_s: float | None
    loops: int = Field(description="Answers that end in a short piece repeated over and over.")
    empty: int
    speedup: Speedup | None = Field(None, description="Speed of single answers against none, with its 95 % interval.")
    word: Word | None = None
    break_even: float | None = Field(None, description="Acceptance length at which that speed would be 1.")


Estimate = Callable[[Cell], float | None]


def sweep_points(
    run: BenchRun, baseline: BenchRun | None = None, estimate: Estimate = lambda _cell: None
) -> tuple[SweepPoint, ...]:
    """Return every point of a sweep, compared with no speculation at the same point where that is given.

    Raises:
        InputError: the two have no point or no prompt in common.
    """
    rows = {} if baseline is None else {row.cell: row for row in compare(run, baseline).cells}
    shared = set(SweepPoint.model_fields) - {"answers", "trainer_tau", "speedup", "word", "break_even"}
    points = []
    for cell in run.cells:
        row = rows.get(cell.cell)
        compared = {} if row is None else {"speedup": row.speedup, "word": row.word, "break_even": row.break_even}
        figures = {name: getattr(cell, name) for name in shared}
        points.append(SweepPoint(**figures, answers=cell.overall.answers, trainer_tau=estimate(cell.cell), **compared))
    return tuple(points)


def deciding(points: Sequence[SweepPoint]) -> list[SweepPoint]:
    """Return the points of all concurrencies at the length and temperature of the first, which decides."""
    return [point for point in points if point.cell[1:] == points[0].cell[1:]]


class Pretended(Section):
    """The primary shape on a server that pretends an acceptance length."""

    length: float
    points: tuple[SweepPoint, ...]


def crossings(pretended: Sequence[Pretended]) -> dict[int, float | None]:
    """Return, by requests in flight, the acceptance length at which the measured speed crosses 1; None: it does not.

    Between two measured lengths the speed is taken to grow evenly.
    """
    curves: dict[int, list[tuple[float, float]]] = {}
    for one in pretended:
        for point in one.points:
            if point.acceptance_length is not None and point.speedup is not None:
                curves.setdefault(point.concurrency, []).append((point.acceptance_length, point.speedup.ratio))
    found: dict[int, float | None] = {}
    for concurrency, curve in curves.items():
        found[concurrency] = None
        for (left, low), (right, high) in itertools.pairwise(sorted(curve)):
            if low <= 1 <= high and low < high:
                found[concurrency] = left + (right - left) * (1 - low) / (high - low)
                break
    return found


def paces(points: Sequence[SweepPoint]) -> str:
    """Return one clause for each concurrency where it decides: a drafter may be faster alone and slower in company."""
    return "; ".join(f"at {point.concurrency} in flight {_pace(point)}" for point in deciding(points))


def _pace(point: SweepPoint) -> str:
    speed = point.speedup
    if speed is None:
        return "not compared"
    interval = "" if speed.low is None or speed.high is None else f" ({speed.low:.2f} to {speed.high:.2f})"
    even = "" if point.break_even is None else f", break-even at acceptance length {point.break_even:.2f}"
    return f"{point.word}, {speed.ratio:.2f} times{interval}{even}"
