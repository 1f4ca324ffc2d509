"""Gradients in one flat buffer, the learning rate of a step, and the optimiser."""

from __future__ import annotations

import math

import torch
from torch import nn

from eagle3_core.config import TrainingConfig
from eagle3_core.train.distributed import Ranks

COUNTS = ("chains", "loss", "stop")


class StepSums:
    """One float32 buffer: the gradients of all parameters, then counts; one all-reduce sums it over ranks.

    Gradients are those of a sum over rows. `finish` divides by the global number of chains, so the result depends
    neither on the number of ranks nor on how samples are packed.
    """

    def __init__(self, model: nn.Module, ttt_steps: int, device: torch.device) -> None:
        """Make every trainable parameter's gradient a view of the buffer."""
        self._parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
        size = sum(parameter.numel() for parameter in self._parameters)
        self._flat = torch.zeros(size + len(COUNTS) + 2 * ttt_steps, device=device)
        self.gradients, self._counts = self._flat[:size], self._flat[size:]
        self._fixed, depths = self._counts[: len(COUNTS)], self._counts[len(COUNTS) :]
        self.valid, self.correct = depths[:ttt_steps], depths[ttt_steps:]
        start = 0
        for parameter in self._parameters:
            parameter.grad = self._flat[start : start + parameter.numel()].view_as(parameter)
            start += parameter.numel()

    def clear(self) -> None:
        """Start a step."""
        self._flat.zero_()

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add to one of `COUNTS`."""
        self._fixed[COUNTS.index(name)] += value

    def finish(self, ranks: Ranks, max_norm: float) -> tuple[dict[str, float], float]:
        """Sum over ranks, divide by the chains, clip.

        Returns:
            The counts, with `loss` per chain; and the gradient norm before clipping, which is not finite if any
            gradient is not.
        """
        ranks.sum(self._flat)
        counts = dict(zip(COUNTS, self._fixed.tolist(), strict=True))
        chains = max(counts["chains"], 1.0)
        self.gradients /= chains
        norm = float(torch.linalg.vector_norm(self.gradients))
        if norm > max_norm:
            self.gradients *= max_norm / norm
        return {**counts, "loss": counts["loss"] / chains}, norm


def build_optimizer(model: nn.Module, training: TrainingConfig) -> torch.optim.AdamW:
    """Return AdamW over the trainable parameters; weight decay on matrices alone."""
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups = [
        {"params": [p for p in trainable if p.ndim > 1], "weight_decay": training.weight_decay},
        {"params": [p for p in trainable if p.ndim <= 1], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=training.learning_rate, betas=training.betas, fused=True)


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to zero at the end."""
    warmup = max(1, round(total * training.warmup_fraction))
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))


def set_learning_rate(optimizer: torch.optim.Optimizer, rate: float) -> None:
    """Use `rate` from now on."""
    for group in optimizer.param_groups:
        group["lr"] = rate
