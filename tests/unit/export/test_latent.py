"""Drafters with multi-latent attention: every dialect that has them to every other, and what is refused."""

import itertools

import pytest
import torch

from eagle3_core.errors import ExportError
from eagle3_core.export.dialects import DIALECTS
from eagle3_core.export.remap import remap
from tests.unit.export import tiny

DEEPSEEK = {"architectures": ["DeepseekV3ForCausalLM"]}


def source(path, name="sglang", changes=None, **config):
    """Write a drafter with MLA; a tensor changed to None is taken away."""
    values = {**tiny.tensors(name, mla=True), **(changes or {})}
    values = {key: value for key, value in values.items() if value is not None}
    return tiny.write(path / "in", name, values, **tiny.latent(name, **config))


def refused(path, to="vllm", **more):
    with pytest.raises(ExportError) as caught:
        remap(path, path.parent / "out", to, **{"target": tiny.target(), **more})
    line = str(caught.value)
    assert "\n" not in line
    assert "expected" in line
    assert "found" in line
    return line


def test_the_dialects_are_those_whose_readers_are_known():
    assert {name for name, dialect in DIALECTS.items() if dialect.mla} == set(tiny.LATENT_DIALECTS)


@pytest.mark.parametrize(("name", "to"), list(itertools.product(tiny.LATENT_DIALECTS, repeat=2)))
def test_there_and_back_is_bit_for_bit(name, to, tmp_path):
    there = remap(source(tmp_path, name), tmp_path / "there", to, target=tiny.target())
    assert there.plan.source.mla
    back = remap(there.out, tmp_path / "back", name, target=tiny.target())
    assert tiny.same(tiny.read(back.out), tiny.tensors(name, mla=True))
    assert set(tiny.read(there.out)) == set(tiny.tensors(to, mla=True))
    again = remap(source(tmp_path / "again", name), tmp_path / "there", to, target=tiny.target())
    assert again.already


def test_the_config_is_what_the_class_of_sglang_reads(tmp_path):
    config = tiny.read_config(remap(source(tmp_path, "own"), tmp_path / "out", "sglang", target=tiny.target()).out)
    assert config["architectures"] == ["Eagle3DeepseekV2ForCausalLM"]
    assert config["model_type"] == "deepseek_v3"
    assert {name: config[name] for name in tiny.LATENT} == tiny.LATENT
    assert (config["num_attention_heads"], config["num_key_value_heads"]) == (tiny.H, tiny.H)
    assert (config["rope_interleave"], config["tie_word_embeddings"], config["draft_vocab_size"]) == (True, False, 4)
    rope = {"rope_type": "yarn", "rope_theta": 5e5, **tiny.YARN}
    assert (config["rope_parameters"], config["rope_scaling"], config["rope_theta"]) == (rope, rope, 5e5)
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == tiny.OUTPUTS
    assert "head_dim" not in config


def test_layer_ids_follow_the_target_and_the_reader(tmp_path):
    own = source(tmp_path, "own", aux_layers=[2, 4, 5], target_class="DeepseekV3ForCausalLM")
    target = tiny.target(**DEEPSEEK)
    sglang = tiny.read_config(remap(own, tmp_path / "a", "sglang", target=target).out)
    assert sglang["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == [3, 5, 6]
    assert tiny.read_config(remap(own, tmp_path / "b", "vllm", target=target).out)[
        "eagle_aux_hidden_state_layer_ids"
    ] == [3, 5, 6]
    assert tiny.read_config(remap(tmp_path / "a", tmp_path / "c", "own", target=target).out)["aux_layers"] == [2, 4, 5]


@pytest.mark.parametrize("to", ["specforge", "eagle", "speculators", "automodel"])
def test_dialects_of_which_nothing_is_known_are_refused(to, tmp_path):
    line = refused(source(tmp_path), to)
    assert f"for {to}, found kv_a_proj_with_mqa, so an MLA drafter" in line
    assert "choose one of own, sglang, sglang-new, vllm, modelopt" in line


def test_a_source_in_such_a_dialect_is_refused(tmp_path):
    values = {
        key.replace("layers.0.", "model.layers.0."): value for key, value in tiny.tensors("vllm", mla=True).items()
    }
    values = {f"model.{key}" if key.startswith(("fc", "norm")) else key: value for key, value in values.items()}
    assert "Llama for automodel, found kv_a_proj" in refused(
        tiny.write(tmp_path / "in", "automodel", values, **tiny.latent("automodel"))
    )
    assert "--from is specforge: expected its keys" in refused(source(tmp_path / "b"), told="specforge")


@pytest.mark.parametrize(("changes", "said"), [
    ({"midlayer.self_attn.kv_a_layernorm.weight": None}, "missing midlayer.self_attn.kv_a_layernorm.weight"),
    ({"midlayer.self_attn.q_a_proj.weight": None}, "missing midlayer.self_attn.q_a_proj.weight"),
    ({"midlayer.self_attn.q_proj.weight": torch.zeros(20, 32)}, "unknown midlayer.self_attn.q_proj.weight"),
    ({"midlayer.self_attn.fused_qkv_a_proj_with_mqa.weight": torch.zeros(1)}, "unknown midlayer.self_attn.fused_qkv_a"),
    ({"midlayer.mlp.experts.0.up_proj.weight": torch.zeros(1)}, "unknown midlayer.mlp.experts.0"),
    ({"midlayer.self_attn.kv_b_proj.weight": torch.zeros(40, 6).bfloat16()}, r"expected shape (40, 5)"),
    ({"midlayer.self_attn.o_proj.weight": torch.zeros(16, 20).bfloat16()}, r"expected shape (16, 28)"),
    ({"midlayer.self_attn.q_a_layernorm.weight": torch.full((6,), torch.nan).bfloat16()}, "NaN"),
])  # fmt: skip
def test_keys_and_shapes_are_strict(changes, said, tmp_path):
    assert said in refused(source(tmp_path, changes=changes))


@pytest.mark.parametrize(("config", "said"), [
    ({"q_lora_rank": None}, "q_lora_rank"),
    ({"kv_lora_rank": 0}, "kv_lora_rank: expected a whole number from 1 on, found 0"),
    ({"model_type": "llama"}, "model_type: expected deepseek_v2 or deepseek_v3 or kimi_k2, found 'llama'"),
    ({"rope_interleave": False}, "rope_interleave: expected True, found False"),
    ({"mla_use_nope": True}, "mla_use_nope: expected False"),
    ({"mla_use_output_gate": True}, "mla_use_output_gate: expected False"),
    ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "expected default or yarn, found linear"),
    ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "'original_max_position_embeddings', found none"),
    ({"rope_scaling": {"type": "yarn", **tiny.YARN, "attn_factor": 2.0}}, "found attn_factor"),
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "found a mixture"),
])  # fmt: skip
def test_what_no_reader_of_these_parameters_computes_is_refused(config, said, tmp_path):
    assert said in refused(source(tmp_path, **config))


def test_eagle_3_1_is_refused_by_name_where_it_is_not_computed_and_kept_where_it_is(tmp_path):
    norms = {f"fc_norm.{index}.weight": torch.ones(tiny.D).bfloat16() for index in range(3)}
    newer = source(tmp_path, changes=norms, fc_norm=True, norm_output=True)
    assert "fc_norm: expected none for own, found True" in refused(newer, "own")
    assert "norm_output: expected none for own" in refused(source(tmp_path / "b", norm_output=True), "own")
    kept = remap(newer, tmp_path / "vllm", "vllm", target=tiny.target())
    assert {**tiny.read_config(kept.out), "eagle3": 0}.items() >= {"fc_norm": True, "norm_output": True}.items()
    residual = source(tmp_path / "c", "vllm", norm_before_residual=True)
    assert "norm_before_residual: expected none for sglang" in refused(residual, "sglang")


def test_vllm_reads_the_base_of_rope_with_yarn_alone(tmp_path):
    plain = {"rope_scaling": None}
    assert "rope_theta for vllm: expected 10000, found 500000.0" in refused(source(tmp_path, **plain))
    done = remap(source(tmp_path / "b", **plain, rope_theta=10000.0), tmp_path / "o", "vllm", target=tiny.target())
    assert tiny.read_config(done.out)["rope_parameters"] == {"rope_theta": 10000.0, "rope_type": "default"}
    assert remap(tmp_path / "in", tmp_path / "p", "sglang-new", target=tiny.target()).out.exists()


@pytest.mark.parametrize("mla", [False, True])
def test_our_own_config_and_weights_must_have_the_same_attention(mla, tmp_path):
    config = {} if mla else tiny.latent("own")
    path = tiny.write(tmp_path / "in", "own", tiny.tensors("own", mla=mla), **config)
    assert "config and weights are of two drafters" in refused(path)
