"""How hidden states are stored: precision, 8-bit floats with a scale per token and layer, which rows. Light.

N tokens, M of them label rows, A aux layers, D target width.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Literal

from eagle3_core.config.base import Section
from eagle3_core.storage.tensors import DTYPE_BITS, KINDS

if TYPE_CHECKING:
    import torch

_FP8_MAX = 448.0


class Encoding(Section):
    """What decides the bytes of a shard beside its samples."""

    dtype: Literal["float32", "bfloat16", "float16"]
    fp8: Literal["none", "aux", "all"]
    last_rows: Literal["labels", "all"]
    num_aux: int
    hidden_size: int

    def layout(self, tokens: int, label_rows: int) -> dict[str, tuple[str, tuple[int, ...]]]:
        """Return every tensor of a shard.

        `aux_hidden_states [N, A*D]`, `last_hidden_state [M, D]` (after the target's final norm; N rows where all are
        kept), `input_ids [N]` int32, `loss_mask [N]` uint8; for states in 8 bits also `aux_scales [N, A]` and
        `last_scales [M, 1]`, with which they are to be multiplied.
        """
        rows, kind = (tokens if self.last_rows == "all" else label_rows), KINDS[self.dtype]
        aux, last = ("F8_E4M3" if self.fp8 in fp8 else kind for fp8 in (("aux", "all"), ("all",)))
        found: dict[str, tuple[str, tuple[int, ...]]] = {
            "aux_hidden_states": (aux, (tokens, self.num_aux * self.hidden_size)),
            "last_hidden_state": (last, (rows, self.hidden_size)),
            "input_ids": ("I32", (tokens,)),
            "loss_mask": ("U8", (tokens,)),
        }
        if aux == "F8_E4M3":
            found["aux_scales"] = ("F32", (tokens, self.num_aux))
        if last == "F8_E4M3":
            found["last_scales"] = ("F32", (rows, 1))
        return found

    def bytes(self, tokens: int, label_rows: int) -> int:
        """Return what the tensors of `layout` take."""
        layout = self.layout(tokens, label_rows).values()
        return sum(math.prod(shape) * DTYPE_BITS[kind] // 8 for kind, shape in layout)

    def rows(self, length: int, label_rows: int) -> dict[str, int]:
        """Return how many rows of every tensor one sample has."""
        return {name: shape[0] for name, (_, shape) in self.layout(length, label_rows).items()}


def bytes_of(values: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor on the CPU, without a copy where it is contiguous."""
    import torch

    array: Any = values.contiguous().view(torch.uint8).numpy().reshape(-1)
    return memoryview(array)


def label_rows(loss_mask: torch.Tensor) -> torch.Tensor:
    """Return the slots [M] of one sample whose last hidden state a loss can read; `loss_mask` is bool [T].

    The chain at slot t reads answer token t+1 first, and its label at step k is what the target says at slot t+1+k,
    where token t+1+k is an answer token and a next one exists (`model.unroll.Chains`).
    """
    rows = loss_mask.nonzero().flatten()
    return rows[(rows >= 1) & (rows <= len(loss_mask) - 2)]


def num_label_rows(length: int, supervised: int) -> int:
    """Return how many `label_rows` there are when the last `supervised` of `length` tokens are the answer."""
    return max(min(supervised - 1, length - 2), 0)


def quantise(states: torch.Tensor, layers: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return states [T, layers * D] as float8 e4m3, and the float32 scales [T, layers] that undo it."""
    import torch

    parts = states.float().unflatten(-1, (layers, -1))
    # A scale below the least normal float has too few digits: the values would not fit it. Of zeros any will do.
    scales = (parts.abs().amax(-1, keepdim=True) / _FP8_MAX).clamp_min(torch.finfo(torch.float32).tiny)
    return (parts / scales).flatten(-2).to(torch.float8_e4m3fn), scales.squeeze(-1)


def dequantise(stored: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Return the float32 states [T, layers * D] of `quantise`, the same on a CPU and on a GPU; NaN where a scale is."""
    import torch

    if stored.is_cuda:
        # One of its instructions.
        small, factor = stored.float(), scales
    else:
        # e4m3's bits, moved up, are a float16 of 1/256 of the value, NaN aside; PyTorch's conversion is half as fast.
        bits = stored.view(torch.uint8).to(torch.int16)
        small = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).view(torch.float16).float()
        factor = 256 * scales
    parts: torch.Tensor = small.unflatten(-1, (scales.shape[-1], -1)).mul_(factor[..., None])
    return parts.flatten(-2)
