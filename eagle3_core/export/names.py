"""Canonical names of a drafter's parameters: those of our own checkpoints."""

from __future__ import annotations

LAYER = "layer."
ATTENTION = f"{LAYER}self_attn."
PLAIN = tuple(f"{ATTENTION}{tail}.weight" for tail in ("q_proj", "k_proj", "v_proj"))
"""What only heads as in Llama have."""
LATENT = tuple(
    f"{ATTENTION}{tail}.weight"
    for tail in ("q_a_proj", "kv_a_proj_with_mqa", "q_a_layernorm", "kv_a_layernorm", "q_b_proj", "kv_b_proj")
)
"""What only multi-latent attention has; `kv_a_proj_with_mqa` gives it away."""
HEAD, EMBEDDING, INPUT_NORM = "lm_head.weight", "embed_tokens.weight", "input_norm.weight"
MAPS = ("d2t", "t2d")
_SHARED = (
    "fc.weight", f"{ATTENTION}o_proj.weight",
    *(
        f"{LAYER}{tail}.weight"
        for tail in (
            "input_layernorm", "hidden_norm", "post_attention_layernorm", "mlp.gate_proj", "mlp.up_proj",
            "mlp.down_proj",
        )
    ),
    "norm.weight",
)  # fmt: skip
MAX_AUX = 16
FC_NORMS = tuple(f"fc_norm.{index}.weight" for index in range(MAX_AUX))
OLDER = {f"aux_norm_{place}.weight": FC_NORMS[index] for index, place in enumerate(("low", "mid", "high"))}
"""Names that only older files hold."""


def required(*, mla: bool) -> tuple[str, ...]:
    """Return what every drafter with this attention has."""
    return (*_SHARED, *(LATENT if mla else PLAIN))


def canonical(*, mla: bool) -> tuple[str, ...]:
    """Return all names there are; what beyond `required` must be there, sizes and config decide."""
    return (*required(mla=mla), HEAD, *MAPS, EMBEDDING, INPUT_NORM, *FC_NORMS)
