"""The reference's RoPE equals transformers' own functions, and what the trainer takes from them, for every kind."""

import pytest
import torch

from eagle3_core.errors import ParityError
from eagle3_core.evaluate.rotations import latent_rotations, latent_scale, rotations
from eagle3_core.export.rope import write_rope

WIDTH, LONGEST = 32, 4096
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 1024}
KINDS = {
    "default": {"rope_type": "default"},
    "linear": {"rope_type": "linear", "factor": 8.0},
    "llama3": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 512},
    "yarn": YARN,
    "yarn, untruncated": {**YARN, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False},
    "yarn, scaled": {**YARN, "factor": 40.0, "mscale": 1.0, "mscale_all_dim": 0.8},
    "yarn, other bounds": {**YARN, "beta_fast": 16, "beta_slow": 2},
    "yarn, told length": {**YARN, "attention_factor": 1.3},
    "yarn, old context not told": {"rope_type": "yarn", "factor": 2.0},
    "yarn, steep": {**YARN, "original_max_position_embeddings": 8},
}  # fmt: skip


def transformers_own(rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

    config = LlamaConfig(hidden_size=2 * WIDTH, num_attention_heads=2, head_dim=WIDTH, rope_parameters=dict(rope),
                         max_position_embeddings=LONGEST)  # fmt: skip
    positions = torch.arange(LONGEST)
    cos, sin = LlamaRotaryEmbedding(config)(torch.zeros(1), positions[None])
    return cos[0, :, : WIDTH // 2], sin[0, :, : WIDTH // 2]


@pytest.mark.parametrize("theta", [10000.0, 5e6])
@pytest.mark.parametrize("kind", list(KINDS))
def test_each_kind_turns_as_transformers_turns_it(kind, theta):
    rope = {**KINDS[kind], "rope_theta": theta}
    # As it is exported: SGLang has another word for attention_factor.
    config = {**write_rope(rope), "max_position_embeddings": LONGEST}
    for spelled in (config, {**config, "rope_parameters": None}):
        ours = rotations(spelled, torch.arange(LONGEST), WIDTH)
        for found, wanted in zip(ours, transformers_own(rope), strict=True):
            # float32 angles at position 4095 are exact to 2e-4.
            torch.testing.assert_close(found, wanted, atol=1e-3, rtol=0)


def test_another_kind_or_a_missing_number_is_an_error_not_a_guess():
    positions = torch.arange(4)
    with pytest.raises(ParityError, match="rope type 'longrope'"):
        rotations({"rope_parameters": {"rope_type": "longrope"}, "max_position_embeddings": 8}, positions, WIDTH)
    with pytest.raises(ParityError, match="expected the key 'factor'"):
        rotations({"rope_parameters": {"rope_type": "yarn"}, "max_position_embeddings": 8}, positions, WIDTH)


@pytest.mark.parametrize("kind", ["default", "yarn", "yarn, scaled", "yarn, other bounds", "yarn, steep"])
def test_each_kind_that_drafters_with_mla_have_turns_and_scales_as_in_transformers(kind):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope = {**KINDS[kind], "rope_theta": 10000.0}
    theirs = DeepseekV3Config(hidden_size=64, num_attention_heads=2, qk_rope_head_dim=WIDTH, q_lora_rank=8,
                              kv_lora_rank=8, max_position_embeddings=LONGEST, rope_parameters=dict(rope))  # fmt: skip
    config, positions = {**write_rope(rope), "max_position_embeddings": LONGEST}, torch.arange(LONGEST)
    wanted = DeepseekV3RotaryEmbedding(theirs)(torch.zeros(1), positions[None])
    for found, whole in zip(latent_rotations(config, positions, WIDTH), wanted, strict=True):
        torch.testing.assert_close(found, whole[0, :, : WIDTH // 2], atol=1e-3, rtol=0)
    width = theirs.qk_nope_head_dim + WIDTH
    assert latent_scale(config) * width**-0.5 == pytest.approx(DeepseekV3Attention(theirs, 0).scaling)


def test_rope_that_the_class_with_mla_would_take_for_yarn_is_refused():
    for rope in (KINDS["llama3"], KINDS["linear"], KINDS["yarn, old context not told"]):
        with pytest.raises(ParityError, match="export again"):
            latent_rotations({"rope_parameters": {**rope, "rope_theta": 1e4}}, torch.arange(4), WIDTH)
