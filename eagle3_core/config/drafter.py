"""The EAGLE-3 network to be trained."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import Field, model_validator

from eagle3_core.config.base import Section

LATENT_SIZES = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
"""What a drafter with MLA has instead of key/value heads and one head width; the words of DeepSeek's configs."""
PLAIN_SIZES = ("num_kv_heads", "head_dim")


class DrafterConfig(Section):
    """Sizes of the drafter; what is empty is taken from the target."""

    draft_vocab_size: int | None = Field(
        None,
        ge=16,
        description="Tokens the drafter can propose (U), at most the target's; empty: half of them, at most 32,000.",
    )
    intermediate_size: int | None = Field(None, ge=8, description="Width of the MLP; empty: the target's.")
    attention: Literal["mha", "mla"] = Field(
        "mha",
        description="mha: heads as in Llama, which every engine serves. mla: the latent attention of DeepSeek and "
        "Kimi, whose cache is as small as the target's; SGLang serves it by Eagle3DeepseekV2ForCausalLM.",
    )
    num_heads: int | None = Field(
        None,
        ge=1,
        description="Attention heads; empty: the target's, with mha as many as fill its width for MLA targets.",
    )
    num_kv_heads: int | None = Field(None, ge=1, description="Key/value heads, mha alone; empty: the target's.")
    head_dim: int | None = Field(
        None,
        ge=2,
        multiple_of=2,
        description="Width of one attention head, mha alone; empty: the target's, 128 for MLA targets.",
    )
    q_lora_rank: int | None = Field(None, ge=1, description="Width of the queries' latent, mla; empty: the target's.")
    kv_lora_rank: int | None = Field(
        None, ge=1, description="Width of the latent keys and values are made from, mla; empty: the target's."
    )
    qk_nope_head_dim: int | None = Field(
        None, ge=1, description="Part of a head that is not rotated, mla; empty: the target's."
    )
    qk_rope_head_dim: int | None = Field(
        None, ge=2, multiple_of=2, description="Part of a head that is rotated, mla; empty: the target's."
    )
    v_head_dim: int | None = Field(None, ge=1, description="Width of a value head, mla; empty: the target's.")
    train_lm_head: bool = Field(
        True, description="Train the draft-vocabulary head, which starts from the target's rows; false: it stays them."
    )
    min_coverage: float = Field(
        0.95, gt=0, le=1, description="Least share of held-out answer tokens the draft vocabulary must cover."
    )

    @model_validator(mode="after")
    def _sizes_are_of_this_attention(self) -> Self:
        other = PLAIN_SIZES if self.attention == "mla" else LATENT_SIZES
        if found := [f"{name} {getattr(self, name)}" for name in other if getattr(self, name) is not None]:
            raise ValueError(
                f"with attention {self.attention}: expected none of {', '.join(other)}, found {', '.join(found)}; "
                f"remove it, or set attention: {'mha' if self.attention == 'mla' else 'mla'}"
            )
        return self

    def vocab_size(self, target_vocab_size: int) -> int:
        """Return U for a target of so many tokens."""
        return self.draft_vocab_size or min(32000, target_vocab_size // 2)
