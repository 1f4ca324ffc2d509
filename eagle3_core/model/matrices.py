"""The matrices of a drafter in training: what multiplies, and where weight gradients go.

Weights are one flat buffer in the precision of training, gradients one in float32. Weight gradients are summed by the
product that makes them, straight into the buffer: no autograd copy, no add per TTT step. Matrices that lie side by side
are multiplied as one.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn


class Matrices:
    """A model's matrices, [rows, columns] each, as parts of flat buffers in the order of `trainable`."""

    def __init__(self, model: nn.Module, weights: torch.Tensor, gradients: torch.Tensor) -> None:
        """Multiply with the flat `weights`, in their precision; a frozen matrix has a copy and no gradient."""
        self._weights, self._gradients, self.dtype = weights, gradients, weights.dtype
        self._parameters = trainable(model)
        self._offsets: dict[str, int] = {}
        offset = 0
        for name, parameter in self._parameters.items():
            self._offsets[name] = offset
            offset += parameter.numel()
        self._frozen = {
            name: parameter.detach().to(self.dtype)
            for name, parameter in model.named_parameters()
            if not parameter.requires_grad
        }

    def multiply(self, states: torch.Tensor, names: Sequence[str], columns: slice = slice(None)) -> torch.Tensor:
        """Return `states` [N, columns] times the matrices called `names`, [N, sum of rows]."""
        if names[0] in self._frozen:
            return states.to(self.dtype) @ self._frozen[names[0]][:, columns].T
        parameter = self._parameters[names[0]]
        product: Callable[..., torch.Tensor] = _Product.apply
        return product(
            states.to(self.dtype),
            parameter,
            self.weight(names)[:, columns],
            self._of(self._gradients, names)[:, columns],
        )

    def weight(self, names: Sequence[str]) -> torch.Tensor:
        """Return the compute copy of one matrix, or of several side by side."""
        return self._frozen[names[0]] if names[0] in self._frozen else self._of(self._weights, names)

    def gradient(self, name: str) -> torch.Tensor | None:
        """Return where the gradient of a matrix is summed; None where it is frozen."""
        return None if name in self._frozen else self._of(self._gradients, [name])

    def _of(self, flat: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        parts = [self._parameters[name] for name in names]
        start = self._offsets[names[0]]
        size = sum(part.numel() for part in parts)
        last = self._offsets[names[-1]] + parts[-1].numel()
        assert last - start == size, f"{names} do not lie side by side"
        return flat[start:last].view(-1, parts[0].shape[1])


class _Product(torch.autograd.Function):
    """states @ weight.T; the parameter is an argument so that autograd asks for a gradient, which it never sees."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, parameter: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor
    ) -> torch.Tensor:
        del parameter
        ctx.save_for_backward(states)
        ctx.weight, ctx.gradient = weight, gradient
        return states @ weight.T

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = gradients
        (states,) = ctx.saved_tensors
        add_product(ctx.gradient, grad, states)
        return (grad @ ctx.weight if ctx.needs_input_grad[0] else None), None, None, None


def add_product(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor) -> None:
    """Add left.T @ right to the float32 `total` [rows, columns]; `left` [N, rows], `right` [N, columns]."""
    if left.dtype == total.dtype:
        total.addmm_(left.T, right)
    elif total.is_cuda:
        torch.addmm(total, left.T, right, out_dtype=total.dtype, out=total)
    else:
        total += left.T @ right


def trainable(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters by name, matrices first."""
    found = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    return dict(sorted(found, key=lambda pair: pair[1].ndim <= 1))


def views(flat: torch.Tensor, model: nn.Module) -> Mapping[str, torch.Tensor]:
    """Return the part of a flat buffer, padded or not, that belongs to each trainable parameter, in its shape."""
    parameters = trainable(model)
    sizes = [parameter.numel() for parameter in parameters.values()]
    parts = torch.split(flat[: sum(sizes)], sizes)
    return {name: part.view_as(parameter) for (name, parameter), part in zip(parameters.items(), parts, strict=True)}
