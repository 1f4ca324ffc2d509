"""One softmax over a document's true history and a chain's own keys: two ways to compute the same.

Letters: N token rows, R chain rows, k own keys per chain, H query heads, d head width. Key and value heads are already
repeated to H.

`dense` writes the scores out and lets autograd do the rest: any device, memory grows with R times document length.
`merged` runs PyTorch's flash kernel over the history and folds the own keys in by the log of the softmax denominator;
its backward pass hands the kernel the denominator of the whole softmax, so that nothing is approximated. CPU only.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Document:
    """One sample inside a packed row: its tokens are `start:end` of N, its chains `first:last` of R."""

    start: int
    end: int
    first: int
    last: int
    bias: torch.Tensor  # float32 [last - first, end - start]: 0 where the slot is not after the chain's own, else -inf


@dataclass(frozen=True, slots=True)
class History:
    """Step-0 keys and values [H, N, d], and which rows belong together."""

    keys: torch.Tensor
    values: torch.Tensor
    documents: Sequence[Document]


def attend(
    queries: torch.Tensor, history: History, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return attention's output [R, H*d].

    Args:
        queries: [H, R, d].
        history: What every chain of a document shares, up to its own slot.
        keys: The chain's own, k times [H, R, d].
        values: The same.
    """
    if queries.device.type == "cpu":
        # Autocast leaves queries and keys, fresh from RoPE, in float32 and values in half precision.
        merged: Callable[..., torch.Tensor] = _Merged.apply
        shared = (queries.float(), history.keys.float(), history.values.float())
        own = [tensor.float() for tensor in (*keys, *values)]
        out = merged(*shared, history.documents, len(keys), *own).to(history.values.dtype)
    else:
        out = dense(queries, history, keys, values)
    return out.transpose(0, 1).flatten(1)


def dense(
    queries: torch.Tensor, history: History, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return [H, R, d] by writing out the scores, document by document."""
    scaled = queries / math.sqrt(queries.shape[-1])
    own = [(scaled * key).sum(-1, keepdim=True) for key in keys]
    outputs = []
    for document in history.documents:
        rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
        block = scaled[:, rows] @ history.keys[:, tokens].transpose(1, 2) + document.bias
        scores = torch.cat([block, *(score[:, rows].to(block.dtype) for score in own)], dim=-1)
        weights = scores.softmax(-1, dtype=torch.float32).to(history.values.dtype)
        length = document.end - document.start
        out = weights[..., :length] @ history.values[:, tokens]
        for index, value in enumerate(values):
            out = out + weights[..., length + index, None] * value[:, rows]
        outputs.append(out)
    return torch.cat(outputs, dim=1)


class _Merged(torch.autograd.Function):
    """See `merged` in the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, documents: Sequence[Document],
        count: int, *own: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out, logs = torch.empty_like(queries), queries.new_empty(queries.shape[:2])
        for document in documents:
            rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
            if document.first == document.last:
                continue
            part, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
                queries[None, :, rows], keys[None, :, tokens], values[None, :, tokens], attn_mask=document.bias
            )
            out[:, rows], logs[:, rows] = part[0], log[0]
        scores = _scores(queries, own[:count])
        whole = torch.cat((logs[None], scores)).logsumexp(0)
        out *= (logs - whole).exp()[..., None]
        for score, value in zip(scores, own[count:], strict=True):
            out.addcmul_((score - whole).exp()[..., None], value)
        ctx.save_for_backward(queries, keys, values, out, whole, *own)
        ctx.documents, ctx.count = documents, count
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = gradients
        queries, keys, values, out, whole, *own = ctx.saved_tensors
        grad = grad.contiguous()
        grad_queries = torch.zeros_like(queries)
        grad_keys, grad_values = torch.zeros_like(keys), torch.zeros_like(values)
        for document in ctx.documents:
            rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
            if document.first == document.last:
                continue
            parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
                grad[None, :, rows], queries[None, :, rows], keys[None, :, tokens], values[None, :, tokens],
                out[None, :, rows], whole[None, :, rows], 0.0, False, attn_mask=document.bias,
            )  # fmt: skip
            grad_queries[:, rows], grad_keys[:, tokens], grad_values[:, tokens] = (part[0] for part in parts)
        own_keys, own_values = own[: ctx.count], own[ctx.count :]
        scale, shared = 1.0 / math.sqrt(queries.shape[-1]), (grad * out).sum(-1)
        grad_own_keys, grad_own_values = [], []
        for score, key, value in zip(_scores(queries, own_keys), own_keys, own_values, strict=True):
            weight = (score - whole).exp()
            of_score = (weight * ((grad * value).sum(-1) - shared) * scale)[..., None]
            grad_queries.addcmul_(of_score, key)
            grad_own_keys.append(of_score * queries)
            grad_own_values.append(weight[..., None] * grad)
        return grad_queries, grad_keys, grad_values, None, None, *grad_own_keys, *grad_own_values


def _scores(queries: torch.Tensor, own_keys: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the scaled scores [k, H, R] of each chain with its own keys."""
    scale = 1.0 / math.sqrt(queries.shape[-1])
    scores = [(queries * key).sum(-1) * scale for key in own_keys]
    return torch.stack(scores) if scores else queries.new_empty((0, *queries.shape[:2]))
