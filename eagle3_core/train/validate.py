"""Measure the drafter at serving depth, on held-out samples and on as many that it trains on: accuracy, tau, walks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eagle3_core.config import DraftShape
from eagle3_core.data.batches import pack
from eagle3_core.evaluate.acceptance import DepthCounts, Walk, chain_walk
from eagle3_core.model.judge import measure
from eagle3_core.model.unroll import unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import Batch, batches


class StopRequest(Protocol):
    """Tells whether this process was asked to save and leave."""

    def __call__(self) -> bool:
        """Return True from the moment of the request."""


@dataclass(frozen=True)
class Figures:
    """Counts over samples at K depths: greedy, and sampling at temperature 1; `walks` by the samples' names."""

    greedy: DepthCounts
    sampling: DepthCounts
    loss: tuple[float, ...]
    walks: Mapping[str, tuple[Walk, ...]]

    def taus(self) -> list[tuple[float, float]]:
        """Return tau, greedy and sampling, of each depth; fewer where no chain is that deep."""
        deep = sum(bool(valid) for valid in self.greedy.valid)
        cut = [DepthCounts(counts.valid[:deep], counts.correct[:deep]) for counts in (self.greedy, self.sampling)]
        return [(cut[0].tau(k + 1), cut[1].tau(k + 1)) for k in range(deep)]


@dataclass(frozen=True)
class Validation:
    """Figures of the held-out samples, and of some that are trained on."""

    held_out: Figures
    trained: Figures
    shapes: tuple[DraftShape, ...]
    primary: DraftShape
    max_tokens: int

    @property
    def depth(self) -> int:
        """Return K."""
        return len(self.held_out.greedy.valid)

    def tau_chain(self, num_steps: int) -> float:
        """Return what a server would measure with a chain of `num_steps`."""
        return Walk.pool(walks[num_steps - 1] for walks in self.held_out.walks.values()).accept_length

    @property
    def score(self) -> float:
        """Return the figure that decides which checkpoint is best."""
        return self.tau_chain(self.primary.num_steps)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per depth."""
        greedy, sampling, trained = self.held_out.greedy, self.held_out.sampling, self.trained.taus()
        full, conditional, accepted = greedy.full_acc, greedy.cond_acc, sampling.cond_acc
        return [
            {"k": k + 1, "tau": greedy.tau(k + 1), "tau_chain": self.tau_chain(k + 1), "full_acc": full[k],
             "cond_acc": conditional[k], "valid": greedy.valid[k], "loss": self.held_out.loss[k],
             "tau_sampling": sampling.tau(k + 1), "cond_acceptance": accepted[k],
             "train_tau": trained[k][0] if k < len(trained) else None,
             "train_tau_sampling": trained[k][1] if k < len(trained) else None}
            for k in range(self.depth)
        ]  # fmt: skip

    def report(self) -> dict[str, Any]:
        """Return what validation.json says; `samples` lets others pool over exactly the answers they served."""
        table = self.table()
        chains = [shape for shape in self.shapes if shape.topk == 1]
        return {
            "depth": self.depth,
            "max_tokens": self.max_tokens,
            "primary": self.primary.name,
            "trainer_tau": self.score,
            "by_depth": table,
            "shapes": {shape.name: table[shape.num_steps - 1] for shape in chains},
            "samples": {
                name: {
                    "completion_tokens": walks[0].completion_tokens,
                    "verify_passes": [w.verify_passes for w in walks],
                }
                for name, walks in self.held_out.walks.items()
            },
        }


def validate(job: TrainJob, learner: Learner, ranks: Ranks, stop: StopRequest) -> Validation | None:
    """Measure to the deepest shape's depth; all ranks return the same figures, or None once one is asked to stop."""
    held_out = _figures(job, learner, ranks, job.held_out, stop)
    trained = None if held_out is None else _figures(job, learner, ranks, job.probe, stop)
    if held_out is None or trained is None:
        return None
    evaluation = job.evaluation
    return Validation(held_out, trained, evaluation.shapes, evaluation.primary_shape, evaluation.max_new_tokens)


def _figures(
    job: TrainJob, learner: Learner, ranks: Ranks, samples: Sequence[int], stop: StopRequest
) -> Figures | None:
    depth, names = job.evaluation.depth, job.features.sample_ids
    sums = torch.zeros(4 * depth + 1, dtype=torch.float64, device=ranks.device)
    by_depth, stopped = sums[:-1].view(4, depth), sums[-1:]
    walks = torch.zeros(len(samples), depth, 2, dtype=torch.int64, device=ranks.device)
    place = {sample: index for index, sample in enumerate(samples)}
    rows = pack(job.order.lengths, samples, job.training.row_tokens)[ranks.rank :: ranks.world]
    for batch in batches(job.features, rows, ranks.device, job.dtype):
        if stop():
            stopped += 1
            break
        accepted = _measure(learner, batch, depth, by_depth)
        for sample, answers in zip(batch.samples, accepted_by_answer(batch, accepted), strict=True):
            walks[place[sample]] = torch.tensor(_walks(answers, depth, job.evaluation.max_new_tokens))
    ranks.sum(sums)
    ranks.sum(walks)
    if float(stopped) > 0:
        return None
    valid, correct, product, loss = by_depth.tolist()
    counts = tuple(int(count) for count in valid)
    return Figures(
        DepthCounts(counts, tuple(int(count) for count in correct)), DepthCounts(counts, tuple(product)),
        tuple(total / max(count, 1.0) for total, count in zip(loss, valid, strict=True)),
        {str(names[sample]): tuple(Walk(*pair) for pair in pairs)
         for sample, pairs in zip(samples, walks.tolist(), strict=True)},
    )  # fmt: skip


def _measure(learner: Learner, batch: Batch, depth: int, sums: torch.Tensor) -> torch.Tensor:
    """Add valid, correct and likely chains and losses to `sums` [4, K]; return right steps in a row, int64 [R]."""
    chains, drafter = batch.chains, learner.drafter
    accepted = torch.zeros_like(chains.rows)
    if not len(chains.rows):
        return accepted
    teacher, mass = learner.labels.teach(batch), learner.labels.draft_mass(batch)
    right, likely = torch.ones_like(chains.rows, dtype=torch.bool), torch.ones_like(mass)
    with torch.no_grad():
        for step, carried in enumerate(unroll(drafter, batch.input_ids, batch.aux_hidden_states, chains, depth)):
            supervised = chains.supervised(step)
            found = measure(drafter, carried, teacher, mass, supervised, step)
            right &= found.correct
            likely *= found.overlap
            accepted += right
            parts = (supervised.sum(), right.sum(), likely.double().sum(), found.divergence.double().sum())
            sums[:, step] += torch.stack([part.double() for part in parts])
    return accepted


def accepted_by_answer(batch: Batch, accepted: torch.Tensor) -> list[list[list[int]]]:
    """Return, for each document, the accept lengths along each of its answers (runs of the loss mask).

    Args:
        batch: The documents.
        accepted: int64 [R], right steps in a row of each chain.
    """
    by_token = torch.zeros(len(batch.loss_mask) + 1, dtype=torch.int64)
    by_token[batch.chains.rows.cpu() + 1] = accepted.cpu()  # the chain at slot t starts once token t+1 is known
    found, start = [], 0
    for length in batch.lengths:
        mask = batch.loss_mask[start : start + length].tolist()
        answers: list[list[int]] = []
        for offset, supervised in enumerate(mask):
            if supervised and (offset == 0 or not mask[offset - 1]):
                answers.append([])
            if supervised:
                answers[-1].append(int(by_token[start + offset]))
        found.append(answers)
        start += length
    return found


def _walks(answers: list[list[int]], depth: int, max_tokens: int) -> list[tuple[int, int]]:
    pooled = [
        sum((chain_walk(answer, steps, max_tokens) for answer in answers), Walk()) for steps in range(1, depth + 1)
    ]
    return [(walk.completion_tokens, walk.verify_passes) for walk in pooled]
