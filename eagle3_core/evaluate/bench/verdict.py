"""Say in words what a benchmark shows at each point, and what may be wrong with it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from eagle3_core.config.base import Section
from eagle3_core.engine.platform import VERIFIES_GREEDILY
from eagle3_core.evaluate.bench.plan import Point, told_apart
from eagle3_core.evaluate.bench.results import BenchRun, CellResult
from eagle3_core.evaluate.bench.versus import EARLY, CellComparison, Comparison
from eagle3_core.evaluate.gate import DEAD_BELOW

MISMATCH = 0.1
BUSY = 0.8
IDLE = 0.8
CACHED = 0.5
FEW_PROMPTS = 8
DEAD = ("the drafter contributes nothing (acceptance length {:.2f}); check its parameter names, d2t, the aux layers, "
        "that it was trained for this target, and that the algorithm is EAGLE3")  # fmt: skip

P = TypeVar("P", bound=Point)


class BenchVerdict(Section):
    """What to think of it."""

    dead: bool
    summary: str
    notes: tuple[str, ...]


def verdict(
    run: BenchRun, comparison: Comparison | None, other: BenchRun | None, expected: float | None
) -> BenchVerdict:
    """Judge one benchmark; `expected` is the acceptance length that the training promised."""
    known = _acceptance(run, min(run.plan.temperatures))
    dead = bool(known) and min(known) < DEAD_BELOW
    if dead:
        head = "Drafter dead: " + DEAD.format(min(known))
    elif not run.server.speculating:
        head = "Baseline: this server does not speculate"
    else:
        head = f"Acceptance length {_spans(run)} tokens per verify pass, the bonus token included"
    if comparison is not None:
        pace = _paces(comparison)
    else:
        pace = "its speed is known, a speedup is not (--baseline, --against)" if run.server.speculating else ""
    notes = [*_expectation(known, expected), *_sampled_greedily(run), *_versus(comparison, run, other),
             *_circumstances(run)]  # fmt: skip
    return BenchVerdict(dead=dead, summary=". ".join(filter(None, (head, pace[:1].upper() + pace[1:]))) + ".",
                        notes=tuple(notes))  # fmt: skip


def _acceptance(run: BenchRun, temperature: float) -> list[float]:
    """Return the known acceptance lengths at one temperature; the lowest is what a drafter is judged by."""
    return [cell.acceptance_length for cell in run.cells
            if cell.acceptance_length is not None and cell.temperature == temperature]  # fmt: skip


def _spans(run: BenchRun) -> str:
    spans = {temperature: _span(_acceptance(run, temperature)) for temperature in sorted(run.plan.temperatures)}
    if len(spans) == 1:
        return next(iter(spans.values()))
    return ", ".join(f"{span} at temperature {temperature:g}" for temperature, span in spans.items())


def _sampled_greedily(run: BenchRun) -> list[str]:
    """Say of answers that were to be sampled that they were not."""
    device = str(run.server.arguments.get("device"))
    sampled = [temperature for temperature in run.plan.temperatures if temperature > 0]
    if not sampled or not run.server.speculating or device not in VERIFIES_GREEDILY:
        return []
    asked = " and ".join(f"{temperature:g}" for temperature in sampled)
    return [f"not sampled: temperature {asked} was asked for, but on {device} SGLang's verify pass takes the target's "
            "likeliest token at any temperature; these acceptance lengths are greedy ones"]  # fmt: skip


def _span(values: Sequence[float]) -> str:
    low, high = f"{min(values):.2f}", f"{max(values):.2f}"
    return low if low == high else f"{low} to {high}"


def _paces(comparison: Comparison) -> str:
    parts = [f"{where} {_pace(row)}" for where, row in _named(comparison.cells)]
    return f"against {comparison.against}: " + "; ".join(parts)


def _named(points: Sequence[P]) -> list[tuple[str, P]]:
    """Return each point with its name, which has in it what differs."""
    cells = [point.cell for point in points]
    return [(f"at {point.concurrency}{told_apart(point.cell, cells)}", point) for point in points]


def _pace(row: CellComparison) -> str:
    speed = row.speedup
    interval = "" if speed.low is None or speed.high is None else f" ({speed.low:.2f} to {speed.high:.2f})"
    text = f"{row.word}, {speed.ratio:.2f} times{interval}"
    if row.acceptance_length is not None and row.break_even is not None and row.word != "drafter dead":
        text += f", break-even at acceptance length {row.break_even:.2f}"
    return text


def _expectation(known: Sequence[float], expected: float | None) -> list[str]:
    if expected is None or not known:
        return []
    served = sum(known) / len(known)
    if abs(served - expected) <= MISMATCH * expected:
        return []
    return [f"train/serve mismatch: {expected:.2f} was expected, {served:.2f} is served; check prompts, chat template, "
            "depth and the export"]  # fmt: skip


def _versus(comparison: Comparison | None, run: BenchRun, other: BenchRun | None) -> list[str]:
    if comparison is None or other is None:
        return []
    notes = []
    for name in ("model_path", "dtype", "version", "quantization", "device", "tp_size", "attention_backend"):
        mine, theirs = run.server.arguments.get(name), other.server.arguments.get(name)
        if mine != theirs:
            notes.append(f"not the same {name}: {mine}, the other server {theirs}")
    if run.plan.ignore_eos != other.plan.ignore_eos:
        notes.append("one of the two ignored the end of an answer (--ignore-eos), the other did not")
    missing = len(run.cells) - len(comparison.cells)
    if missing:
        notes.append(f"{missing} of {len(run.cells)} points have no counterpart in the other benchmark")
    if min(run.plan.repeats, other.plan.repeats) == 1:
        notes.append("a single pass: how much the machine drifts is assumed, not measured; --repeats 3 measures it")
    for where, row in _named(comparison.cells):
        if row.equal is not None and row.equal < row.compared:
            early = f", {row.parted_early} of them within {EARLY} tokens" if row.parted_early else ""
            notes.append(f"{where}: {row.compared - row.equal} of {row.compared} greedy answers differ{early}")
        if row.speedup.prompts < FEW_PROMPTS:
            notes.append(f"{where}: only {row.speedup.prompts} prompts, the interval is a guess")
    return notes


def _circumstances(run: BenchRun) -> list[str]:
    return [f"{where}: {text}" for where, cell in _named(run.cells) for text in _flags(cell)]


def _flags(cell: CellResult) -> list[str]:
    flags = [
        (cell.failed, f"{cell.failed} of {cell.requests} requests failed ({'; '.join(cell.failures)})"),
        (cell.empty, f"{cell.empty} of {cell.overall.answers} answers are empty"),
        (cell.loops, f"{cell.loops} of {cell.overall.answers} answers end in a loop, which flatters acceptance"),
        (cell.client_busy > BUSY, f"the load generator used {cell.client_busy:.0%} of a core and may be the limit"),
        (cell.mean_in_flight < IDLE * cell.concurrency,
         f"only {cell.mean_in_flight:.1f} requests in flight on average; give more prompts"),
        (cell.cached_tokens > CACHED * cell.prompt_tokens,
         f"{cell.cached_tokens:,} prompt tokens came from the prefix cache"),
    ]  # fmt: skip
    return [text for raised, text in flags if raised]
