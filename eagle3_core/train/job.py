"""TrainJob: everything a rank works on, built from artifacts or by a test."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import torch

from eagle3_core.config import EvaluationConfig, TrainingConfig
from eagle3_core.data.batches import Packing, Samples, TrainOrder
from eagle3_core.errors import InputError
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.loss import TargetHead
from eagle3_core.model.target_weights import TargetWeights


class Features(Samples, Protocol):
    """What training needs of a feature set: its index, and its samples one by one."""

    @property
    def lengths(self) -> Iterable[Any]:
        """Return the tokens of each sample."""

    @property
    def supervised(self) -> Iterable[Any]:
        """Return the answer tokens of each sample."""

    @property
    def held_out(self) -> Iterable[Any]:
        """Return whether each sample is kept for evaluation."""

    @property
    def sample_ids(self) -> Sequence[str]:
        """Return the samples' names."""


@dataclass(frozen=True)
class TrainJob:
    """One training run; U draft tokens stand for the rising `draft_to_target` ids of V."""

    training: TrainingConfig
    evaluation: EvaluationConfig
    sizes: DrafterArchitecture
    features: Features
    target: TargetWeights
    draft_to_target: tuple[int, ...]
    train_lm_head: bool = True
    start: Mapping[str, torch.Tensor] | None = None
    """The champion's parameters, for a warm start."""

    @cached_property
    def order(self) -> TrainOrder:
        """Return the steps of the whole run."""
        lengths = [int(length) for length in self.features.lengths]
        samples = [index for index, kept in enumerate(self.features.held_out) if not kept]
        packing = Packing(self.training.row_tokens, self.training.batch_tokens)
        return TrainOrder(lengths, samples, packing, seed=self.training.seed, epochs=self.training.epochs)

    @cached_property
    def supervised(self) -> list[int]:
        """Return the answer tokens of each sample."""
        return [int(count) for count in self.features.supervised]

    @cached_property
    def held_out(self) -> list[int]:
        """Return the samples kept for evaluation.

        Raises:
            InputError: there are none.
        """
        found = [index for index, kept in enumerate(self.features.held_out) if kept]
        if not found:
            raise InputError("training: expected held-out samples to validate on, found none; raise held_out_fraction")
        return found

    @cached_property
    def probe(self) -> list[int]:
        """Return samples of the training set to measure beside the held-out ones: as many, evenly spread."""
        samples = self.order.samples
        return list(samples[:: -(-len(samples) // len(self.held_out))])

    @cached_property
    def validation_steps(self) -> frozenset[int]:
        """Return after how many steps to validate: evenly spaced, the last at the end."""
        total, count = self.order.total_steps, self.training.validations
        return frozenset(max(1, round(total * (index + 1) / count)) for index in range(count))

    def over(self, step: int, best_step: int | None) -> bool:
        """Tell whether training ends after `step`: all steps done, or patience with the best at `best_step` lost."""
        stale = sum(best_step is not None and best_step < validated <= step for validated in self.validation_steps)
        patience = self.training.patience
        return step >= self.order.total_steps or (patience is not None and stale >= patience)

    @property
    def dtype(self) -> torch.dtype:
        """Return the precision of matrix products; sums, norms and softmax are in float32, weights too."""
        return torch.bfloat16 if self.training.precision == "bfloat16" else torch.float32

    def build(self, device: torch.device) -> tuple[Eagle3Drafter, TargetHead]:
        """Return the drafter at its starting values, and the target's head."""
        drafter = Eagle3Drafter(self.sizes, self.target.embedding, train_lm_head=self.train_lm_head)
        ids = torch.tensor(self.draft_to_target)
        drafter.start_from_target(self.target.head[ids], self.target.final_norm, self.training.seed)
        if self.start is not None:
            drafter.load_state_dict(dict(self.start))
        drafter.embed_tokens = drafter.embed_tokens.to(self.dtype)
        return drafter.to(device), TargetHead.of(self.target.head, ids).to(device, self.dtype)
