"""The training loop, top to bottom."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from eagle3_core.data.batches import share
from eagle3_core.errors import NonFiniteError
from eagle3_core.train.checkpoint import Checkpoints, TrainState
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import Batch, batches
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.trackers import StepReport, Trackers
from eagle3_core.train.validate import StopRequest, validate


def train(job: TrainJob, ranks: Ranks, checkpoints: Checkpoints, trackers: Trackers, stop: StopRequest) -> TrainState:
    """Train to the end, or until any rank is asked to stop; continue from a checkpoint if there is one.

    Returns:
        The state reached; `over` tells whether the training is whole.

    Raises:
        NonFiniteError: more steps than allowed had NaN or infinite gradients.
    """
    learner = Learner.of(job, ranks)
    state = checkpoints.resume(learner.optimizer)
    ranks.agree(state.step, "the step of the newest checkpoint")
    trackers.start(job, ranks, state)
    to_come = job.order.rows_of(ranks.rank, ranks.world, state.step)
    ahead = batches(job.features, to_come, ranks.device, job.dtype)
    stopped = save = False
    while not (stopped or over(job, state)):
        improved = False
        if validation_due(job, state):
            validation = validate(job, learner, ranks, stop)
            stopped = validation is None  # asked to: the next attempt validates
            if validation is not None:
                improved = trackers.validated(state, validation)
        else:
            due = ranks.leads and checkpoints.due(state)  # the others never learn when one was written
            report = step(learner, ranks, state, ahead, save=due, stop=stop())
            stopped, save = report.stop, save or report.save
            trackers.stepped(state, report)
            refuse_bad_steps(state, job.training.max_bad_steps)
        if stopped or improved or over(job, state) or (save and not validation_due(job, state)):
            checkpoints.save(learner.optimizer, state, ranks)
            save = False
    checkpoints.finish()
    trackers.close(finished=over(job, state))
    return state


def step(
    learner: Learner, ranks: Ranks, state: TrainState, ahead: Iterator[Batch], *, save: bool, stop: bool
) -> StepReport:
    """Do one optimiser step; what one rank asks for, to `save` or to `stop`, all are told."""
    job, order, sums = learner.job, learner.job.order, learner.sums
    began, waited = time.perf_counter(), 0.0
    sums.clear()
    rows = order.rows(state.step)
    for _ in share(rows, order.lengths, ranks.rank, ranks.world):
        asked = time.perf_counter()
        batch = next(ahead)
        waited += time.perf_counter() - asked
        learner.accumulate(batch)
    sums.add("stop", float(stop))
    sums.add("save", float(save))
    rate = learning_rate(state.step, order.total_steps, job.training)
    learner.update(rate)
    counts = sums.read()  # the one moment a step waits for the device
    state.bad_steps += not math.isfinite(counts["norm"])
    state.tokens += sum(order.lengths[sample] for row in rows for sample in row)
    state.step += 1
    return StepReport(
        counts["loss"], counts["norm"], rate, sums.valid, sums.correct, time.perf_counter() - began, waited,
        stop=counts["stop"] > 0, save=counts["save"] > 0,
    )  # fmt: skip


def refuse_bad_steps(state: TrainState, most: int) -> None:
    """Raise NonFiniteError if more than `most` steps were skipped."""
    if state.bad_steps > most:
        raise NonFiniteError(
            f"step {state.step}: {state.bad_steps} steps had NaN or infinite gradients, at most {most} are allowed; "
            "lower training.learning_rate or check the captured states"
        )


def validation_due(job: TrainJob, state: TrainState) -> bool:
    """Tell whether the held-out samples are to be looked at before the next step."""
    return state.step in job.validation_steps and state.validated < state.step


def over(job: TrainJob, state: TrainState) -> bool:
    """Tell whether the training is whole."""
    return not validation_due(job, state) and job.over(state.step, state.best.step if state.best else None)
