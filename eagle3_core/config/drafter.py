"""The EAGLE-3 network to be trained."""

from __future__ import annotations

from pydantic import Field

from eagle3_core.config.base import Section


class DrafterConfig(Section):
    """Sizes of the drafter; what is empty is taken from the target."""

    draft_vocab_size: int | None = Field(
        None,
        ge=16,
        description="Tokens the drafter can propose (U), at most the target's; empty: half of them, at most 32,000.",
    )
    intermediate_size: int | None = Field(None, ge=8, description="Width of the MLP; empty: the target's.")
    num_heads: int | None = Field(
        None,
        ge=1,
        description="Attention heads; empty: the target's, as many as fill its width for MLA targets.",
    )
    num_kv_heads: int | None = Field(None, ge=1, description="Key/value heads; empty: the target's.")
    head_dim: int | None = Field(
        None, ge=2, multiple_of=2, description="Width of one attention head; empty: the target's, 128 for MLA targets."
    )
    train_lm_head: bool = Field(True, description="Train the draft-vocabulary head; it starts from the target's rows.")
    min_coverage: float = Field(
        0.95, gt=0, le=1, description="Least share of held-out answer tokens the draft vocabulary must cover."
    )

    def vocab_size(self, target_vocab_size: int) -> int:
        """Return U for a target of so many tokens."""
        return self.draft_vocab_size or min(32000, target_vocab_size // 2)
