"""Targets that training or export would refuse are refused by the preflight, before hours of capture."""

import json

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.config import RunConfig
from eagle3_core.errors import ConfigError, EngineArgsError, TargetError
from eagle3_core.stages.preflight import _attention, _drafter

TARGET = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 16, "intermediate_size": 24,
    "num_hidden_layers": 8, "num_attention_heads": 2, "num_key_value_heads": 2, "vocab_size": 40, "rms_norm_eps": 1e-5,
    "max_position_embeddings": 64,
}  # fmt: skip


def checked(directory, drafter=None, backend="sglang", **changes):
    (directory / "config.json").write_text(json.dumps({**TARGET, **changes}))
    (directory / "tokenizer.json").write_text("{}")
    save_file({"model.embed_tokens.weight": torch.zeros(40, 16)}, directory / "model.safetensors")
    values = {"target": {"model": str(directory)}, "data": {"prompts": "demo"}, "drafter": drafter or {}}
    values |= {"capture": {"backend": backend}}
    return _drafter(RunConfig.parse(values, "test"))


def test_a_target_that_can_be_drafted_for_is_told_with_its_layer_ids(tmp_path):
    assert checked(tmp_path)["layer_ids"] == (1, 3, 4)


def test_the_heads_of_a_drafter_with_mla_are_told(tmp_path):
    latent = {"q_lora_rank": 6, "kv_lora_rank": 5, "qk_nope_head_dim": 4, "qk_rope_head_dim": 2, "v_head_dim": 3}
    found = checked(tmp_path, {"attention": "mla"}, architectures=["DeepseekV3ForCausalLM"], **latent)
    assert (found["heads"], found["head_dim"], found["layer_ids"]) == (2, 6, (1, 3, 4))


def test_what_sglang_hands_out_in_part_is_not_captured_by_another(tmp_path):
    gemma = {"architectures": ["Gemma3ForCausalLM"], "model_type": "gemma3_text"}
    assert checked(tmp_path, **gemma)["layer_ids"] == (1, 3, 4)
    with pytest.raises(EngineArgsError, match="expected sglang for Gemma3ForCausalLM, found transformers"):
        checked(tmp_path, backend="transformers", **gemma)
    assert checked(tmp_path, backend="transformers")["layer_ids"] == (1, 3, 4)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"model_type": "gemma2"}, TargetError, "embedding and norms are scaled"),
        ({"logits_scaling": 8.0}, TargetError, "logits_scaling"),
        ({"rope_scaling": {"rope_type": "longrope", "factor": 4.0}}, ConfigError, "RoPE type: .* found longrope"),
        ({"architectures": ["UnheardOfForCausalLM"]}, EngineArgsError, "no layer-id rule is known"),
        ({"drafter": {"num_heads": 3}}, ConfigError, "cannot share"),
        ({"drafter": {"attention": "mla"}}, ConfigError, "which has no MLA"),
    ],
)
def test_a_target_that_cannot_is_refused_before_capture(changes, error, message, tmp_path):
    with pytest.raises(error, match=message):
        checked(tmp_path, **changes)


def test_the_attention_that_sglang_picks_is_told():
    picked = {"attention_backend": "trtllm_mha", "speculative_draft_attention_backend": None}
    assert _attention(picked) == "trtllm_mha, drafter as the target"
    assert _attention({**picked, "speculative_draft_attention_backend": "triton"}) == "trtllm_mha, drafter triton"
    assert _attention({}) == "as SGLang decides at its start, drafter as the target"
