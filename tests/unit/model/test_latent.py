"""Multi-latent attention: against transformers' own, and what is refused."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.config import DrafterConfig
from eagle3_core.errors import ConfigError
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.attention import Documents, History, attend, dense
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.latent_sizes import latent_scales
from tests.unit.model.conftest import MLA
from tests.unit.model.test_target import CONFIG, derive

YARN = {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 8.0, "original_max_position_embeddings": 32}
ROPES = [
    {"rope_type": "default", "rope_theta": 5e5},
    {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0},
    {**YARN, "mscale": 0.707, "mscale_all_dim": 0.5, "beta_fast": 16},
    YARN,
]
LATENT = {"q_lora_rank": 12, "kv_lora_rank": 9, "qk_nope_head_dim": 6, "qk_rope_head_dim": 4, "v_head_dim": 7}
TARGET = {**CONFIG, "architectures": ["DeepseekV3ForCausalLM"], "model_type": "deepseek_v3", **LATENT,
          "rope_scaling": None}  # fmt: skip


@pytest.mark.parametrize("rope", ROPES)
def test_attention_is_that_of_transformers(rope):
    from transformers import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    D, T = 16, 40
    sizes = DrafterArchitecture(
        hidden_size=D, intermediate_size=8, num_heads=4, **MLA, rms_norm_eps=1e-6, rope_parameters=rope,
        max_position_embeddings=256, vocab_size=20, draft_vocab_size=5, aux_layers=(0,), target_sha256="", 
        target_class="DeepseekV3ForCausalLM",
    )  # fmt: skip
    config = DeepseekV3Config(
        hidden_size=2 * D, num_attention_heads=4, num_key_value_heads=4, **LATENT, max_position_embeddings=256,
        rope_parameters=dict(rope), attn_implementation="eager",
    )  # fmt: skip
    theirs, drafter = DeepseekV3Attention(config, 0), Eagle3Drafter(sizes, torch.zeros(20, D))
    ours = drafter.layer.self_attn
    with torch.no_grad():
        for parameter in ours.parameters():
            parameter.uniform_(-0.5, 0.5)
    theirs.o_proj = torch.nn.Identity()
    theirs.load_state_dict({name: value for name, value in ours.state_dict().items() if "o_proj" not in name})
    states, positions = torch.randn(T, 2 * D), torch.arange(T)
    mask = torch.full((T, T), -torch.inf).triu(1)[None, None]
    angles = DeepseekV3RotaryEmbedding(config)(states, positions[None])
    expected, *_ = theirs(states[None], angles, mask)
    with torch.no_grad():
        found = drafter.heads("qkv", drafter.read(states[:, :D]), states[:, D:], drafter.rope(positions))
        documents = Documents.of((T,), (T,), positions)
        out = attend(found["q"], History(found["k"], found["v"], documents), [], [])
    torch.testing.assert_close(out, expected[0].flatten(1), atol=1e-5, rtol=1e-4)


def test_heads_of_two_widths_have_the_gradients_of_the_plain_reading():
    generator, own = torch.Generator().manual_seed(1), 3
    documents = Documents.of((9, 6), (5, 2), torch.tensor([2, 3, 4, 6, 7, 10, 12]))
    for wide, narrow in ((10, 7), (5, 8)):
        shapes = [(7, 4, wide), (15, 4, wide), (15, 4, narrow), *[(7, 4, wide)] * own, *[(7, 4, narrow)] * own]
        inputs, weight = [torch.randn(shape, generator=generator) for shape in shapes], torch.randn(7, 4 * narrow)
        results = []
        for which in (attend, lambda *a: dense(*a).flatten(1)):
            leaves = [tensor.clone().requires_grad_() for tensor in inputs]
            out = which(leaves[0], History(leaves[1], leaves[2], documents), leaves[3 : 3 + own], leaves[3 + own :])
            results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
        for found, expected in zip(*results, strict=True):
            torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_sizes_are_the_targets_unless_told_otherwise():
    sizes = derive(TARGET, attention="mla")
    assert (sizes.num_heads, sizes.num_kv_heads, sizes.head_dim, sizes.value_dim) == (4, 4, 10, 7)
    assert sizes.mla.model_dump() == LATENT
    assert derive(TARGET, attention="mla", num_heads=2, kv_lora_rank=20).parameter_shapes() == {
        **derive(TARGET, attention="mla").parameter_shapes(),
        "layer.self_attn.kv_a_proj_with_mqa.weight": (24, 16), "layer.self_attn.kv_a_layernorm.weight": (20,),
        "layer.self_attn.q_b_proj.weight": (20, 12), "layer.self_attn.kv_b_proj.weight": (26, 20),
        "layer.self_attn.o_proj.weight": (8, 14),
    }  # fmt: skip
    assert derive(TARGET).mla is None


def test_a_parameter_has_the_shape_that_is_announced():
    sizes = derive(TARGET, attention="mla")
    drafter = Eagle3Drafter(sizes, torch.zeros(10, 8))
    assert {name: tuple(p.shape) for name, p in drafter.named_parameters()} == sizes.parameter_shapes()


@pytest.mark.parametrize(("target", "wanted", "said"), [
    (CONFIG, {}, "which has no MLA"),
    ({**TARGET, "q_lora_rank": None}, {}, r"expected q_lora_rank of the .*; set it under drafter"),
    ({**TARGET, "rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, {}, "expected default or yarn, found llama3"),
    ({**TARGET, "rope_scaling": {**YARN, "attention_factor": 2.0}}, {}, "found attention_factor"),
    ({**TARGET, "rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, {}, "original_max_position_embeddings', found"),
])  # fmt: skip
def test_what_the_class_of_sglang_would_not_compute_is_refused(target, wanted, said):
    with pytest.raises(ConfigError, match=said):
        derive(target, attention="mla", **wanted)


def test_a_target_without_mla_can_have_such_a_drafter_if_told_its_sizes():
    assert derive({**CONFIG, "rope_scaling": None}, attention="mla", **LATENT).mla.model_dump() == LATENT


@pytest.mark.parametrize(("values", "said"), [
    ({"attention": "mla", "head_dim": 8}, "expected none of num_kv_heads, head_dim, found head_dim 8"),
    ({"kv_lora_rank": 8}, "found kv_lora_rank 8; remove it, or set attention: mla"),
])  # fmt: skip
def test_sizes_of_the_other_attention_are_refused(values, said):
    with pytest.raises(ConfigError, match=said):
        DrafterConfig.parse(values, "drafter")


def test_architectures_of_version_one_are_read_and_later_ones_refused():
    old = derive().model_dump(mode="json")
    del old["schema_version"], old["mla"]
    assert DrafterArchitecture.parse(old, "x") == derive()
    with pytest.raises(ConfigError, match="schema_version"):
        DrafterArchitecture.parse({**old, "schema_version": "eagle3/drafter/3"}, "x")


def test_scales_are_those_of_sglang():
    grown = 0.1 * torch.tensor(8.0).log().item()
    assert latent_scales(YARN) == pytest.approx((1 + grown, 1.0))
    assert latent_scales({**YARN, "mscale_all_dim": 1.0}) == pytest.approx((1.0, (1 + grown) ** 2))


def test_a_target_of_text_and_images_keeps_its_sizes_in_its_text_config():
    kimi = {"architectures": ["KimiK25ForConditionalGeneration"], "text_config": {**TARGET, "model_type": "kimi_k2"}}
    sizes = derive(kimi, attention="mla")
    assert (sizes.mla.model_dump(), sizes.target_class) == (LATENT, "KimiK25ForConditionalGeneration")
