"""Measure the drafter at serving depth, on held-out samples and on as many that it trains on: accuracy, tau, walks."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from eagle3_core.config import DraftShape
from eagle3_core.data.batches import pack
from eagle3_core.evaluate.acceptance import DepthCounts, Walk, chain_walk, expected_passes
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
    """Counts over samples at K depths: greedy, and sampling at temperature 1; walks by the samples' names."""

    greedy: DepthCounts
    sampling: DepthCounts
    loss: tuple[float, ...]
    walks: Mapping[str, tuple[Walk, ...]]
    walks_sampling: Mapping[str, tuple[Walk, ...]]

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

    def tau_chain(self, num_steps: int, *, sampling: bool = False) -> float:
        """Return what a server would measure with a chain of `num_steps`."""
        walks = self.held_out.walks_sampling if sampling else self.held_out.walks
        return Walk.pool(by_depth[num_steps - 1] for by_depth in walks.values()).accept_length

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
             "tau_sampling": sampling.tau(k + 1), "tau_chain_sampling": self.tau_chain(k + 1, sampling=True),
             "cond_acceptance": accepted[k],
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
                    "verify_passes_sampling": [w.verify_passes for w in self.held_out.walks_sampling[name]],
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
    return Validation(held_out, trained, evaluation.shapes, evaluation.primary_shape, evaluation.max_new_tokens[0])


def _figures(
    job: TrainJob, learner: Learner, ranks: Ranks, samples: Sequence[int], stop: StopRequest
) -> Figures | None:
    depth, names = job.evaluation.depth, job.features.sample_ids
    sums = torch.zeros(4 * depth + 1, dtype=torch.float64, device=ranks.device)
    by_depth, stopped = sums[:-1].view(4, depth), sums[-1:]
    walks = torch.zeros(len(samples), depth, 2, dtype=torch.int64, device=ranks.device)
    expected = torch.zeros(len(samples), depth, dtype=torch.float64, device=ranks.device)
    longest = job.evaluation.max_new_tokens[0]
    place = {sample: index for index, sample in enumerate(samples)}
    rows = pack(job.order.lengths, samples, job.training.row_tokens)[ranks.rank :: ranks.world]
    for batch in batches(job.features, rows, ranks.device, job.dtype):
        if stop():
            stopped += 1
            break
        by_answers = (by_answer(batch, values) for values in _measure(learner, batch, depth, by_depth))
        for sample, accepted, likely in zip(batch.samples, *by_answers, strict=True):
            walks[place[sample]] = torch.tensor(_walks(accepted, depth, longest))
            expected[place[sample]] = torch.tensor(_expected(likely, depth, longest))
    ranks.sum(sums)
    ranks.sum(walks)
    ranks.sum(expected)
    if float(stopped) > 0:
        return None
    valid, correct, product, loss = by_depth.tolist()
    counts = tuple(int(count) for count in valid)
    return Figures(
        DepthCounts(counts, tuple(int(count) for count in correct)), DepthCounts(counts, tuple(product)),
        tuple(total / max(count, 1.0) for total, count in zip(loss, valid, strict=True)),
        {str(names[sample]): tuple(Walk(*pair) for pair in pairs)
         for sample, pairs in zip(samples, walks.tolist(), strict=True)},
        {str(names[sample]): tuple(Walk(tokens, passes) for (tokens, _), passes in zip(pairs, means, strict=True))
         for sample, pairs, means in zip(samples, walks.tolist(), expected.tolist(), strict=True)},
    )  # fmt: skip


def _measure(learner: Learner, batch: Batch, depth: int, sums: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Add valid, correct and likely chains and losses to `sums` [4, K].

    Returns:
        int64 [R], right steps in a row of each chain; float32 [R, K], the probability that it is accepted so far.
    """
    chains, drafter = batch.chains, learner.drafter
    accepted, accepted_so_far = torch.zeros_like(chains.rows), sums.new_zeros(len(chains.rows), depth).float()
    if not len(chains.rows):
        return accepted, accepted_so_far
    teacher, mass = learner.labels.teach(batch), learner.labels.draft_mass(batch)
    right, likely = torch.ones_like(chains.rows, dtype=torch.bool), torch.ones_like(mass)
    with torch.no_grad():
        for step, carried in enumerate(unroll(drafter, batch.input_ids, batch.aux_hidden_states, chains, depth)):
            supervised = chains.supervised(step)
            found = measure(drafter, carried, teacher, mass, supervised, step)
            right &= found.correct
            likely *= found.likely
            accepted += right
            accepted_so_far[:, step] = likely
            parts = (supervised.sum(), right.sum(), likely.double().sum(), found.divergence.double().sum())
            sums[:, step] += torch.stack([part.double() for part in parts])
    return accepted, accepted_so_far


def by_answer(batch: Batch, values: torch.Tensor) -> list[list[torch.Tensor]]:
    """Return, for each document, the values along each of its answers (runs of the loss mask), on the CPU.

    Args:
        batch: The documents.
        values: [R, ...], of each chain; a token that starts none has zeros.
    """
    by_token = torch.zeros((len(batch.loss_mask) + 1, *values.shape[1:]), dtype=values.dtype)
    by_token[batch.chains.rows.cpu() + 1] = values.cpu()  # the chain at slot t starts once token t+1 is known
    found, start = [], 0
    for length in batch.lengths:
        mask = [False, *batch.loss_mask[start : start + length].tolist(), False]
        edges = [start + at for at, (before, after) in enumerate(itertools.pairwise(mask)) if before != after]
        found.append([by_token[begin:end] for begin, end in zip(edges[::2], edges[1::2], strict=True)])
        start += length
    return found


def _walks(answers: list[torch.Tensor], depth: int, max_tokens: int) -> list[tuple[int, float]]:
    accepted = [answer.tolist() for answer in answers]
    pooled = [Walk.pool(chain_walk(answer, steps, max_tokens) for answer in accepted) for steps in range(1, depth + 1)]
    return [(walk.completion_tokens, walk.verify_passes) for walk in pooled]


def _expected(answers: list[torch.Tensor], depth: int, max_tokens: int) -> list[float]:
    """Return the verify passes to expect of all answers, by length of the chain."""
    each = [expected_passes(answer.double().numpy(), max_tokens) for answer in answers]
    return [sum(by_depth) for by_depth in zip(*each, strict=True)] or [0.0] * depth
