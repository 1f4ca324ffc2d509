"""The training loop, top to bottom.

K TTT steps, R chains of a packed row, U draft vocab.
"""

from __future__ import annotations

import time
from typing import Protocol

import torch

from eagle3_core.data.batches import Batch, read_ahead, share
from eagle3_core.errors import NonFiniteError
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.loss import Teacher, judge_step, step_weights
from eagle3_core.model.unroll import Chains, unroll
from eagle3_core.train.checkpoint import Checkpoints, TrainState
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
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
        The state reached; `state.step == job.order.total_steps` when the training is whole.

    Raises:
        NonFiniteError: more steps than allowed had NaN or infinite gradients.
    """
    training, order = job.training, job.order
    drafter, head, draft_to_target = job.build(ranks.device)
    optimizer = AdamW(drafter, training)
    sums = StepSums(drafter, training.ttt_steps, ranks.device)
    state = checkpoints.resume(drafter, optimizer, ranks)
    trackers.start(job, state)
    stopped = False
    batches = read_ahead(job.features, order.rows_of(ranks.rank, ranks.world, state.step), ranks.device)
    while state.step < order.total_steps and not stopped:
        began = time.perf_counter()
        rows = order.rows(state.step)
        sums.clear()
        for _ in share(rows, order.lengths, ranks.rank, ranks.world):
            accumulate(job, drafter, next(batches), head, draft_to_target, sums)
        sums.add("stop", float(stop()))
        counts, norm = sums.finish(ranks, training.max_grad_norm)
        rate = learning_rate(state.step, order.total_steps, training)
        if norm < float("inf"):
            optimizer.step(sums.gradients, rate)
        else:
            state.bad_steps += 1
        state.step += 1
        state.tokens += sum(order.lengths[sample] for row in rows for sample in row)
        stopped = counts["stop"] > 0
        trackers.step(
            state, StepReport(counts["loss"], norm, rate, sums.valid, sums.correct, time.perf_counter() - began)
        )
        if state.bad_steps > training.max_bad_steps:
            raise NonFiniteError(
                f"step {state.step}: {state.bad_steps} steps had NaN or infinite gradients, at most "
                f"{training.max_bad_steps} are allowed; lower training.learning_rate or check the captured states"
            )
        improved = False
        if state.step in job.validation_steps:
            improved = trackers.validated(state, validate(job, drafter, head, draft_to_target, ranks))
        checkpoints.save_if_due(drafter, optimizer, state, now=improved or stopped or state.step == order.total_steps)
    return state


def accumulate(
    job: TrainJob,
    drafter: Eagle3Drafter,
    batch: Batch,
    head: torch.Tensor,
    draft_to_target: torch.Tensor,
    sums: StepSums,
) -> None:
    """Add one packed row's gradients and counts to the step's sums."""
    training = job.training
    chains = Chains.build(batch.loss_mask, batch.lengths)
    teacher = Teacher.judge(batch.last_hidden_state[chains.rows + 1], head, draft_to_target)
    weights = step_weights(training.ttt_steps, training.step_decay)
    loss = torch.zeros((), device=head.device)
    right = torch.ones_like(chains.rows, dtype=torch.bool)
    with job.precision(head.device):
        steps = unroll(drafter, batch.input_ids, batch.aux_hidden_states, chains, training.ttt_steps)
        for step, logits in enumerate(steps):
            supervised = chains.supervised(step)
            judged = judge_step(logits, teacher, supervised, step, training.loss)
            loss = loss + weights[step] * judged.loss
            right &= judged.correct
            sums.valid[step] += supervised.sum()
            sums.correct[step] += right.sum()
    if len(chains.rows):
        torch.autograd.backward([loss])
    sums.add("chains", len(chains.rows))
    sums.add("loss", loss.detach())
