from __future__ import annotations

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.config import DrafterConfig
from eagle3_core.errors import ConfigError, TargetError
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.target_weights import read_target_weights

CONFIG = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "intermediate_size": 12,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64, "vocab_size": 10,
    "rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 4.0}, "rms_norm_eps": 1e-6,
}  # fmt: skip


def derive(config=CONFIG, **wanted):
    return DrafterArchitecture.for_target(config, DrafterConfig(draft_vocab_size=16, **wanted), aux_layers=(1, 2, 3),
                                          draft_vocab_size=6, target_sha256="0" * 64)  # fmt: skip


def write(directory, config, tensors):
    (directory / "config.json").write_text(json.dumps(config))
    save_file(tensors, directory / "model.safetensors")
    return directory


def test_what_the_recipe_leaves_open_is_the_targets():
    sizes = derive()
    assert (sizes.intermediate_size, sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (12, 4, 2, 2)
    assert sizes.rope_parameters == {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e5}
    assert derive(intermediate_size=20, num_kv_heads=1).parameter_shapes()["layer.mlp.up_proj.weight"] == (20, 8)


def test_sizes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="num_kv_heads too"):
        derive(num_heads=3)
    with pytest.raises(ConfigError, match=r"RoPE type: expected default .*, found longrope"):
        derive({**CONFIG, "rope_scaling": {"rope_type": "longrope"}})


@pytest.mark.parametrize("setting", [
    {"final_logit_softcapping": 30.0}, {"logits_scaling": 8.0}, {"model_type": "gemma3n_text"},
    {"model_type": "gemma3_text", "final_logit_softcapping": 30.0},
])  # fmt: skip
def test_targets_whose_logits_are_not_head_times_state_are_refused(setting):
    with pytest.raises(TargetError, match="not supported yet"):
        derive({**CONFIG, **setting})


@pytest.mark.parametrize("architectures", [None, []])
def test_a_target_without_its_class_is_refused_before_training_not_at_export(architectures):
    with pytest.raises(TargetError, match="architectures"):
        derive({**CONFIG, "architectures": architectures})


def test_mrope_for_text_is_plain_rope():
    sizes = derive({**CONFIG, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}})
    assert sizes.rope_parameters == {"rope_type": "default", "rope_theta": 5e5}


def test_the_drafter_of_an_mla_target_has_whole_heads_of_the_usual_width():
    mla = {**CONFIG, "hidden_size": 7168, "num_attention_heads": 64, "num_key_value_heads": 64, "kv_lora_rank": 512,
           "head_dim": 64}  # fmt: skip
    sizes = derive(mla)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (56, 56, 128)
    sizes = derive(mla, num_heads=64, num_kv_heads=8)
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim) == (64, 8, 128)


def test_heads_can_be_wider_than_the_targets():
    assert derive(head_dim=6).head_dim == 6


def test_the_drafter_of_a_target_that_rotates_half_of_each_head_rotates_all_of_it():
    rope = {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5}
    assert derive({**CONFIG, "rope_parameters": rope}).rope_parameters == {"rope_type": "default", "rope_theta": 1e6}


GEMMA = {**CONFIG, "architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text", "tie_word_embeddings": True}


def test_where_layers_rotate_differently_the_drafter_rotates_as_those_that_see_everything():
    kinds = {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
             "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6}}  # fmt: skip
    assert derive({**GEMMA, "rope_parameters": kinds}).rope_parameters == kinds["full_attention"]


def test_the_final_norm_of_gemma_3_multiplies_by_one_more_than_is_stored(tmp_path):
    embedding, norm = torch.randn(10, 8), torch.randn(8)
    found = read_target_weights(write(tmp_path, GEMMA, {"model.embed_tokens.weight": embedding,
                                                        "model.norm.weight": norm}))  # fmt: skip
    assert torch.equal(found.final_norm, norm + 1)
    assert torch.equal(found.embedding, embedding)


def test_weights_are_found_under_prefixes_and_tied_heads_are_the_embedding(tmp_path):
    embedding, norm = torch.randn(10, 8), torch.randn(8)
    tensors = {"model.language_model.embed_tokens.weight": embedding, "model.language_model.norm.weight": norm,
               "model.language_model.layers.0.norm.weight": norm + 1, "model.visual.norm.weight": norm + 2}  # fmt: skip
    found = read_target_weights(write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, tensors))
    assert torch.equal(found.head, embedding)
    assert torch.equal(found.final_norm, norm)


def test_an_untied_target_without_head_is_refused(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.randn(10, 8), "model.norm.weight": torch.randn(8)}
    with pytest.raises(TargetError, match=r"expected lm_head.weight"):
        read_target_weights(write(tmp_path, {**CONFIG, "tie_word_embeddings": False}, tensors))


def test_a_quantised_head_is_refused(tmp_path):
    tensors = {"model.embed_tokens.weight": torch.zeros(10, 8, dtype=torch.int8), "model.norm.weight": torch.randn(8)}
    with pytest.raises(TargetError, match="original weights"):
        read_target_weights(write(tmp_path, {**CONFIG, "tie_word_embeddings": True}, tensors))
