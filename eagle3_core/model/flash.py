"""PyTorch's flash kernels over packed documents: every chain over its document's tokens up to its own slot.

Letters: N token rows, R chain rows, H query heads, G key and value heads, d width of a query or key head, e of a value
head. Both directions take the log of a softmax denominator from outside, which is how the chains' own keys come in (see
`attention`). The kernels know one head width: where d and e differ (MLA), the narrower heads get columns of zeros.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch.nn import functional

if TYPE_CHECKING:
    from eagle3_core.model.attention import Documents

Triple = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def forward(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, documents: Documents
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return output [R, H, e] in the queries' dtype and log denominators [R, H] in float32.

    Args:
        queries: [R, H, d]; half precision on a GPU.
        keys: [N, G, d].
        values: [N, G, e].
        documents: Which rows belong together.
    """
    scale, width = queries.shape[-1] ** -0.5, values.shape[-1]
    queries, keys, values = _of_one_width(queries, keys, values)
    if not queries.is_cuda:
        out, logs = _cpu_forward(queries, keys, values, documents, scale)
        return out[..., :width], logs
    asking, longest = documents.asking, max(documents.lengths)
    out, logs, *_ = torch.ops.aten._flash_attention_forward(
        _place(queries, documents), keys, values, asking.bounds, documents.bounds, asking.longest, longest, 0.0, True,
        False, scale=scale,
    )  # fmt: skip
    return out.index_select(0, asking.places)[..., :width], logs.index_select(1, asking.places).T.contiguous()


def backward(
    grad: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor,
    logs: torch.Tensor, documents: Documents,
) -> Triple:  # fmt: skip
    """Return the gradients of queries, keys and values; `grad` and `out` [R, H, e], `logs` [R, H] as in `forward`."""
    scale, wide, narrow = queries.shape[-1] ** -0.5, queries.shape[-1], values.shape[-1]
    grad, queries, keys, values, out = _of_one_width(grad, queries, keys, values, out)
    run = _gpu_backward if queries.is_cuda else _cpu_backward
    of_queries, of_keys, of_values = run(grad, queries, keys, values, out, logs, documents, scale)
    return of_queries[..., :wide], of_keys[..., :wide], of_values[..., :narrow]


def _of_one_width(*heads: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Append columns of zeros to the narrower ones."""
    width = max(tensor.shape[-1] for tensor in heads)
    return tuple(
        tensor if tensor.shape[-1] == width else functional.pad(tensor, (0, width - tensor.shape[-1]))
        for tensor in heads
    )


def _gpu_backward(
    grad: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor,
    logs: torch.Tensor, documents: Documents, scale: float,
) -> Triple:  # fmt: skip
    asking, longest = documents.asking, max(documents.lengths)
    # A row without a chain has query 0, gradient 0 and denominator 1: it adds nothing.
    denominators = _place(logs, documents).T.contiguous()
    unused = torch.zeros((), dtype=torch.int64, device=grad.device)
    of_queries, of_keys, of_values = torch.ops.aten._flash_attention_backward(
        _place(grad, documents), _place(queries, documents), keys, values, _place(out, documents), denominators,
        asking.bounds, documents.bounds, asking.longest, longest, 0.0, True, unused, unused, scale=scale,
    )  # fmt: skip
    return of_queries.index_select(0, asking.places), of_keys, of_values


def _place(chains: torch.Tensor, documents: Documents) -> torch.Tensor:
    """Put the rows of chains [R, ...] where they are among all that ask, [Q, ...]."""
    asking = documents.asking
    return chains.new_zeros((asking.count, *chains.shape[1:])).index_copy_(0, asking.places, chains)


def _cpu_forward(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, documents: Documents, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    queries_h, groups = queries.float().transpose(0, 1), queries.shape[1] // keys.shape[1]
    keys, values = (by_head(tensor.float(), groups) for tensor in (keys, values))
    out, logs = torch.empty_like(queries_h), queries_h.new_empty(queries_h.shape[:2])
    for document in documents.each:
        rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
        if document.first == document.last:
            continue
        part, log = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            queries_h[None, :, rows], keys[None, :, tokens], values[None, :, tokens], attn_mask=document.bias,
            scale=scale,
        )  # fmt: skip
        out[:, rows], logs[:, rows] = part[0], log[0]
    return out.transpose(0, 1).to(queries.dtype), logs.T.contiguous()


def _cpu_backward(
    grad: torch.Tensor, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, out: torch.Tensor,
    logs: torch.Tensor, documents: Documents, scale: float,
) -> Triple:  # fmt: skip
    groups, shape = queries.shape[1] // keys.shape[1], keys.shape
    grad_h, queries_h, out_h = (tensor.float().transpose(0, 1) for tensor in (grad, queries, out))
    keys_h, values_h, logs_h = by_head(keys.float(), groups), by_head(values.float(), groups), logs.T
    of_queries, of_keys, of_values = (torch.zeros_like(tensor) for tensor in (queries_h, keys_h, values_h))
    for document in documents.each:
        rows, tokens = slice(document.first, document.last), slice(document.start, document.end)
        if document.first == document.last:
            continue
        parts = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            grad_h[None, :, rows], queries_h[None, :, rows], keys_h[None, :, tokens], values_h[None, :, tokens],
            out_h[None, :, rows], logs_h[None, :, rows], 0.0, False, attn_mask=document.bias,
            scale=scale,
        )  # fmt: skip
        of_queries[:, rows], of_keys[:, tokens], of_values[:, tokens] = (part[0] for part in parts)
    of_keys, of_values = (
        tensor.transpose(0, 1).reshape(shape[0], shape[1], groups, shape[2]).sum(2).to(keys.dtype)
        for tensor in (of_keys, of_values)
    )
    return of_queries.transpose(0, 1).to(queries.dtype), of_keys, of_values


def by_head(heads: torch.Tensor, groups: int) -> torch.Tensor:
    """Let every query head have its own copy of the key or value head it shares: [N, G, d] to [H, N, d]."""
    return heads.repeat_interleave(groups, dim=1).transpose(0, 1)
