"""Measure the drafter on held-out samples at serving depth: per-depth accuracy, tau, and the server's walk."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_core.config import DraftShape
from eagle3_core.data.batches import pack
from eagle3_core.evaluate.acceptance import DepthCounts, Walk, chain_walk
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.judge import judge
from eagle3_core.model.unroll import unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.labels import Labels
from eagle3_core.train.loader import Batch, batches


@dataclass(frozen=True)
class Validation:
    """Counts over the held-out samples; K depths, S samples."""

    counts: DepthCounts
    loss: tuple[float, ...]
    walks: Mapping[str, tuple[Walk, ...]]
    shapes: tuple[DraftShape, ...]
    primary: DraftShape
    max_tokens: int

    @property
    def depth(self) -> int:
        """Return K."""
        return len(self.counts.valid)

    def tau_chain(self, num_steps: int) -> float:
        """Return what a server would measure with a chain of `num_steps`."""
        return Walk.pool(walks[num_steps - 1] for walks in self.walks.values()).accept_length

    @property
    def score(self) -> float:
        """Return the figure that decides which checkpoint is best."""
        return self.tau_chain(self.primary.num_steps)

    def table(self) -> list[dict[str, Any]]:
        """Return one row per depth."""
        full, conditional = self.counts.full_acc, self.counts.cond_acc
        return [
            {"k": k + 1, "tau": self.counts.tau(k + 1), "tau_chain": self.tau_chain(k + 1), "full_acc": full[k],
             "cond_acc": conditional[k], "valid": self.counts.valid[k], "loss": self.loss[k]}
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
                for name, walks in self.walks.items()
            },
        }


def validate(job: TrainJob, drafter: Eagle3Drafter, labels: Labels, ranks: Ranks) -> Validation:
    """Judge every held-out sample to the deepest shape's depth; all ranks return the same figures."""
    depth, held_out = job.evaluation.depth, job.held_out
    lengths = job.order.lengths
    sums = torch.zeros(3, depth, dtype=torch.float64, device=ranks.device)
    walks = torch.zeros(len(lengths), depth, 2, dtype=torch.int64, device=ranks.device)
    rows = pack(lengths, held_out, job.training.row_tokens)[ranks.rank :: ranks.world]
    for row, batch in zip(rows, batches(job.features, rows, ranks.device, job.dtype), strict=True):
        chains = batch.chains
        if not len(chains.rows):
            continue
        teacher = labels.teach(batch)
        right = torch.ones_like(chains.rows, dtype=torch.bool)
        accepted = torch.zeros_like(chains.rows)
        with torch.no_grad():
            for step, carried in enumerate(unroll(drafter, batch.input_ids, batch.aux_hidden_states, chains, depth)):
                supervised = chains.supervised(step)
                judged = judge(drafter, carried, teacher, supervised, step)
                right &= judged.correct
                accepted += right
                sums[:, step] += torch.stack((supervised.sum(), right.sum(), judged.loss)).double()
        for sample, answers in zip(row, accepted_by_answer(batch, accepted), strict=True):
            walks[sample] = torch.tensor(_walks(answers, depth, job.evaluation.max_new_tokens))
    ranks.sum(sums)
    ranks.sum(walks)
    valid, correct, loss = sums.tolist()
    by_sample = {
        str(job.features.sample_ids[sample]): tuple(Walk(*pair) for pair in walks[sample].tolist())
        for sample in held_out
    }
    counts = DepthCounts(tuple(int(count) for count in valid), tuple(int(count) for count in correct))
    mean = tuple(total / max(count, 1.0) for total, count in zip(loss, valid, strict=True))
    shapes = job.evaluation.shapes
    return Validation(counts, mean, by_sample, shapes, job.evaluation.primary_shape, job.evaluation.max_new_tokens)


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
