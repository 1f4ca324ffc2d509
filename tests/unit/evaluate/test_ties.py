"""Where two answers part, the target's own indecision is looked up at exactly that token."""

import pytest
import torch

from eagle3_core.evaluate.comparison import Difference
from eagle3_core.evaluate.ties import MAX_LOOKED_AT, MAX_PARAMETERS, with_gaps


def difference(position=2, tokens=4):
    return Difference(id="p", shape="3/1/4", position=position, baseline_token=1, token=2, tokens=tokens)


def test_the_gap_is_from_the_best_logit_to_the_lower_of_the_two_tokens(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)  # fmt: skip
    target = LlamaForCausalLM(config).eval()
    target.save_pretrained(tmp_path)
    tokens = [5, 6, 7, 1, 2, 3, 4]
    ended = difference().model_copy(update={"token": None})
    found = with_gaps([difference(), ended], {"p": tokens}, tmp_path, 1000, "3/1/4")
    logits = target(torch.tensor([tokens[:5]])).logits[0, -1].detach()
    assert found[0].logit_gap == pytest.approx(float(logits.max() - min(logits[1], logits[2])), rel=1e-5)
    assert found[1].logit_gap is None
    many = [difference().model_copy(update={"shape": shape}) for shape in ["3/1/4"] * 20 + ["7/1/8"] * 20]
    looked_at = [
        one.shape for one in with_gaps(many, {"p": tokens}, tmp_path, 1000, "7/1/8") if one.logit_gap is not None
    ]
    assert (looked_at.count("3/1/4"), looked_at.count("7/1/8")) == (MAX_LOOKED_AT, 20)


def test_a_large_target_is_not_loaded_for_it(tmp_path):
    assert (
        with_gaps([difference()], {"p": [1, 2, 3, 4]}, tmp_path / "absent", MAX_PARAMETERS + 1, "3/1/4")[0].logit_gap
        is None
    )


def test_no_difference_loads_nothing(tmp_path):
    assert with_gaps([], {}, tmp_path / "absent", 1000, "3/1/4") == []
