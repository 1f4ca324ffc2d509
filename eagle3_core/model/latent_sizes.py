"""Sizes of a drafter's multi-latent attention (MLA), and the RoPE that SGLang's class gives it.

D width, H heads. Queries are made from a latent of `q_lora_rank`, keys and values from one of `kv_lora_rank`; of a
head's query and key `qk_nope_head_dim` columns are not rotated and `qk_rope_head_dim` are, and that part of the key is
the same for all heads. Words and shapes are those of DeepSeek's configs and of SGLang's DeepseekV2AttentionMLA.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import Field

from eagle3_core.config import Section
from eagle3_core.config.drafter import LATENT_SIZES
from eagle3_core.errors import ConfigError

if TYPE_CHECKING:
    from eagle3_core.config import DrafterConfig

ROPE_KEYS = {
    "default": {"rope_type", "rope_theta"},
    "yarn": {"rope_type", "rope_theta", "factor", "original_max_position_embeddings", "beta_fast", "beta_slow",
             "mscale", "mscale_all_dim"},
}  # fmt: skip
"""The kinds of RoPE that SGLang's class computes, and of their settings those that it reads as transformers does."""


class LatentSizes(Section):
    """What multi-latent attention has instead of key/value heads and one head width."""

    q_lora_rank: int = Field(ge=1)
    kv_lora_rank: int = Field(ge=1)
    qk_nope_head_dim: int = Field(ge=1)
    qk_rope_head_dim: int = Field(ge=2, multiple_of=2)
    v_head_dim: int = Field(ge=1)

    @property
    def head_dim(self) -> int:
        """Return the width of one query or key head."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    def shapes(self, hidden_size: int, num_heads: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of the attention's parameters, by their last names."""
        return {
            "q_a_proj": (self.q_lora_rank, 2 * hidden_size),
            "kv_a_proj_with_mqa": (self.kv_lora_rank + self.qk_rope_head_dim, 2 * hidden_size),
            "q_a_layernorm": (self.q_lora_rank,),
            "kv_a_layernorm": (self.kv_lora_rank,),
            "q_b_proj": (num_heads * self.head_dim, self.q_lora_rank),
            "kv_b_proj": (num_heads * (self.qk_nope_head_dim + self.v_head_dim), self.kv_lora_rank),
            "o_proj": (hidden_size, num_heads * self.v_head_dim),
        }


def attention_shapes(
    hidden_size: int, heads: int, kv_heads: int, head_dim: int, mla: LatentSizes | None
) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the parameters of any attention over [embedding, state], by their last names."""
    if mla is not None:
        return mla.shapes(hidden_size, heads)
    keys = (kv_heads * head_dim, 2 * hidden_size)
    return {"q_proj": (heads * head_dim, 2 * hidden_size), "k_proj": keys, "v_proj": keys,
            "o_proj": (hidden_size, heads * head_dim)}  # fmt: skip


def latent_sizes(text: Mapping[str, Any], wanted: DrafterConfig) -> LatentSizes:
    """Return the sizes: those `wanted`, else the target's.

    Args:
        text: The target's text config.
        wanted: The recipe's section.

    Raises:
        ConfigError: neither has one of them.
    """
    found = {name: getattr(wanted, name) or text.get(name) for name in LATENT_SIZES}
    if missing := [name for name, value in found.items() if not value]:
        none = "" if text.get("kv_lora_rank") else ", which has no MLA"
        raise ConfigError(
            f"drafter.attention mla: expected {', '.join(missing)} of the target or under drafter, found neither "
            f"({text.get('model_type', 'no model_type')}{none}); set {'them' if missing[1:] else 'it'} under drafter, "
            "or attention: mha"
        )
    return LatentSizes.parse(found, "drafter sizes")


def check_latent_rope(rope: Mapping[str, Any]) -> None:
    """Refuse RoPE that SGLang's class would compute as something else: whatever is scaled it takes for YaRN.

    Raises:
        ValueError: names the kind or the setting.
    """
    kind = rope.get("rope_type", "default")
    if kind not in ROPE_KEYS:
        raise ValueError(
            f"with mla: rope type: expected default or yarn, found {kind}: SGLang's MLA drafter takes every scaled "
            "kind for DeepSeek's YaRN; Llama-style drafters (attention: mha) have it"
        )
    if strange := sorted(name for name in set(rope) - ROPE_KEYS[kind] if rope[name] is not None):
        raise ValueError(
            f"with mla: rope settings: expected of {kind} only {', '.join(sorted(ROPE_KEYS[kind]))}, found "
            f"{', '.join(strange)}, which SGLang's MLA drafter does not read; Llama-style drafters (attention: mha) "
            "have them"
        )


def latent_scales(rope: Mapping[str, Any]) -> tuple[float, float]:
    """Return what cos and sin are multiplied by, and what the scores are, beyond one over the root of the head width.

    SGLang 0.5.23: DeepseekScalingRotaryEmbedding and compute_mla_mscale_scaling. It takes an absent `mscale` for 1 and
    an absent `mscale_all_dim` for 0.
    """
    if rope.get("rope_type", "default") == "default":
        return 1.0, 1.0
    whole, dims = rope.get("mscale"), rope.get("mscale_all_dim")
    all_dim = _magnitude(rope, 0.0 if dims is None else float(dims))
    return _magnitude(rope, 1.0 if whole is None else float(whole)) / all_dim, all_dim**2


def _magnitude(rope: Mapping[str, Any], scale: float) -> float:
    return 0.1 * scale * math.log(max(1.0, float(rope["factor"]))) + 1.0
