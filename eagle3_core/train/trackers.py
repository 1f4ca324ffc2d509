"""Where training reports: metrics.jsonl, trackers, progress, and a table at every validation.

metrics.jsonl holds no times, so that a run interrupted and resumed writes the very file of one that was not. Figures
that are not finite are null there.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle3_core.progress import Progress, finite
from eagle3_core.train.checkpoint import TrainState
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.flops import matmul_flops_per_s, useful_flops
from eagle3_core.train.job import TrainJob
from eagle3_core.train.sender import Sender
from eagle3_core.train.validate import Validation

LOG_EVERY_STEPS = 10
METRICS_FILE = "metrics.jsonl"
SMOOTHING = 0.9

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did; `valid` and `correct` are counts [K] over all ranks.

    `waited` are those of the `seconds` in which this rank had no batch; `stop` and `save` are what some rank asked for.
    """

    loss: float
    grad_norm: float
    learning_rate: float
    valid: torch.Tensor
    correct: torch.Tensor
    seconds: float
    waited: float
    stop: bool
    save: bool

    def tau(self, depth: int) -> float:
        """Return 1 + the sum of joint accuracies on the training samples of the step, to `depth` or as it is trained.

        The drafter changes while an epoch lasts: the table of a validation says what it would reach now.
        """
        return 1.0 + float((self.correct / self.valid.clamp(min=1))[:depth].sum())


@dataclass
class Pace:
    """How fast training goes, smoothed; the first step, which compiles, does not count."""

    tokens_per_s: float | None = None
    flops_per_s: float | None = None
    waiting: float | None = None
    _steps: int = 0

    def update(self, tokens: int, flops: float, report: StepReport) -> None:
        """Take a step into account."""
        self._steps += 1
        if self._steps == 1:
            return
        seconds = max(report.seconds, 1e-9)
        self.tokens_per_s = _smoothed(self.tokens_per_s, tokens / seconds)
        self.flops_per_s = _smoothed(self.flops_per_s, flops / seconds)
        self.waiting = _smoothed(self.waiting, report.waited / seconds)


def _smoothed(before: float | None, now: float) -> float:
    return now if before is None else SMOOTHING * before + (1 - SMOOTHING) * now


@dataclass
class Trackers:
    """Reports of the leading rank; on other ranks it only keeps `state.best` in step.

    `progress` None: report nothing. `live` is metrics.jsonl while training runs.
    """

    progress: Progress | None = None
    senders: Sequence[Sender] = ()
    live: Path | None = None
    _job: TrainJob = field(init=False)
    _pace: Pace = field(default_factory=Pace)
    _matmul: float | None = None
    _tokens: int = 0
    _row: tuple[int, dict[str, float]] | None = None

    def start(self, job: TrainJob, ranks: Ranks, state: TrainState) -> None:
        """Begin or continue; on a GPU the rate of a plain product is measured first."""
        self._job, self._tokens = job, state.tokens
        if self.progress is None:
            return
        order = job.order
        epoch = order.position(state.step)[0] if state.step < order.total_steps else 0
        accounts = order.accounts(epoch, job.supervised)
        LOG.info(
            "%s samples an epoch, %s tokens in, %s trained, %s masked, %s dropped, rows %.1f %% full; step %d of %d",
            accounts.samples, accounts.tokens_in, accounts.trained, accounts.masked, accounts.dropped,
            100 * accounts.fill, state.step, order.total_steps,
        )  # fmt: skip
        if ranks.device.type == "cuda":
            self._matmul = matmul_flops_per_s(ranks.device) * ranks.world
        if self.live is not None:
            self.live.write_text(metrics_text(state.metrics), encoding="utf-8")
        for sender in self.senders:
            sender.begin(state.step, tracked_rows(state.metrics))

    def stepped(self, state: TrainState, report: StepReport) -> None:
        """Report a step; figures are read back only now and then."""
        if self.progress is None:
            return
        self._send()
        job, pace = self._job, self._pace
        flops = sum(useful_flops(job, row) for row in job.order.rows(state.step - 1))
        pace.update(state.tokens - self._tokens, flops, report)
        self._tokens = state.tokens
        tau = report.tau(job.evaluation.primary_shape.num_steps)
        speeds = {"tokens_per_s": pace.tokens_per_s, "mfu": self._mfu, "waiting": pace.waiting}
        if state.step % LOG_EVERY_STEPS == 0 or state.step in (1, job.order.total_steps):
            line = {"step": state.step, "loss": report.loss, "tau": tau, "grad_norm": report.grad_norm,
                    "learning_rate": report.learning_rate, "tokens": state.tokens}  # fmt: skip
            self._note(state, finite(line))
            named = {f"train/{name}": value for name, value in {**line, **speeds}.items() if name != "step"}
            self._merge(state.step, named)
        best = state.best.score if state.best else None
        behind = ", ".join(sender.name for sender in self.senders if sender.behind)
        shown: dict[str, Any] = {"loss": report.loss, "tau": tau, "held_out_tau": best, **speeds,
                                 "skipped": state.bad_steps or None, "not_reached": behind or None}  # fmt: skip
        self.progress.update(state.step, job.order.total_steps, "steps", **shown)

    def validated(self, state: TrainState, validation: Validation) -> bool:
        """Report a validation and tell whether it is the best so far."""
        improved = state.consider(validation)
        if self.progress is not None:
            line = finite({"step": state.step, "held_out": validation.table()})
            self._note(state, line)
            self._merge(state.step, tracked_rows([line])[state.step])
            LOG.info("%s", render(line["held_out"], state.step, improved))
        return improved

    def close(self, *, finished: bool) -> None:
        """Send what is left; a tracker that does not take it is named and does not hold training up."""
        self._send()
        for sender in self.senders:
            sender.close(finished=finished)

    @property
    def _mfu(self) -> float | None:
        """Return the useful share of what plain products would do."""
        return self._pace.flops_per_s / self._matmul if self._matmul and self._pace.flops_per_s else None

    def _note(self, state: TrainState, line: dict[str, Any]) -> None:
        state.metrics.append(line)
        if self.live is not None:
            with self.live.open("a", encoding="utf-8") as file:
                file.write(metrics_text([line]))

    def _merge(self, step: int, values: dict[str, Any]) -> None:
        """Add figures to the step's row, which goes out when the next step comes: a step is sent whole."""
        if self._row is not None and self._row[0] != step:
            self._send()
        before = self._row[1] if self._row is not None else {}
        self._row = step, {**before, **{name: value for name, value in finite(values).items() if value is not None}}

    def _send(self) -> None:
        row, self._row = self._row, None
        if row is not None:
            for sender in self.senders:
                sender.send(*row)


def tracked_rows(metrics: Sequence[dict[str, Any]]) -> dict[int, dict[str, float]]:
    """Return the figures of each step in metrics.jsonl's lines, by the names trackers know them by."""
    rows: dict[int, dict[str, float]] = {}
    for line in metrics:
        if "held_out" in line:
            named = {
                f"{'train' if name.startswith('train_') else 'held_out'}_at_depth_{row['k']}/"
                f"{name.removeprefix('train_')}": value
                for row in line["held_out"]
                for name, value in row.items()
                if name != "k"
            }
        else:
            named = {f"train/{name}": value for name, value in line.items() if name != "step"}
        rows.setdefault(line["step"], {}).update({name: value for name, value in named.items() if value is not None})
    return rows


def render(table: list[dict[str, Any]], step: int, improved: bool) -> str:
    """Return the table people read at a validation."""

    def cell(value: float | None, name: str, digits: int) -> str:
        return f"{'--' if value is None else format(value, f'.{digits}f'):>{max(5, len(name))}}"

    columns = {"full_acc": 3, "cond_acc": 3, "tau": 2, "tau_chain": 2, "cond_acceptance": 3, "tau_sampling": 2,
               "tau_chain_sampling": 2, "train_tau": 2, "train_tau_sampling": 2, "loss": 2}  # fmt: skip
    head = "  ".join(f"{name:>5}" for name in columns)
    lines = [f"held-out at step {step:,}{' (best so far)' if improved else ''}", f"  depth  {head}    chains"]
    for row in table:
        cells = "  ".join(cell(row[name], name, digits) for name, digits in columns.items())
        lines.append(f"  {row['k']:5d}  {cells}  {row['valid']:8,}")
    return "\n".join(lines)


def metrics_text(metrics: Sequence[dict[str, Any]]) -> str:
    """Return the content of metrics.jsonl."""
    return "".join(json.dumps(values, sort_keys=True, allow_nan=False) + "\n" for values in metrics)
