"""The training loop, top to bottom.

K TTT steps, R chains of a packed row, U draft vocab.
"""

from __future__ import annotations

import math
import time
from typing import Protocol

import torch

from eagle3_core.data.batches import share
from eagle3_core.errors import NonFiniteError
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.judge import judge
from eagle3_core.model.loss import step_weights
from eagle3_core.model.matrices import Matrices
from eagle3_core.model.unroll import unroll
from eagle3_core.train.checkpoint import Checkpoints, TrainState
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.labels import Labels
from eagle3_core.train.loader import Batch, batches
from eagle3_core.train.optim import AdamW, StepSums, learning_rate
from eagle3_core.train.trackers import StepReport, Trackers
from eagle3_core.train.validate import validate


class StopRequest(Protocol):
    """Tells whether this process was asked to save and leave."""

    def __call__(self) -> bool:
        """Return True from the moment of the request."""


def train(job: TrainJob, ranks: Ranks, checkpoints: Checkpoints, trackers: Trackers, stop: StopRequest) -> TrainState:
    """Train to the end, or until any rank is asked to stop; continue from the newest checkpoint if there is one.

    Returns:
        The state reached; `over` tells whether the training is whole.

    Raises:
        NonFiniteError: more steps than allowed had NaN or infinite gradients.
    """
    training, order = job.training, job.order
    drafter, head = job.build(ranks.device)
    labels = Labels(head, job.dtype)
    optimizer = AdamW(drafter, training)
    sums = StepSums(drafter, training.ttt_steps, ranks.device)
    state = checkpoints.resume(drafter, optimizer, ranks)
    drafter.matrices = Matrices(drafter, optimizer.parameters, sums.gradients, job.dtype)
    trackers.start(job, state)
    to_come = order.rows_of(ranks.rank, ranks.world, state.step)
    ahead = batches(job.features, to_come, ranks.device, job.dtype)
    stopped = False
    while not (stopped or over(job, state)):
        began = time.perf_counter()
        sums.clear()
        rows = order.rows(state.step)
        for _ in share(rows, order.lengths, ranks.rank, ranks.world):
            accumulate(job, drafter, next(ahead), labels, sums)
        sums.add("stop", float(stop()))
        sums.finish(ranks, training.max_grad_norm)
        rate = learning_rate(state.step, order.total_steps, training)
        optimizer.step(sums, rate)
        drafter.matrices.refresh()
        counts = sums.read()  # the one moment a step waits for the device
        state.bad_steps += not math.isfinite(counts["norm"])
        state.tokens += sum(order.lengths[sample] for row in rows for sample in row)
        state.step += 1
        stopped = counts["stop"] > 0
        trackers.step(
            state,
            StepReport(counts["loss"], counts["norm"], rate, sums.valid, sums.correct, time.perf_counter() - began),
        )
        refuse_bad_steps(state, training.max_bad_steps)
        improved = False
        if state.step in job.validation_steps:
            improved = trackers.validated(state, validate(job, drafter, labels, ranks))
        checkpoints.save_if_due(drafter, optimizer, state, now=improved or stopped or over(job, state))
    checkpoints.finish()
    return state


def refuse_bad_steps(state: TrainState, most: int) -> None:
    """Raise NonFiniteError if more than `most` steps were skipped."""
    if state.bad_steps > most:
        raise NonFiniteError(
            f"step {state.step}: {state.bad_steps} steps had NaN or infinite gradients, at most {most} are allowed; "
            "lower training.learning_rate or check the captured states"
        )


def over(job: TrainJob, state: TrainState) -> bool:
    """Tell whether the training is whole."""
    return job.over(state.step, state.best.step if state.best else None)


def accumulate(job: TrainJob, drafter: Eagle3Drafter, batch: Batch, labels: Labels, sums: StepSums) -> None:
    """Add one packed row's gradients and counts to the step's sums."""
    training, chains = job.training, batch.chains
    teacher = labels.teach(batch)
    weights = step_weights(training.ttt_steps, training.step_decay)
    loss = torch.zeros((), device=batch.input_ids.device)
    right = torch.ones_like(chains.rows, dtype=torch.bool)
    steps = unroll(drafter, batch.input_ids, batch.aux_hidden_states, chains, training.ttt_steps)
    for step, carried in enumerate(steps):
        supervised = chains.supervised(step)
        judged = judge(drafter, carried, teacher, supervised, step, weights[step], training.loss)
        loss = loss + judged.loss
        right &= judged.correct
        sums.valid[step] += supervised.sum()
        sums.correct[step] += right.sum()
    if len(chains.rows):
        torch.autograd.backward([loss])
    sums.add("chains", len(chains.rows))
    sums.add("loss", loss.detach())
