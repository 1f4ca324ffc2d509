from __future__ import annotations

import pytest

from eagle3_core.engine.layers import boundaries, captured_outputs_of, default_outputs_of, engine_layer_ids
from eagle3_core.errors import EngineArgsError


def sglang_boundaries(model_class, ids, num_layers):
    """SGLang 0.5.23's own rules, as its model files write them."""
    if model_class == "DeepseekV3ForCausalLM":
        return [value + 1 for value in ids] if ids[0] == 1 else list(ids)
    if model_class == "GptOssForCausalLM":
        return list(ids) if max(ids) == num_layers else [value + 1 for value in ids]
    return [value + 1 for value in ids]


@pytest.mark.parametrize("model_class", ["LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"])
@pytest.mark.parametrize("outputs_of", [(1, 17, 32), (2, 17, 32), (3, 4, 5), (1, 2, 3)])
def test_the_ids_given_make_sglang_record_the_boundary_after_each_layer(model_class, outputs_of):
    ids = engine_layer_ids(outputs_of, model_class, 36)
    assert tuple(sglang_boundaries(model_class, ids, 36)) == boundaries(outputs_of)


def test_gpt_oss_alone_can_give_its_last_layer():
    ids = engine_layer_ids((1, 17, 35), "GptOssForCausalLM", 36)
    assert sglang_boundaries("GptOssForCausalLM", ids, 36) == [2, 18, 36]
    with pytest.raises(EngineArgsError, match="last layer"):
        engine_layer_ids((1, 17, 35), "LlamaForCausalLM", 36)


def test_the_default_is_what_sglang_captures_by_default():
    assert boundaries(default_outputs_of(36)) == (2, 18, 33)
    with pytest.raises(EngineArgsError, match="7 decoder layers"):
        default_outputs_of(6)


@pytest.mark.parametrize("outputs_of", [(), (3, 1), (1, 1, 2), (-1, 2), (1, 36)])
def test_layers_that_do_not_ascend_or_exist_are_refused(outputs_of):
    with pytest.raises(EngineArgsError, match=r"ascending, distinct and within 0\.\.35"):
        engine_layer_ids(outputs_of, "LlamaForCausalLM", 36)


def test_a_class_without_a_known_rule_is_refused_not_guessed():
    with pytest.raises(EngineArgsError, match="no layer-id rule is known for NewForCausalLM"):
        engine_layer_ids((1, 2, 3), "NewForCausalLM", 36)


def test_a_class_that_lends_a_drafter_no_embedding_is_refused_by_name():
    for ask in (engine_layer_ids, captured_outputs_of):
        with pytest.raises(EngineArgsError, match="lends a drafter its embedding, found Qwen2MoeForCausalLM"):
            ask((1, 3, 4), "Qwen2MoeForCausalLM", 8)


def test_a_first_layer_that_deepseeks_rule_cannot_express_is_refused():
    with pytest.raises(EngineArgsError, match="layer 0"):
        engine_layer_ids((0, 2, 3), "DeepseekV3ForCausalLM", 36)
