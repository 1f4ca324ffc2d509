"""Names of parameters: exact key sets, round trips, refusals by name."""

import pytest

from eagle3_core.errors import ExportError
from eagle3_core.export.dialects import DIALECTS, detect, remap

SGLANG_KEYS = [
    "d2t",
    "fc.weight",
    "lm_head.weight",
    "midlayer.hidden_norm.weight",
    "midlayer.input_layernorm.weight",
    "midlayer.mlp.down_proj.weight",
    "midlayer.mlp.gate_proj.weight",
    "midlayer.mlp.up_proj.weight",
    "midlayer.post_attention_layernorm.weight",
    "midlayer.self_attn.k_proj.weight",
    "midlayer.self_attn.o_proj.weight",
    "midlayer.self_attn.q_proj.weight",
    "midlayer.self_attn.v_proj.weight",
    "norm.weight",
    "t2d",
]


def drafter(dialect: str) -> dict[str, object]:
    return {key: object() for key in sorted(DIALECTS[dialect].required)}


def test_the_keys_sglang_reads_are_exactly_these():
    assert sorted(remap(drafter("own"), "sglang")) == SGLANG_KEYS


@pytest.mark.parametrize("source", DIALECTS)
@pytest.mark.parametrize("to", DIALECTS)
def test_every_dialect_goes_to_every_other_and_back_with_the_very_same_values(source, to):
    original = {**drafter(source), "embed_tokens.weight": object()}
    there = remap(original, to)
    assert detect(there).name == to
    assert remap(there, source) == original
    assert remap(there, to) == there


@pytest.mark.parametrize("dialect", DIALECTS)
def test_a_missing_key_is_named(dialect):
    tensors = drafter(dialect)
    del tensors["fc.weight"]
    with pytest.raises(ExportError, match=r"missing fc\.weight"):
        remap(tensors, "sglang")


def test_an_unknown_key_is_named_because_sglang_would_drop_it():
    with pytest.raises(ExportError, match=r"unknown model\.surprise\.weight"):
        remap({**drafter("vllm"), "model.surprise.weight": object()}, "sglang")


def test_mixed_dialects_are_refused():
    with pytest.raises(ExportError, match="sglang and vllm mixed"):
        remap({**drafter("vllm"), **drafter("sglang")}, "own")


def test_a_file_that_is_no_drafter_is_refused_in_one_line():
    with pytest.raises(ExportError, match="exactly one dialect") as caught:
        remap({"model.embed_tokens.weight": object()}, "own")
    assert "\n" not in str(caught.value)


def test_an_unknown_dialect_is_refused_with_the_known_ones():
    with pytest.raises(ExportError, match="own, sglang, vllm"):
        remap(drafter("own"), "eagle9")
