"""Where training reports: metrics.jsonl, TensorBoard where installed, progress, and a table at every validation.

metrics.jsonl holds no times, so that a run interrupted and resumed writes the very file of one that was not.
"""

from __future__ import annotations

import importlib.util
import json
import logging
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from eagle3_core.progress import Progress
from eagle3_core.train.checkpoint import TrainState
from eagle3_core.train.validate import Validation

if TYPE_CHECKING:
    from eagle3_core.train.job import TrainJob

LOG_EVERY_STEPS = 10
METRICS_FILE = "metrics.jsonl"

LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StepReport:
    """What one optimiser step did; `valid` and `correct` are counts [K] over all ranks."""

    loss: float
    grad_norm: float
    learning_rate: float
    valid: torch.Tensor
    correct: torch.Tensor
    seconds: float

    @property
    def tau(self) -> float:
        """Return 1 + the sum of joint accuracies on the training samples of the step, at the trained depth."""
        return 1.0 + float((self.correct / self.valid.clamp(min=1)).sum())


class Writer(Protocol):
    """The one call made on TensorBoard."""

    def add_scalar(self, tag: str, value: float, global_step: int) -> None:
        """Record a figure."""


class Trackers:
    """Reports of the leading rank; on other ranks it only keeps `state.best` in step."""

    def __init__(self, progress: Progress | None = None, directory: Path | None = None) -> None:
        """Report to `progress`, TensorBoard files under `directory`; None: report nothing."""
        self._progress, self._directory = progress, directory
        self._writer: Writer | None = None
        self._total = 0
        self._speed: float | None = None
        self._tokens = 0

    def start(self, job: TrainJob, state: TrainState) -> None:
        """Begin or continue."""
        self._total, self._tokens = job.order.total_steps, state.tokens
        if self._progress is None:
            return
        supervised = [int(count) for count in job.features.supervised]
        accounts = job.order.accounts(job.order.position(state.step)[0] if state.step < self._total else 0, supervised)
        LOG.info(
            "%s samples an epoch, %s tokens in, %s trained, %s masked, %s dropped, rows %.1f %% full; step %d of %d",
            accounts.samples, accounts.tokens_in, accounts.trained, accounts.masked, accounts.dropped,
            100 * accounts.fill, state.step, self._total,
        )  # fmt: skip
        if self._directory is not None and importlib.util.find_spec("tensorboard"):
            from torch.utils.tensorboard import SummaryWriter

            self._writer = SummaryWriter(str(self._directory), purge_step=state.step)

    def step(self, state: TrainState, report: StepReport) -> None:
        """Report a step; figures are read back only now and then."""
        tokens, self._tokens = state.tokens - self._tokens, state.tokens
        rate = tokens / max(report.seconds, 1e-9)
        self._speed = rate if self._speed is None else 0.9 * self._speed + 0.1 * rate
        if self._progress is None:
            return
        if state.step % LOG_EVERY_STEPS == 0 or state.step in (1, self._total):
            values = {"step": state.step, "loss": report.loss, "tau": report.tau, "grad_norm": report.grad_norm,
                      "learning_rate": report.learning_rate, "tokens": state.tokens}  # fmt: skip
            state.metrics.append(values)
            self._write("train", {**values, "tokens_per_s": self._speed}, state.step)
        best = state.best.score if state.best else None
        self._progress.update(
            state.step, self._total, "steps", loss=report.loss, tau=report.tau, held_out_tau=best,
            tokens_per_s=self._speed, skipped=state.bad_steps or None,
        )  # fmt: skip

    def validated(self, state: TrainState, validation: Validation) -> bool:
        """Report a validation and tell whether it is the best so far."""
        improved = state.consider(validation)
        if self._progress is not None:
            table = validation.table()
            state.metrics.append({"step": state.step, "held_out": table})
            self._write("held_out", {"tau_chain": validation.score, "loss": validation.loss[0]}, state.step)
            LOG.info("%s", render(table, state.step, improved))
        return improved

    def _write(self, group: str, values: dict[str, Any], step: int) -> None:
        if self._writer is not None:
            for name, value in values.items():
                self._writer.add_scalar(f"{group}/{name}", value, step)


def render(table: list[dict[str, Any]], step: int, improved: bool) -> str:
    """Return the table people read at a validation."""
    lines = [f"held-out at step {step:,}{' (best so far)' if improved else ''}",
             "  depth  full_acc  cond_acc    tau  tau_chain   loss    chains"]  # fmt: skip
    for row in table:
        conditional = "      --" if row["cond_acc"] is None else f"{row['cond_acc']:8.3f}"
        lines.append(
            f"  {row['k']:5d}  {row['full_acc']:8.3f}  {conditional}  {row['tau']:5.2f}  {row['tau_chain']:9.2f}"
            f"  {row['loss']:5.2f}  {row['valid']:8,}"
        )
    return "\n".join(lines)


def metrics_text(metrics: list[dict[str, Any]]) -> str:
    """Return the content of metrics.jsonl."""
    return "".join(json.dumps(values, sort_keys=True) + "\n" for values in metrics)
