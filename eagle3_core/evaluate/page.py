"""The report as one HTML page that needs nothing else: style, plots and figures are all inside."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any

import jinja2

from eagle3_core.evaluate import plots
from eagle3_core.evaluate.against import Against, Ratio
from eagle3_core.evaluate.comparison import ShapeRow
from eagle3_core.evaluate.report import Report
from eagle3_core.evaluate.sweep import SweepPoint, deciding

TEMPLATE = "report.html"


def render(report: Report, metrics: Sequence[Mapping[str, Any]]) -> str:
    """Return the page; `metrics` are the lines of the training's metrics.jsonl."""
    return template(TEMPLATE).render(
        report=report,
        champion_plot=_against(report.challenge.against) if report.challenge.against else "",
        sweeps=[("none", report.baseline_sweep), *((row.shape, row.sweep) for row in report.rows)],
        sampled=any(point.temperature > 0 for point in report.baseline_sweep),
        plots=[
            ("Speed and acceptance by draft shape", _by_shape(report)),
            *([("By requests in flight", _by_concurrency(report))] if len(deciding(report.primary.sweep)) > 1 else []),
            *([("By answer length and temperature", _by_answer(report))] if len(_alone(report.primary)) > 1 else []),
            *([("Which acceptance length would pay", _by_length(report))] if report.pretended else []),
            ("Acceptance by position", _by_position(report)),
            (f"By domain, at {report.primary.shape}", _by_domain(report)),
            ("Training", _training(report, metrics)),
        ],
    )


def template(name: str) -> jinja2.Template:
    """Return a page's template; what it includes lies beside it."""
    loader = jinja2.FunctionLoader(
        lambda file: resources.files("eagle3_core.evaluate").joinpath(file).read_text(encoding="utf-8")
    )
    environment = jinja2.Environment(loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    environment.filters |= {"figure": figure, "milliseconds": milliseconds}
    return environment.get_template(name)


def figure(value: float | None, digits: int = 2) -> str:
    """Return a number for people; what is unknown is a dash, never a 0."""
    return "\N{EN DASH}" if value is None else f"{value:,.{digits}f}"


def milliseconds(seconds: float | None) -> str:
    """Return a time for people."""
    return figure(None if seconds is None else 1000 * seconds, 1)


def _by_shape(report: Report) -> str:
    return plots.bars(
        {
            "acceptance length": {
                "served by SGLang": {row.shape: row.acceptance_length for row in report.rows},
                "trainer's estimate": {row.shape: row.trainer_tau for row in report.rows},
                "break-even": {row.shape: row.sweep[0].break_even for row in report.rows},
            },
            "output tokens per second": {
                "": {"none": report.baseline.tokens_per_s, **{row.shape: row.tokens_per_s for row in report.rows}}
            },
        },
        "shapes",
        "Acceptance length and output tokens per second of each draft shape",
    )


def _against(against: Against) -> str:
    """Draw the challenger's figures over the champion's: all prompts, then each domain, with their intervals."""
    rows: list[tuple[str, Ratio | None, float]] = [
        ("speed", against.speed, against.speed.ratio),
        ("acceptance length", against.acceptance, against.acceptance.ratio),
        *((f"{one.domain} ({one.prompts})", one.ratio, one.share) for one in against.domains),
    ]
    points = {
        label: (at, None if span is None or span.low is None or span.high is None else (span.low, span.high))
        for label, span, at in rows
    }
    return plots.intervals(
        points, "times the champion's", "champion", "Challenger against champion, with 95 % intervals"
    )


def _by_concurrency(report: Report) -> str:
    primary = deciding(report.primary.sweep)
    compared = [(point.concurrency, point.speedup) for point in primary if point.speedup is not None]
    speeds = {"none": report.baseline_sweep, **{row.shape: row.sweep for row in report.rows}}
    interval: dict[str, list[tuple[float, float | None]]] = {
        report.primary.shape: [(at, speed.ratio) for at, speed in compared],
        "95 %, from": [(at, speed.low) for at, speed in compared],
        "to": [(at, speed.high) for at, speed in compared],
        "as fast": [(at, 1.0) for at, _ in compared],
    }
    lengths: dict[str, list[tuple[float, float | None]]] = {
        "served": [(point.concurrency, point.acceptance_length) for point in primary],
        "break-even": [(point.concurrency, point.break_even) for point in primary],
    }
    return plots.curves(
        {
            "output tokens per second": {
                shape: _known((point.concurrency, point.tokens_per_s) for point in deciding(points))
                for shape, points in speeds.items()
            },
            "times the speed of no speculation": {label: _known(points) for label, points in interval.items()},
            "acceptance length": {label: _known(points) for label, points in lengths.items()},
        },
        "requests in flight",
        "concurrency",
        "Speed, and acceptance length against break-even, by requests in flight",
    )


def _alone(row: ShapeRow) -> list[SweepPoint]:
    """Return the points of all lengths and temperatures at the first concurrency."""
    return [point for point in row.sweep if point.concurrency == row.sweep[0].concurrency]


def _by_answer(report: Report) -> str:
    def named(row: ShapeRow, value: Callable[[SweepPoint], float | None]) -> dict[str, float | None]:
        return {f"{point.max_new_tokens}, T {point.temperature:g}": value(point) for point in _alone(row)}

    primary = report.primary
    return plots.bars(
        {
            f"acceptance length, {primary.shape}": {
                "served by SGLang": named(primary, lambda point: point.acceptance_length),
                "trainer's estimate": named(primary, lambda point: point.trainer_tau),
                "break-even": named(primary, lambda point: point.break_even),
            },
            "times the speed of no speculation": {
                row.shape: named(row, lambda point: point.speedup.ratio if point.speedup else None)
                for row in report.rows
            },
        },
        "answers",
        f"Acceptance length and speed by answer length and temperature, {primary.sweep[0].concurrency} in flight",
    )


def _by_length(report: Report) -> str:
    """Draw the speed over acceptance lengths that the server pretended, and what the drafter really reaches."""
    lines: dict[str, plots.Line] = {}
    points = deciding(report.primary.sweep)
    for at, point in enumerate(points):
        curve = [(one.points[at].acceptance_length, one.points[at].speedup) for one in report.pretended]
        known = sorted((length, speed.ratio) for length, speed in curve if length is not None and speed is not None)
        lines[f"{point.concurrency} in flight"] = _known(known)
    reached = [(p.acceptance_length, p.speedup.ratio) for p in points
               if p.acceptance_length is not None and p.speedup is not None]  # fmt: skip
    lengths = [length for x, _ in lines.values() for length in x]
    lines["as fast"] = [min(lengths), max(lengths)], [1.0, 1.0]
    lines["this drafter"] = _known(reached)
    panel = {"times the speed of no speculation": lines}
    return plots.curves(panel, "acceptance length", "lengths", "Speed at acceptance lengths that the server pretended")


def _by_position(report: Report) -> str:
    lines = {row.shape: _points(row.acceptance_at) for row in report.rows}
    lines["trainer, full depth"] = _points(row["cond_acc"] for row in report.validation["by_depth"])
    panel = {"P(right | all before right)": lines}
    return plots.curves(panel, "draft position", "positions", "Acceptance at each draft position", share=True)


def _points(values: Iterable[float | None]) -> plots.Line:
    return _known(enumerate(values, start=1))


def _known(points: Iterable[tuple[float, float | None]]) -> plots.Line:
    known = [(x, y) for x, y in points if y is not None]
    return [x for x, _ in known], [y for _, y in known]


def _by_domain(report: Report) -> str:
    rows = report.primary.domains
    return plots.bars(
        {
            "acceptance length": {"": {row.domain: row.acceptance_length for row in rows}},
            "times the speed of no speculation": {"": {row.domain: row.speedup for row in rows}},
        },
        "domains",
        "Acceptance length and speed of each domain of prompts",
    )


def _training(report: Report, metrics: Sequence[Mapping[str, Any]]) -> str:
    steps = [line for line in metrics if line.get("loss") is not None]  # null: a step that was skipped
    held_out = [line for line in metrics if "held_out" in line]
    at = next(index for index, row in enumerate(report.validation["by_depth"])
              if row["k"] == int(report.primary.shape.split("/")[0]))  # fmt: skip
    return plots.curves(
        {
            "training loss": {"loss": ([line["step"] for line in steps], [line["loss"] for line in steps])},
            f"held-out tau, {report.primary.shape}": {
                "tau_chain": (
                    [line["step"] for line in held_out],
                    [line["held_out"][at]["tau_chain"] for line in held_out],
                )
            },
        },
        "optimiser step",
        "training",
        "Training loss and held-out acceptance length by step",
    )
