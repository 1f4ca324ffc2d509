"""The two kinds of attention: how queries, keys and values are made. Who attends to whom is the unroll's business.

Letters: N token rows, D width, H query heads, G key/value heads, d width of a query or key head, e of a value head, r
of a head's rotated part. With MLA G is H.

Both begin with products over [embedding, carried state] that lie side by side; their parts of the embedding are the
same at every TTT step and computed once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from eagle3_core.model.latent_sizes import LatentSizes, latent_scales
from eagle3_core.model.pointwise import join_keys, rms_norm, turn, turn_tail

if TYPE_CHECKING:
    from eagle3_core.model.architecture import DrafterArchitecture

Rope = tuple[torch.Tensor, torch.Tensor]
Tensors = Mapping[str, torch.Tensor]


class Multiply(Protocol):
    """`Eagle3Drafter.multiply`."""

    def __call__(self, states: torch.Tensor, names: Sequence[str]) -> torch.Tensor:
        """Return states [N, columns] times the named matrices side by side, [N, sum of rows]."""


class RmsNorm(nn.Module):
    """RMS norm, computed in float32 whatever the precision around it."""

    def __init__(self, width: int, eps: float) -> None:
        """Start as the plain norm."""
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        """Return `states` [..., width], normed, in its own dtype."""
        return rms_norm(states, self.weight, self._eps)


class Attention(nn.Module):
    """Heads as in Llama: q, k and v from the first products, rotated whole."""

    def __init__(self, sizes: DrafterArchitecture) -> None:
        """Allocate q, k, v over [embedding, carried state] and o."""
        super().__init__()
        D, self._width = sizes.hidden_size, sizes.head_dim
        self.q_proj = nn.Linear(2 * D, sizes.num_heads * self._width, bias=False)
        self.k_proj = nn.Linear(2 * D, sizes.num_kv_heads * self._width, bias=False)
        self.v_proj = nn.Linear(2 * D, sizes.num_kv_heads * self._width, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * self._width, D, bias=False)

    def first(self, wanted: str) -> dict[str, str]:
        """Return the first products that "q", "kv" or "qkv" need: a letter and its matrix."""
        return {letter: f"{letter}_proj" for letter in wanted}

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        """Return cos and signed sin [N, d] of angles whose cos and sin are [N, d/2]: halves are paired."""
        return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)

    def heads(self, read: Tensors, own: Tensors, rope: Rope, multiply: Multiply) -> dict[str, torch.Tensor]:
        """Return the heads of each first product in `own`; see `Eagle3Drafter.heads`."""
        del multiply
        return {
            letter: (read[letter] + part).unflatten(-1, (-1, self._width))
            if letter == "v"
            else turn(read[letter], part, *rope, part.shape[-1] // self._width)
            for letter, part in own.items()
        }


class LatentAttention(nn.Module):
    """MLA, written out: every head has a key and a value made from a latent, and the rotated part of the key is shared.

    Engines keep the latent in their cache and put its matrices elsewhere; the numbers are these.
    """

    def __init__(self, sizes: DrafterArchitecture, mla: LatentSizes) -> None:
        """Allocate all projections and the two norms of the latents."""
        super().__init__()
        D, self._mla, self._heads = sizes.hidden_size, mla, sizes.num_heads
        self._scale = latent_scales(sizes.rope_parameters)[1]
        self.q_a_layernorm = RmsNorm(mla.q_lora_rank, sizes.rms_norm_eps)
        self.kv_a_layernorm = RmsNorm(mla.kv_lora_rank, sizes.rms_norm_eps)
        for name, shape in mla.shapes(D, sizes.num_heads).items():
            if len(shape) > 1:
                self.add_module(name, nn.Linear(shape[1], shape[0], bias=False))

    def first(self, wanted: str) -> dict[str, str]:
        """Return the first products that "q", "kv" or "qkv" need: q and c, what keys and values are made from."""
        return {
            letter: matrix
            for letter, matrix, sign in (("q", "q_a_proj", "q"), ("c", "kv_a_proj_with_mqa", "k"))
            if sign in wanted
        }

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Rope:
        """Return cos and signed sin [N, r] of angles whose cos and sin are [N, r/2]: neighbours are paired."""
        return cos.repeat_interleave(2, dim=-1), torch.stack((-sin, sin), dim=-1).flatten(-2)

    def heads(self, read: Tensors, own: Tensors, rope: Rope, multiply: Multiply) -> dict[str, torch.Tensor]:
        """Return q [N, H, d], or k [N, H, d] and v [N, H, e], of the first products in `own`."""
        found: dict[str, torch.Tensor] = {}
        if "q" in own:
            latent = self.q_a_layernorm(read["q"] + own["q"])
            heads = multiply(latent, ["layer.self_attn.q_b_proj.weight"]).unflatten(-1, (self._heads, -1))
            # Attention divides by the root of d; YaRN's further scale comes in here.
            found["q"] = turn_tail(heads, *rope, self._scale)
        if "c" in own:
            latent, shared = (read["c"] + own["c"]).split([self._mla.kv_lora_rank, self._mla.qk_rope_head_dim], dim=-1)
            made = multiply(self.kv_a_layernorm(latent), ["layer.self_attn.kv_b_proj.weight"])
            keys, values = made.unflatten(-1, (self._heads, -1)).split(
                [self._mla.qk_nope_head_dim, self._mla.v_head_dim], dim=-1
            )
            found |= {"k": join_keys(keys, shared, *rope), "v": values}
        return found
