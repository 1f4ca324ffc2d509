"""One softmax over a document's true history and a chain's own keys.

Letters: N token rows, R chain rows, k own keys per chain, H query heads, G key and value heads, d width of a query or
key head, e of a value head (d but with MLA).

`merged` runs PyTorch's flash kernel over the history and folds the own keys in by the log of the softmax denominator;
its backward pass hands the kernel the denominator of the whole softmax, so that nothing is approximated. It is the way
of CPUs and GPUs alike, and needs no compiler and no more shared memory than any card has. `dense` writes the scores out
and lets autograd do the rest: the plain reading, and the way of float32 on a GPU, which has no flash kernel.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, pairwise
from typing import Any

import torch

from eagle3_core.model import flash
from eagle3_core.model.pointwise import fused

HALF = (torch.bfloat16, torch.float16)


@dataclass(frozen=True, slots=True)
class Document:
    """One sample inside a packed row: its tokens are `start:end` of N, its chains `first:last` of R."""

    start: int
    end: int
    first: int
    last: int
    bias: torch.Tensor  # float32 [last - first, end - start]: 0 where the slot is not after the chain's own, else -inf


@dataclass(frozen=True, slots=True)
class Asking:
    """The part of each document that asks: from its first chain to its end, Q rows in all.

    A flash kernel aligns the ends of queries and tokens, so the part has to end with its document.
    """

    places: torch.Tensor  # int64 [R], where each chain is among the Q
    bounds: torch.Tensor  # int32 [documents + 1], cumulated lengths of the parts
    count: int  # Q
    longest: int

    @classmethod
    def of(cls, lengths: Sequence[int], chains: Sequence[int], rows: torch.Tensor) -> Asking:
        """Find the parts; a document without a chain keeps its last token."""
        places, bounds, start, first = [], [0], 0, 0
        for length, count in zip(lengths, chains, strict=True):
            skipped = int(rows[first]) - start if count else length - 1
            places.append(rows[first : first + count] - start - skipped + bounds[-1])
            bounds.append(bounds[-1] + length - skipped)
            start, first = start + length, first + count
        longest = max(b - a for a, b in pairwise(bounds))
        return cls(torch.cat(places), torch.tensor(bounds, dtype=torch.int32), bounds[-1], longest)


@dataclass(frozen=True)
class Documents:
    """The samples of a packed row, and where their chains are."""

    lengths: tuple[int, ...]
    chains: tuple[int, ...]  # how many chains each document has
    rows: torch.Tensor  # int64 [R], slots of the chains in the packed row, rising
    bounds: torch.Tensor  # int32 [documents + 1], cumulated lengths
    asking: Asking

    @classmethod
    def of(cls, lengths: Sequence[int], chains: Sequence[int], rows: torch.Tensor) -> Documents:
        """Describe documents of these `lengths` that have so many `chains` each, at `rows`."""
        bounds = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        return cls(tuple(lengths), tuple(chains), rows, bounds, Asking.of(lengths, chains, rows))

    def to(self, device: torch.device) -> Documents:
        """Return the same on a device."""
        asking = self.asking
        moved = Asking(asking.places.to(device), asking.bounds.to(device), asking.count, asking.longest)
        return Documents(self.lengths, self.chains, self.rows.to(device), self.bounds.to(device), moved)

    @cached_property
    def each(self) -> list[Document]:
        """Return them one by one, with their biases."""
        found, start, first = [], 0, 0
        for length, chains in zip(self.lengths, self.chains, strict=True):
            slots = self.rows[first : first + chains] - start
            later = torch.arange(length, device=slots.device)[None, :] > slots[:, None]
            bias = torch.zeros(later.shape, device=slots.device).masked_fill_(later, -math.inf)
            found.append(Document(start, start + length, first, first + chains, bias))
            start, first = start + length, first + chains
        return found


@dataclass(frozen=True, slots=True)
class History:
    """Step-0 keys [N, G, d] and values [N, G, e], and which rows belong together."""

    keys: torch.Tensor
    values: torch.Tensor
    documents: Documents


def attend(
    queries: torch.Tensor, history: History, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return attention's output [R, H*e].

    Args:
        queries: [R, H, d].
        history: What every chain of a document shares, up to its own slot.
        keys: The chain's own, k times [R, G, d].
        values: The same, [R, G, e].
    """
    if queries.is_cuda and queries.dtype not in HALF:
        return dense(queries, history, keys, values).flatten(1)
    merged: Callable[..., torch.Tensor] = _Merged.apply
    return merged(queries, history.keys, history.values, history.documents, len(keys), *keys, *values).flatten(1)


def dense(
    queries: torch.Tensor, history: History, keys: Sequence[torch.Tensor], values: Sequence[torch.Tensor]
) -> torch.Tensor:
    """Return [R, H, e] by writing out the scores, document by document."""
    groups = queries.shape[1] // history.keys.shape[1]
    scaled = queries.transpose(0, 1) / math.sqrt(queries.shape[-1])
    shared_keys, shared_values = (flash.by_head(tensor, groups) for tensor in (history.keys, history.values))
    own_keys, own_values = ([flash.by_head(tensor, groups) for tensor in own] for own in (keys, values))
    own = [(scaled * key).sum(-1, keepdim=True) for key in own_keys]
    outputs = []
    for document in history.documents.each:
        rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
        block = scaled[:, rows] @ shared_keys[:, tokens].transpose(1, 2) + document.bias
        weights = torch.cat([block, *(score[:, rows] for score in own)], dim=-1).softmax(-1, dtype=torch.float32)
        length = document.end - document.start
        out = weights[..., :length] @ shared_values[:, tokens]
        for index, value in enumerate(own_values):
            out = out + weights[..., length + index, None] * value[:, rows]
        outputs.append(out)
    return torch.cat(outputs, dim=1).transpose(0, 1).to(queries.dtype)


class _Merged(torch.autograd.Function):
    """See `merged` in the module's docstring."""

    @staticmethod
    def forward(
        ctx: Any, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, documents: Documents, count: int,
        *own: torch.Tensor,
    ) -> torch.Tensor:  # fmt: skip
        out, logs = flash.forward(queries, keys, values, documents)
        if count:
            out, logs = fold(queries, torch.stack(own[:count], 1), torch.stack(own[count:], 1), out, logs)
        ctx.save_for_backward(queries, keys, values, out, logs, *own)
        ctx.documents, ctx.count = documents, count
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        (grad,) = gradients
        queries, keys, values, out, logs, *own = ctx.saved_tensors
        grad = grad.contiguous()
        of_queries, of_keys, of_values = flash.backward(grad, queries, keys, values, out, logs, ctx.documents)
        of_own: list[torch.Tensor] = []
        if ctx.count:
            own_keys, own_values = torch.stack(own[: ctx.count], 1), torch.stack(own[ctx.count :], 1)
            of_queries, first, second = unfold(queries, own_keys, own_values, out, logs, grad, of_queries)
            of_own = [*first.unbind(1), *second.unbind(1)]
        return of_queries, of_keys, of_values, None, None, *of_own


@fused(1, 2, 2, 1, 1)
def fold(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, logs: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Add own keys [R, k, G, d] and values [R, k, G, e] to a softmax of output [R, H, e] and log denominator [R, H]."""
    scores = _scores(queries, keys)
    whole = torch.cat((logs[:, None], scores), dim=1).logsumexp(1)
    grouped = (scores - whole[:, None]).exp().unflatten(2, (values.shape[2], -1))[..., None]
    added = (grouped * values.float()[:, :, :, None]).sum(1).flatten(1, 2)
    return (out.float() * (logs - whole).exp()[..., None] + added).to(out.dtype), whole


@fused(1, 2, 2, 1, 1, 1, 1)
def unfold(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor, logs: torch.Tensor,
    grad: torch.Tensor, of_queries: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:  # fmt: skip
    """Return the gradients of queries [R, H, d], own keys and own values [R, k, G, d] of the whole softmax.

    Args:
        queries: [R, H, d].
        keys: The chains' own.
        values: The same.
        out: Output of the whole softmax, [R, H, e].
        logs: Its log denominator, [R, H].
        grad: Gradient of `out`.
        of_queries: The part of the queries' gradient that the history gave.
    """
    groups = (keys.shape[2], -1)
    asked, arrived = (tensor.float().unflatten(1, groups)[:, None] for tensor in (queries, grad))
    weights = (_scores(queries, keys) - logs[:, None]).exp().unflatten(2, groups)
    shared = (arrived * out.float().unflatten(1, groups)[:, None]).sum(-1)
    of_scores = weights * ((arrived * values.float()[:, :, :, None]).sum(-1) - shared) / math.sqrt(queries.shape[-1])
    added = (of_scores[..., None] * keys.float()[:, :, :, None]).sum(1).flatten(1, 2)
    of_keys = (of_scores[..., None] * asked).sum(3).to(keys.dtype)
    of_values = (weights[..., None] * arrived).sum(3).to(values.dtype)
    return (of_queries.float() + added).to(queries.dtype), of_keys, of_values


def _scores(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """Return the scaled scores [R, k, H] of each chain with its own keys [R, k, G, d], in float32."""
    grouped = queries.float().unflatten(1, (keys.shape[2], -1))[:, None]
    scores: torch.Tensor = (grouped * keys.float()[:, :, :, None]).sum(-1) / math.sqrt(queries.shape[-1])
    return scores.flatten(2)
