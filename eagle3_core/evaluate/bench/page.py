"""A benchmark as one HTML page that needs nothing else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle3_core.evaluate import plots
from eagle3_core.evaluate.bench.plan import Point, told_apart
from eagle3_core.evaluate.bench.results import BenchRun, CellResult
from eagle3_core.evaluate.bench.verdict import BenchVerdict
from eagle3_core.evaluate.bench.versus import CellComparison, Comparison
from eagle3_core.evaluate.page import template

TEMPLATE = "bench.html"
P = TypeVar("P", bound=Point)


def render(run: BenchRun, other: BenchRun | None, comparison: Comparison | None, verdict: BenchVerdict) -> str:
    """Return the page."""
    servers = [("Measured", run)]
    if other is not None:
        servers.append((f"The other: {other.server.title} at {other.server.url}", other))
    return template(TEMPLATE).render(
        run=run, comparison=comparison, verdict=verdict, servers=servers, tone=_tone(verdict, comparison),
        plots=[plot for plot in _plots(run, other, comparison) if plot[1]],
    )  # fmt: skip


def _tone(verdict: BenchVerdict, comparison: Comparison | None) -> str:
    """Return the verdict's look: good where every point is faster, bad where one is slower or the drafter dead."""
    words = {row.word for row in comparison.cells} if comparison is not None else set()
    if verdict.dead or "slower" in words:
        return ""
    return "passed" if words == {"faster"} else "neutral"


def _plots(run: BenchRun, other: BenchRun | None, comparison: Comparison | None) -> list[tuple[str, str]]:
    found = [("Speed and latency by requests in flight", _sweep(run, other))]
    if comparison is not None:
        found.append(("Speed against " + comparison.against, _speed(comparison)))
    if run.server.speculating:
        found.append(("Acceptance by position", _positions(run)))
        found.append((f"Domains, {run.cells[0].concurrency} in flight", _domains(run, comparison)))
    return found


def _sweep(run: BenchRun, other: BenchRun | None) -> str:
    figures: dict[str, Callable[[CellResult], float | None]] = {
        "output tokens per second": lambda cell: cell.tokens_per_s,
        "TTFT p50, ms": lambda cell: 1000 * cell.ttft_p50_s,
        "per token p50, ms": lambda cell: None if cell.itl_p50_s is None else 1000 * cell.itl_p50_s,
    }
    titles = [(run, run.server.title)] + ([(other, other.server.title)] if other is not None else [])
    if other is not None and titles[0][1] == titles[1][1]:
        titles[1] = (other, f"{other.server.title}, the other")
    lines = {
        label: {
            f"{title}{apart}": _line([(cell.concurrency, value(cell)) for cell in cells])
            for found, title in titles
            for apart, cells in _by_line(found.cells)
        }
        for label, value in figures.items()
    }  # fmt: skip
    return plots.curves(lines, "requests in flight", "sweep", "Speed and latency by requests in flight")


def _by_line(points: Sequence[P]) -> list[tuple[str, list[P]]]:
    """Return the points of each length and temperature, with what tells them apart."""
    cells = [point.cell for point in points]
    found: dict[str, list[P]] = {}
    for point in points:
        found.setdefault(told_apart(point.cell, cells), []).append(point)
    return list(found.items())


def _line(points: Sequence[tuple[float, float | None]]) -> plots.Line:
    known = [(x, y) for x, y in sorted(points) if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _speed(comparison: Comparison) -> str:
    rows = comparison.cells
    panels = {
        "times its speed": _lines(rows, {
            "speed": lambda row: row.speedup.ratio, "95 %, from": lambda row: row.speedup.low,
            "to": lambda row: row.speedup.high, "as fast": lambda _row: 1.0,
        }),
    }  # fmt: skip
    if any(row.break_even is not None for row in rows):
        panels["acceptance length"] = _lines(
            rows, {"served": lambda row: row.acceptance_length, "break-even": lambda row: row.break_even}
        )
    return plots.curves(panels, "requests in flight", "speed", "Speed and break-even by requests in flight")


def _lines(
    rows: Sequence[CellComparison], values: dict[str, Callable[[CellComparison], float | None]]
) -> dict[str, plots.Line]:
    return {
        f"{label}{apart}": _line([(row.concurrency, value(row)) for row in found])
        for apart, found in _by_line(rows)
        for label, value in values.items()
    }


def _positions(run: BenchRun) -> str:
    lines = {
        f"{cell.concurrency} in flight{apart}": _line(list(enumerate(cell.acceptance_at, start=1)))
        for apart, cells in _by_line(run.cells)
        for cell in cells
        if cell.acceptance_at
    }
    if not lines:
        return ""
    panel = {"P(right | all before right)": lines}
    return plots.curves(panel, "draft position", "positions", "Acceptance at each draft position", share=True)


def _domains(run: BenchRun, comparison: Comparison | None) -> str:
    cell = run.cells[0]
    panels: dict[str, dict[str, dict[str, float | None]]] = {
        "acceptance length": {"": {name: pool.acceptance_length for name, pool in cell.domains.items()}}
    }
    rows = () if comparison is None else comparison.cells
    for row in rows:
        if row.cell == cell.cell and comparison is not None:
            panels[f"times the speed of {comparison.against}"[:40]] = {
                "": {domain.domain: domain.speedup.ratio for domain in row.domains}
            }
    if not cell.domains:
        return ""
    return plots.bars(panels, "domains", "Acceptance length and speed of each domain of prompts")
