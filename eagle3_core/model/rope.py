"""Rotary position embedding with the target's own settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from eagle3_core.model.latent_sizes import latent_scales

if TYPE_CHECKING:
    from eagle3_core.model.architecture import DrafterArchitecture


def inverse_frequencies(architecture: DrafterArchitecture) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies [d/2] in float32 and the factor cos and sin are multiplied by.

    d is the head width, with MLA that of its rotated part. Scaled kinds (linear, llama3, yarn) are computed by
    transformers, from the same settings the target has; MLA has its own factor.
    """
    rope, mla = architecture.rope_parameters, architecture.mla
    width = architecture.head_dim if mla is None else mla.qk_rope_head_dim
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, width, 2, dtype=torch.int64).float() / width
        return 1.0 / float(rope["rope_theta"]) ** exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=architecture.num_heads * width,  # not asked, but refused where heads do not divide it
        num_attention_heads=architecture.num_heads,
        head_dim=width,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies.float(), float(factor) if mla is None else latent_scales(rope)[0]
