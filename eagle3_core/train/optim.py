"""Parameters and gradients as flat buffers, AdamW over them, and the learning rate of a step.

torch.optim is not used: its first optimiser imports the whole compiler, seconds that a small run spends better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import nn

from eagle3_core.config import TrainingConfig
from eagle3_core.model.matrices import trainable, views
from eagle3_core.train.distributed import Ranks

EPSILON = 1e-8
COUNTS = ("chains", "loss", "stop")


class StepSums:
    """One float32 buffer: the gradients of all parameters, then counts; one all-reduce sums it over ranks.

    Gradients are those of a sum over rows. The optimiser divides by the global number of chains, so the result depends
    neither on the number of ranks nor on how samples are packed.
    """

    def __init__(self, model: nn.Module, ttt_steps: int, device: torch.device) -> None:
        """Make every trainable parameter's gradient a view of the buffer."""
        size = sum(parameter.numel() for parameter in trainable(model).values())
        self._flat = torch.zeros(size + len(COUNTS) + 2 * ttt_steps, device=device)
        self.gradients, self._counts = self._flat[:size], self._flat[size:]
        self._fixed, depths = self._counts[: len(COUNTS)], self._counts[len(COUNTS) :]
        self.valid, self.correct = depths[:ttt_steps], depths[ttt_steps:]
        self.divisor = torch.ones((), device=device)
        self.unusable = torch.zeros((), device=device)
        self._norm = torch.zeros((), device=device)
        for name, view in views(self.gradients, model).items():
            trainable(model)[name].grad = view

    def clear(self) -> None:
        """Start a step."""
        self._flat.zero_()

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add to one of `COUNTS`."""
        self._fixed[COUNTS.index(name)] += value

    def finish(self, ranks: Ranks, max_norm: float) -> None:
        """Sum over ranks, and find by what the gradients are to be divided; nothing here waits for the device."""
        ranks.sum(self._flat)
        chains = self._fixed[COUNTS.index("chains")].clamp(min=1.0)
        torch.div(torch.linalg.vector_norm(self.gradients), chains, out=self._norm)
        self.unusable.copy_(~self._norm.isfinite())
        self.divisor.copy_(chains * (self._norm / max_norm).clamp(min=1.0))

    def read(self) -> dict[str, float]:
        """Return the counts with `loss` per chain, and `norm`, of the gradient per chain before clipping."""
        *counts, norm = torch.cat((self._fixed, self._norm[None])).tolist()
        found = dict(zip(COUNTS, counts, strict=True))
        return {**found, "loss": found["loss"] / max(found["chains"], 1.0), "norm": norm}


class AdamW:
    """AdamW over one flat buffer of float32 parameters; weight decay on matrices alone."""

    def __init__(self, model: nn.Module, training: TrainingConfig) -> None:
        """Move the trainable parameters into `parameters`; the model's are views of it from now on."""
        self._training = training
        parameters = trainable(model)
        self.parameters = torch.cat([parameter.detach().flatten() for parameter in parameters.values()])
        self._matrices = sum(parameter.numel() for parameter in parameters.values() if parameter.ndim > 1)
        for name, view in views(self.parameters, model).items():
            parameters[name].data = view
        self._mean, self._square = torch.zeros_like(self.parameters), torch.zeros_like(self.parameters)
        self._updates = torch.zeros((), device=self.parameters.device)
        self._model = model

    def step(self, sums: StepSums, rate: float) -> None:
        """Update all parameters from their finished sums, unless a gradient is not finite.

        The kernel divides, and looks at `unusable`, so nobody passes over the gradients before it or waits for them.
        """
        self._updates += 1 - sums.unusable
        for part, decay in (
            (slice(0, self._matrices), self._training.weight_decay),
            (slice(self._matrices, None), 0.0),
        ):
            torch._fused_adamw_(
                [self.parameters[part]], [sums.gradients[part]], [self._mean[part]], [self._square[part]], [],
                [self._updates],
                lr=rate, beta1=self._training.betas[0], beta2=self._training.betas[1], weight_decay=decay, eps=EPSILON,
                amsgrad=False, maximize=False, grad_scale=sums.divisor,
                found_inf=sums.unusable,
            )  # fmt: skip

    def state(self) -> dict[str, torch.Tensor]:
        """Return moments by parameter name, and the number of updates: what `load` takes."""
        moments = {f"mean.{name}": view for name, view in views(self._mean, self._model).items()}
        moments |= {f"square.{name}": view for name, view in views(self._square, self._model).items()}
        return {**moments, "updates": self._updates}

    def load(self, state: Mapping[str, torch.Tensor]) -> None:
        """Take over a saved state."""
        for name, tensor in self.state().items():
            tensor.copy_(state[name])

    def share(self, ranks: Ranks) -> None:
        """Take over parameters and moments from the leading rank."""
        for tensor in (self.parameters, self._mean, self._square, self._updates):
            ranks.broadcast(tensor)


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to zero at the end."""
    warmup = max(1, round(total * training.warmup_fraction))
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
