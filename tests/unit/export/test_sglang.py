"""The directory SGLang loads: tensors, invariants, configuration."""

import json

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.errors import ExportError
from eagle3_core.export import sglang
from eagle3_core.export.dialects import remap
from eagle3_core.model.architecture import DrafterArchitecture

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip


def sizes(**changes) -> DrafterArchitecture:
    values = dict(
        hidden_size=16, intermediate_size=24, num_heads=4, num_kv_heads=2, head_dim=4, rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0}, max_position_embeddings=512, vocab_size=40,
        draft_vocab_size=4, aux_layers=(1, 3, 4), target_sha256="0" * 64, target_class="LlamaForCausalLM",
    )  # fmt: skip
    return DrafterArchitecture(**{**values, **changes})


TARGET = {"num_hidden_layers": 8, "max_position_embeddings": 4096, "tie_word_embeddings": True, "eos_token_id": 2}
USED = torch.tensor([3, 7, 9, 20])


def maps(d2t=None, t2d=None) -> dict[str, torch.Tensor]:
    flags = torch.zeros(40, dtype=torch.bool)
    flags[USED] = True
    return {"d2t": USED - torch.arange(4) if d2t is None else d2t, "t2d": flags if t2d is None else t2d}


def own(**changes) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) for name, shape in sizes().parameter_shapes().items()}
    return {**tensors, **changes}


def test_the_written_file_remaps_back_to_the_checkpoint_bit_for_bit(tmp_path):
    tensors = sglang.drafter_tensors(own(), maps(), sizes(), "float32", "here")
    sglang.write(tmp_path, tensors, sglang.drafter_config(sizes(), TARGET, "float32"))
    back = remap(load_file(tmp_path / "model.safetensors"), "own")
    expected = {**own(), **maps()}
    assert set(back) == set(expected)
    assert all(torch.equal(back[name], expected[name]) for name in expected)
    assert json.loads((tmp_path / "config.json").read_text())["draft_vocab_size"] == 4


def test_casting_touches_weights_but_not_the_vocabulary_maps():
    tensors = sglang.drafter_tensors(own(), maps(), sizes(), "bfloat16", "here")
    assert tensors["d2t"].dtype == torch.int64
    assert tensors["t2d"].dtype == torch.bool
    assert {tensor.dtype for name, tensor in tensors.items() if name not in ("d2t", "t2d")} == {torch.bfloat16}


def test_tensors_that_share_storage_are_written(tmp_path):
    shared = torch.randn(16)
    tensors = sglang.drafter_tensors(
        own(**{"norm.weight": shared, "layer.hidden_norm.weight": shared}), maps(), sizes(), "float32", "here"
    )
    sglang.write(tmp_path, tensors, {})
    assert torch.equal(load_file(tmp_path / "model.safetensors")["norm.weight"], shared)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": torch.zeros(40, 16)}, r"lm_head\.weight expected shape \(4, 16\), found \(40, 16\)"),
        ({"fc.weight": torch.full((16, 48), float("nan"))}, r"fc\.weight holds NaN"),
        ({"extra.weight": torch.zeros(1)}, r"unknown extra\.weight"),
    ],
)
def test_a_wrong_tensor_is_named(changes, message):
    with pytest.raises(ExportError, match=message):
        sglang.drafter_tensors(own(**changes), maps(), sizes(), "float32", "here")


def test_a_missing_parameter_is_named():
    tensors = own()
    del tensors["lm_head.weight"]
    with pytest.raises(ExportError, match=r"missing lm_head\.weight"):
        sglang.drafter_tensors(tensors, maps(), sizes(), "float32", "here")


@pytest.mark.parametrize(
    ("d2t", "hint"),
    [(USED, "absolute ids"), (torch.arange(4), "disagree"), (torch.zeros(4, dtype=torch.int64), "disagree")],
    ids=["absolute", "arange", "zeros"],
)
def test_only_offsets_pass_as_d2t(d2t, hint):
    with pytest.raises(ExportError, match=hint):
        sglang.drafter_tensors(own(), maps(d2t=d2t), sizes(), "float32", "here")


def test_maps_of_another_type_are_refused():
    with pytest.raises(ExportError, match="expected d2t int64 and t2d bool"):
        sglang.drafter_tensors(own(), maps(t2d=maps()["t2d"].to(torch.uint8)), sizes(), "float32", "here")


def test_a_tied_target_does_not_tie_the_drafter_and_its_positions_are_the_drafters():
    config = sglang.drafter_config(sizes(), TARGET, "bfloat16")
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 4096
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]
    assert config["torch_dtype"] == "bfloat16"


def test_scaled_rope_is_written_in_both_spellings():
    config = sglang.drafter_config(sizes(rope_parameters=LLAMA3), TARGET, "float32")
    assert config["rope_theta"] == 5e5
    assert config["rope_parameters"]["factor"] == config["rope_scaling"]["factor"] == 8.0


def test_transformers_reads_the_rope_that_was_meant(tmp_path):
    from transformers import AutoConfig

    for rope in (LLAMA3, {"rope_type": "default", "rope_theta": 5e6}):
        sglang.write(tmp_path, {"d2t": USED}, sglang.drafter_config(sizes(rope_parameters=rope), TARGET, "float32"))
        read = AutoConfig.from_pretrained(tmp_path)
        assert {name: read.rope_parameters[name] for name in rope} == rope


@pytest.mark.parametrize(
    ("model_class", "layers", "written"),
    [("LlamaForCausalLM", (1, 3, 4), [1, 3, 4]), ("DeepseekV3ForCausalLM", (2, 3, 4), [3, 4, 5])],
)
def test_layer_ids_are_written_in_the_numbers_of_the_targets_class(model_class, layers, written):
    config = sglang.drafter_config(sizes(target_class=model_class, aux_layers=layers), TARGET, "float32")
    assert config["eagle_config"]["eagle_aux_hidden_state_layer_ids"] == written


def test_a_layer_sglang_cannot_capture_is_an_export_error():
    with pytest.raises(ExportError, match="last layer"):
        sglang.drafter_config(sizes(aux_layers=(1, 3, 7)), TARGET, "float32")
