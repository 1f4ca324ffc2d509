"""What learns on one rank: the drafter with its labels, gradient sums and optimiser, put together in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch

from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.judge import judge
from eagle3_core.model.loss import step_weights
from eagle3_core.model.matrices import Matrices
from eagle3_core.model.unroll import unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.labels import Labels
from eagle3_core.train.loader import Batch
from eagle3_core.train.optim import AdamW, StepSums


@dataclass(frozen=True)
class Learner:
    """The drafter at its starting values, until a checkpoint is loaded into `optimizer`."""

    job: TrainJob
    drafter: Eagle3Drafter
    labels: Labels
    sums: StepSums
    optimizer: AdamW

    @classmethod
    def of(cls, job: TrainJob, ranks: Ranks) -> Self:
        """Build all parts on the rank's device."""
        drafter, head = job.build(ranks.device)
        sums = StepSums(drafter, job.training.ttt_steps, ranks)
        optimizer = AdamW(drafter, job.training, ranks, job.dtype)
        drafter.matrices = Matrices(drafter, optimizer.weights, sums.gradients)
        return cls(job, drafter, Labels(head, job.dtype), sums, optimizer)

    def accumulate(self, batch: Batch) -> None:
        """Add one packed row's gradients and counts to the step's sums; R chains of the row, K TTT steps."""
        training, chains, sums = self.job.training, batch.chains, self.sums
        teacher = self.labels.teach(batch)
        weights = step_weights(training.ttt_steps, training.step_decay)
        loss = torch.zeros((), device=batch.input_ids.device)
        right = torch.ones_like(chains.rows, dtype=torch.bool)
        steps = unroll(self.drafter, batch.input_ids, batch.aux_hidden_states, chains, training.ttt_steps)
        for step, carried in enumerate(steps):
            supervised = chains.supervised(step)
            judged = judge(self.drafter, carried, teacher, supervised, step, weights[step], training.loss)
            loss = loss + judged.loss
            right &= judged.correct
            sums.valid[step] += supervised.sum()
            sums.correct[step] += right.sum()
        if len(chains.rows):
            torch.autograd.backward([loss])
        sums.add("chains", len(chains.rows))
        sums.add("loss", loss.detach())

    def update(self, rate: float) -> None:
        """Sum over ranks, update the parameters at the learning rate `rate`, and let all weights follow."""
        self.sums.finish(self.job.training.max_grad_norm)
        self.optimizer.step(self.sums, rate)
        self.optimizer.refresh()
