"""Parameters and gradients as flat buffers, AdamW over this rank's part of them, and the learning rate of a step.

P trainable parameters, matrices first, padded to equal parts of whole blocks, one a rank. Every rank has all weights in
the precision of training and sums all gradients in float32; parameters and moments in float32 it has of its own part
alone. That is 6 + 12 / ranks bytes a parameter in bfloat16, and the same bytes on the wire as a sum over ranks (less,
as weights come back in half precision).

torch.optim is not used: its first optimiser imports the whole compiler, seconds that a small run spends better.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping

import torch
from torch import nn

from eagle3_core.config import TrainingConfig
from eagle3_core.model.matrices import trainable, views
from eagle3_core.train.distributed import Ranks

EPSILON = 1e-8
COUNTS = ("chains", "loss", "stop", "save")


class StepSums:
    """The gradients of all parameters in float32, and counts.

    Gradients are those of a sum over rows. The optimiser divides by the global number of chains, so the result depends
    neither on the number of ranks nor on how samples are packed.
    """

    def __init__(self, model: nn.Module, ttt_steps: int, ranks: Ranks) -> None:
        """Make the gradient of every norm a view of the buffer; those of matrices are summed by `Matrices`."""
        self._ranks = ranks
        self._part = ranks.part(sum(parameter.numel() for parameter in trainable(model).values()))
        self.gradients = torch.zeros(self._part.size, device=ranks.device)
        blocks = self._part.num_blocks
        self._small = torch.zeros(len(COUNTS) + 2 * ttt_steps + blocks, device=ranks.device)
        self._fixed, self.valid, self.correct, self._norms = self._small.split(
            [len(COUNTS), ttt_steps, ttt_steps, blocks]
        )
        self.divisor = torch.ones((), device=ranks.device)
        self.unusable = torch.zeros((), device=ranks.device)
        self._norm = torch.zeros((), device=ranks.device)
        for name, view in views(self.gradients, model).items():
            if view.ndim == 1:
                trainable(model)[name].grad = view

    @property
    def own(self) -> torch.Tensor:
        """Return this rank's part of the gradients; after `finish`, their sum over ranks."""
        return self._part.of(self.gradients)

    def clear(self) -> None:
        """Start a step."""
        self.gradients.zero_()
        self._small.zero_()

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add to one of `COUNTS`."""
        self._fixed[COUNTS.index(name)] += value

    def finish(self, max_norm: float) -> None:
        """Sum over ranks, and find by what the gradients are to be divided; nothing here waits for the device.

        The norm is taken block by block, so it has the same bits whatever rank has which block.
        """
        self._ranks.sum_parts(self.gradients, self._part)
        self._part.block_norms(self.gradients, self._norms)
        self._ranks.sum(self._small)
        chains = self._fixed[COUNTS.index("chains")].clamp(min=1.0)
        torch.div(self._part.norm(self._norms), chains, out=self._norm)
        self.unusable.copy_(~self._norm.isfinite())
        self.divisor.copy_(chains * (self._norm / max_norm).clamp(min=1.0))

    def read(self) -> dict[str, float]:
        """Return the counts with `loss` per chain, and `norm`, of the gradient per chain before clipping."""
        *counts, norm = torch.cat((self._fixed, self._norm[None])).tolist()
        found = dict(zip(COUNTS, counts, strict=True))
        return {**found, "loss": found["loss"] / max(found["chains"], 1.0), "norm": norm}


class AdamW:
    """AdamW over this rank's part of the float32 parameters; weight decay on matrices alone.

    The model's parameters are from now on views of `weights` [P] in the precision of training, those of norms of
    float32 values.
    """

    def __init__(self, model: nn.Module, training: TrainingConfig, ranks: Ranks, dtype: torch.dtype) -> None:
        """Take the parameters over; `dtype` is the precision of training."""
        self._training, self._ranks, self._model = training, ranks, model
        parameters = trainable(model)
        self._count = sum(parameter.numel() for parameter in parameters.values())
        self._matrices = sum(parameter.numel() for parameter in parameters.values() if parameter.ndim > 1)
        self._part = ranks.part(self._count)
        self.parameters = torch.zeros(self._part.stop - self._part.start, device=ranks.device)
        self._mean, self._square = torch.zeros_like(self.parameters), torch.zeros_like(self.parameters)
        self._updates = torch.zeros((), device=ranks.device)
        self._fill(self.parameters, {name: parameter.detach() for name, parameter in parameters.items()})
        alone = ranks.world == 1
        self.weights = self.parameters
        if not alone or dtype != torch.float32:
            self.weights = torch.empty(self._part.size, dtype=dtype, device=ranks.device)
        norms = slice(self._matrices, self._count)
        self._norms = self.parameters[norms] if alone else self.parameters.new_empty(self._count - self._matrices)
        for name, view in self._views().items():
            parameters[name].data = view
        self.refresh()

    def step(self, sums: StepSums, rate: float) -> None:
        """Update this rank's parameters from finished sums, unless a gradient is not finite.

        The kernel divides, and looks at `unusable`, so nobody passes over the gradients before it or waits for them.
        """
        self._updates += 1 - sums.unusable
        border = min(max(self._matrices - self._part.start, 0), len(self.parameters))
        for part, decay in ((slice(0, border), self._training.weight_decay), (slice(border, None), 0.0)):
            if not len(self.parameters[part]):
                continue
            torch._fused_adamw_(
                [self.parameters[part]], [sums.own[part]], [self._mean[part]], [self._square[part]], [],
                [self._updates],
                lr=rate, beta1=self._training.betas[0], beta2=self._training.betas[1], weight_decay=decay, eps=EPSILON,
                amsgrad=False, maximize=False, grad_scale=sums.divisor,
                found_inf=sums.unusable,
            )  # fmt: skip

    def refresh(self) -> None:
        """Let every rank's weights follow the parameters of all ranks."""
        self._ranks.join_parts(self.weights, self.parameters)
        if self._ranks.world > 1:
            self._norms.zero_()
            start, stop = max(self._part.start, self._matrices), min(self._part.stop, self._count)
            if start < stop:
                own = self.parameters[start - self._part.start : stop - self._part.start]
                self._norms[start - self._matrices : stop - self._matrices] = own
            self._ranks.sum(self._norms)

    def collect(self) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
        """Return copies in host memory, on the leading rank, of all parameters and of what `load` takes beside them.

        All ranks take part; the names and shapes are the model's, whatever the number of ranks.
        """
        whole = [self._ranks.collect(flat) for flat in (self.parameters, self._mean, self._square)]
        if not self._ranks.leads:
            return {}, {}
        parameters, mean, square = (views(flat, self._model) for flat in whole)
        frozen = {name: p.detach().cpu() for name, p in self._model.named_parameters() if not p.requires_grad}
        moments = {f"mean.{name}": view for name, view in mean.items()}
        moments |= {f"square.{name}": view for name, view in square.items()}
        return {**frozen, **parameters}, {**moments, "updates": self._updates.to("cpu", copy=True)}

    def load(self, parameters: Mapping[str, torch.Tensor], moments: Mapping[str, torch.Tensor]) -> None:
        """Take over this rank's part of what `collect` returned."""
        self._fill(self.parameters, parameters)
        for flat, kind in ((self._mean, "mean"), (self._square, "square")):
            self._fill(flat, {name: moments[f"{kind}.{name}"] for name in trainable(self._model)})
        self._updates.copy_(moments["updates"])
        self.refresh()

    def _fill(self, own: torch.Tensor, named: Mapping[str, torch.Tensor]) -> None:
        """Copy this rank's part of named values, each of a parameter's shape."""
        for name, start, stop in self._places():
            low, high = max(start, self._part.start), min(stop, self._part.stop)
            if low < high:
                own[low - self._part.start : high - self._part.start] = named[name].flatten()[
                    low - start : high - start
                ]

    def _places(self) -> Iterator[tuple[str, int, int]]:
        start = 0
        for name, parameter in trainable(self._model).items():
            yield name, start, start + parameter.numel()
            start += parameter.numel()

    def _views(self) -> dict[str, torch.Tensor]:
        """Return what each of the model's parameters is a view of."""
        parameters = trainable(self._model)
        return {
            name: (self._norms[start - self._matrices : stop - self._matrices] if parameters[name].ndim == 1
                   else self.weights[start:stop]).view(parameters[name].shape)
            for name, start, stop in self._places()
        }  # fmt: skip


def learning_rate(step: int, total: int, training: TrainingConfig) -> float:
    """Return the rate of a step: linear warm-up, then a cosine to zero at the end."""
    warmup = max(1, round(total * training.warmup_fraction))
    if step < warmup:
        return training.learning_rate * (step + 1) / warmup
    progress = (step - warmup) / max(1, total - warmup)
    return training.learning_rate * 0.5 * (1.0 + math.cos(math.pi * progress))
