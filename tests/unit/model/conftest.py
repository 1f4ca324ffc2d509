from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.drafter import Eagle3Drafter


@dataclass(frozen=True)
class Packed:
    lengths: tuple[int, ...]
    input_ids: torch.Tensor
    loss_mask: torch.Tensor
    aux: torch.Tensor
    last: torch.Tensor


MHA = {"num_kv_heads": 2, "head_dim": 8}
MLA = {
    "num_kv_heads": 4, "head_dim": 10,
    "mla": {"q_lora_rank": 12, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7},
}  # fmt: skip


@pytest.fixture(params=[MHA, MLA], ids=["mha", "mla"])
def sizes(request: pytest.FixtureRequest) -> DrafterArchitecture:
    return DrafterArchitecture(
        hidden_size=32, intermediate_size=48, num_heads=4, **request.param, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=128, vocab_size=50,
        draft_vocab_size=20, aux_layers=(0, 1, 3), target_sha256="0" * 64, target_class="LlamaForCausalLM",
    )  # fmt: skip


@pytest.fixture
def head(sizes: DrafterArchitecture) -> torch.Tensor:
    rows = torch.randn(sizes.vocab_size, sizes.hidden_size, generator=torch.Generator().manual_seed(1))
    return rows / sizes.hidden_size**0.5


@pytest.fixture
def draft_to_target(sizes: DrafterArchitecture) -> torch.Tensor:
    order = torch.randperm(sizes.vocab_size, generator=torch.Generator().manual_seed(2))
    return order[: sizes.draft_vocab_size].sort().values


@pytest.fixture
def drafter(sizes: DrafterArchitecture, head: torch.Tensor, draft_to_target: torch.Tensor) -> Eagle3Drafter:
    drafter = Eagle3Drafter(sizes, torch.randn(sizes.vocab_size, sizes.hidden_size))
    drafter.start_from_target(head[draft_to_target], torch.rand(sizes.hidden_size) + 0.5, seed=3)
    with torch.no_grad():
        for name, parameter in drafter.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            elif name != "lm_head.weight":
                parameter.normal_(0, 0.2)
    return drafter


@pytest.fixture
def packed(sizes: DrafterArchitecture) -> Packed:
    """Four documents: prompt and answer, two turns, no answer at all, one shorter than the unroll."""
    lengths = (13, 17, 6, 5)
    mask = torch.zeros(sum(lengths), dtype=torch.bool)
    mask[4:13] = True
    mask[13 + 3 : 13 + 7] = True
    mask[13 + 10 : 13 + 17] = True
    mask[36 + 1 :] = True
    generator = torch.Generator().manual_seed(5)
    total, D = sum(lengths), sizes.hidden_size
    return Packed(
        lengths,
        torch.randint(0, sizes.vocab_size, (total,), generator=generator),
        mask,
        torch.randn(total, 3 * D, generator=generator),
        torch.randn(total, D, generator=generator),
    )
