"""Rotary position embedding with the target's own settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

if TYPE_CHECKING:
    from eagle3_core.model.architecture import DrafterArchitecture


def inverse_frequencies(architecture: DrafterArchitecture) -> tuple[torch.Tensor, float]:
    """Return inverse frequencies [d/2] in float32 and the factor cos and sin are multiplied by.

    Scaled kinds (linear, llama3, yarn) are computed by transformers, from the same settings the target has.
    """
    rope = architecture.rope_parameters
    if rope["rope_type"] == "default":
        exponents = torch.arange(0, architecture.head_dim, 2, dtype=torch.int64).float() / architecture.head_dim
        return 1.0 / float(rope["rope_theta"]) ** exponents, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        hidden_size=architecture.hidden_size,
        num_attention_heads=architecture.num_heads,
        head_dim=architecture.head_dim,
        max_position_embeddings=architecture.max_position_embeddings,
        rope_parameters=dict(rope),
    )
    frequencies, factor = ROPE_INIT_FUNCTIONS[rope["rope_type"]](config, torch.device("cpu"))
    return frequencies.float(), float(factor)
