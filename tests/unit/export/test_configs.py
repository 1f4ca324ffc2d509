"""What stands in the config of each engine: RoPE in both spellings, layer ids by class, positions, the head."""

import math

import pytest
import torch

from eagle3_core.errors import EngineArgsError, ExportError
from eagle3_core.export.dialects import DIALECTS, Numbering
from eagle3_core.export.numbering import Target, translate
from eagle3_core.export.remap import remap
from eagle3_core.export.rope import read_rope, write_rope
from tests.unit.export import tiny

LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 64}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 128}
DEFAULT = {"rope_type": "default", "rope_theta": 5e6}
FLAT = [name for name in DIALECTS if name not in ("own", "speculators")]


def made(tmp_path, name="sglang", to="sglang", target=None, **changes):
    source = tiny.write(tmp_path / "in", name, **changes)
    out = tmp_path / "out"
    return tiny.read_config(remap(source, out, to, target=target or tiny.target()).out)


@pytest.mark.parametrize("rope", [LLAMA3, YARN, DEFAULT], ids=lambda rope: rope["rope_type"])
@pytest.mark.parametrize("spelling", ["newer", "older", "oldest", "both"])
def test_rope_is_read_in_every_spelling(rope, spelling):
    theta = {"rope_theta": rope["rope_theta"]}
    rest = {name: value for name, value in rope.items() if name != "rope_theta"}
    kind = rest.get("rope_type")
    old = {**{name: value for name, value in rest.items() if name != "rope_type"}, "type": kind}
    config = {
        "newer": {"rope_parameters": rope},
        "older": {**theta, "rope_scaling": rest if kind != "default" else None},
        "oldest": {**theta, "rope_scaling": old if kind != "default" else None},
        "both": {"rope_parameters": rope, **theta, "rope_scaling": rest if kind != "default" else None},
    }[spelling]
    assert read_rope(config, "here") == rope


@pytest.mark.parametrize("saved_again", [{}, {"rope_type": "default"}])
def test_multimodal_sections_are_plain_rope_for_text(saved_again):
    rope = {"rope_scaling": {"type": "mrope", "mrope_section": [1, 2], **saved_again}, "rope_theta": 1e6}
    assert read_rope(rope, "here") == {"rope_type": "default", "rope_theta": 1e6}


def test_a_told_attention_factor_is_written_in_sglangs_word_too_and_read_back_as_it_was():
    told = {**YARN, "attention_factor": 1.5}
    written = write_rope(told)
    assert written["rope_parameters"]["attn_factor"] == pytest.approx(1.5 / (1 + 0.1 * math.log(4)))
    assert read_rope(written, "here") == told
    with pytest.raises(ExportError, match=r"attn_factor: expected 1\.317.*found 1; SGLang reads the one"):
        read_rope({"rope_parameters": {**told, "attn_factor": 1.0}}, "here")


@pytest.mark.parametrize("place", [{"partial_rotary_factor": 0.5},
                                   {"rope_parameters": {**DEFAULT, "partial_rotary_factor": 0.5}}])  # fmt: skip
def test_heads_that_are_rotated_in_part_are_refused(place):
    with pytest.raises(ExportError, match=r"partial_rotary_factor: expected 1, found 0\.5"):
        read_rope({"rope_parameters": DEFAULT, **place}, "here")
    assert read_rope({"rope_parameters": DEFAULT, "partial_rotary_factor": 1.0}, "here") == DEFAULT


@pytest.mark.parametrize("rope", [LLAMA3, YARN, DEFAULT], ids=lambda rope: rope["rope_type"])
def test_both_spellings_are_written_and_agree(rope):
    written = write_rope(rope)
    assert written["rope_parameters"] == rope
    assert written["rope_theta"] == rope["rope_theta"]
    assert read_rope({**written, "rope_parameters": None}, "here") == rope


@pytest.mark.parametrize("rope", [LLAMA3, YARN, DEFAULT], ids=lambda rope: rope["rope_type"])
def test_transformers_reads_the_rope_that_was_meant(rope, tmp_path):
    from transformers import AutoConfig

    made(tmp_path, rope_parameters=rope, rope_theta=None)
    read = AutoConfig.from_pretrained(tmp_path / "out")
    assert {name: read.rope_parameters[name] for name in rope} == rope


def test_eagles_own_code_finds_its_older_word_for_the_type(tmp_path):
    """Its EConfig (commit cb7e084) refuses any other keys than these two, and its RoPE then has the base 10000."""
    config = made(tmp_path, to="eagle", rope_scaling={"rope_type": "linear", "factor": 2.0}, rope_theta=10000.0)
    assert config["rope_scaling"] == {"type": "linear", "factor": 2.0}


def test_eagles_own_code_is_left_to_take_the_targets_embedding(tmp_path):
    """cnets.Model (commit cb7e084) takes it only where the config has no target_hidden_size at all."""
    assert "target_hidden_size" not in made(tmp_path, to="eagle")


@pytest.mark.parametrize("to", FLAT)
def test_a_tied_target_does_not_tie_the_drafter_and_its_positions_are_the_drafters(to, tmp_path):
    config = made(tmp_path, to=to, tie_word_embeddings=True)
    assert config["tie_word_embeddings"] is False
    assert config["max_position_embeddings"] == 4096
    assert config["draft_vocab_size"] == 4
    assert config["torch_dtype"] == "bfloat16"
    assert (config["bos_token_id"], config["eos_token_id"]) == (1, 2)
    assert config["architectures"] == [DIALECTS[to].mha.architecture]


@pytest.mark.parametrize("spelled", [{}, {"rope_scaling": {"rope_type": "linear", "factor": 2.0}},
                                     {"rope_scaling": {"type": "mrope", "mrope_section": [1, 1]}}])  # fmt: skip
def test_what_a_llama_config_leaves_out_is_what_transformers_takes_and_is_said(spelled, tmp_path):
    from transformers import LlamaConfig

    source = tiny.write(tmp_path / "in", "eagle", rms_norm_eps=None, rope_theta=None, **spelled)
    done = remap(source, tmp_path / "out", "vllm")
    read, default = tiny.read_config(done.out), LlamaConfig()
    assert (read["rms_norm_eps"], read["rope_theta"]) == (default.rms_norm_eps, default.rope_parameters["rope_theta"])
    assert [note.split()[0] for note in done.plan.notes] == ["rms_norm_eps", "rope_theta"]


def test_what_a_config_says_is_nothing_to_note(tmp_path):
    assert remap(tiny.write(tmp_path / "in", "eagle"), tmp_path / "out", "vllm").plan.notes == ()


def test_the_nested_config_is_what_vllm_reads(tmp_path):
    config = made(tmp_path, to="speculators")
    assert config["speculators_model_type"] == config["speculators_config"]["algorithm"] == "eagle3"
    assert config["norm_before_residual"] is False
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]
    assert config["transformer_layer_config"]["hidden_size"] == tiny.D
    assert config["speculators_config"]["verifier"] == {
        "name_or_path": "the target",
        "architectures": ["LlamaForCausalLM"],
    }


@pytest.mark.parametrize("ids", [[1, 3], [1, 2, 3, 4]])
def test_another_number_of_aux_states_stands_where_vllm_reads_it_and_eagle_has_none(ids, tmp_path):
    """vLLM 0.33.0 copies neither it nor the ids' number out of the outer config, and makes fc for three states."""
    values = tiny.tensors("sglang")
    values["fc.weight"] = torch.ones(tiny.D, len(ids) * tiny.D).bfloat16()
    source = tiny.write(tmp_path / "in", "sglang", values, eagle_config={"eagle_aux_hidden_state_layer_ids": ids})
    out = remap(source, tmp_path / "out", "speculators", target=tiny.target()).out
    assert tiny.read_config(out)["transformer_layer_config"]["num_aux_hidden_states"] == len(ids)
    back = tiny.read_config(remap(out, tmp_path / "back", "sglang").out)
    assert back["num_aux_hidden_states"] == len(ids)
    with pytest.raises(ExportError, match=rf"aux states for eagle: expected 3, found {len(ids)}"):
        remap(source, tmp_path / "eagle", "eagle", target=tiny.target())


def test_a_proposal_of_the_source_is_kept(tmp_path):
    proposal = {
        "algorithm": "eagle3",
        "proposal_methods": [{"speculative_tokens": 3}],
        "verifier": {"name_or_path": "t"},
    }
    assert made(tmp_path, "speculators", "speculators", speculators_config=proposal)["speculators_config"] == proposal


def test_the_target_is_named_where_speculators_looks_for_it_and_its_absence_is_said(tmp_path):
    """speculators 0.9.0 opens verifier.name_or_path whenever it loads a file, and fails where it is null."""
    unnamed = {"algorithm": "eagle3", "verifier": {"name_or_path": None, "architectures": ["X"]}}
    source = tiny.write(tmp_path / "in", "speculators", speculators_config=unnamed)
    named = remap(source, tmp_path / "named", "speculators", target=tiny.target())
    assert tiny.read_config(named.out)["speculators_config"]["verifier"] == {
        "name_or_path": "the target", "architectures": ["X"],
    }  # fmt: skip
    assert not any("--target" in note for note in named.plan.notes)
    kept = remap(source, tmp_path / "kept", "speculators")
    assert tiny.read_config(kept.out)["speculators_config"] == unnamed
    assert "give --target" in kept.plan.notes[0]


def test_an_embedding_that_speculators_would_not_find_is_said(tmp_path):
    """It opens the target for it only where its own is NaN, which unread memory seldom is (0.9.0)."""
    values = tiny.tensors("speculators")
    without = remap(
        tiny.write(tmp_path / "a", "speculators", values), tmp_path / "x", "speculators", target=tiny.target()
    )
    assert without.plan.notes == (
        "no embed_tokens.weight: vLLM takes the target's, the speculators library (0.9.0) leaves it uninitialised",
    )
    values["embed_tokens.weight"] = torch.ones((tiny.V, tiny.D)).bfloat16()
    with_it = remap(
        tiny.write(tmp_path / "b", "speculators", values), tmp_path / "y", "speculators", target=tiny.target()
    )
    assert with_it.plan.notes == ()


LLAMA, DEEPSEEK, GPT_OSS = "LlamaForCausalLM", "DeepseekV3ForCausalLM", "GptOssForCausalLM"


@pytest.mark.parametrize(
    ("model_class", "layers", "given", "outputs"),
    [
        (LLAMA, 36, (1, 17, 32), (1, 17, 32)),
        (LLAMA, 36, (2, 18, 33), (2, 18, 33)),
        (DEEPSEEK, 61, (1, 29, 57), (1, 29, 57)),
        (DEEPSEEK, 61, (2, 30, 58), (1, 29, 57)),
        (DEEPSEEK, 61, (3, 30, 57), (2, 29, 56)),
        (DEEPSEEK, 61, (2, 30, 60), (1, 29, 59)),
        (GPT_OSS, 24, (1, 11, 20), (1, 11, 20)),
        (GPT_OSS, 24, (2, 12, 24), (1, 11, 23)),
        (GPT_OSS, 24, (1, 11, 23), (1, 11, 23)),
    ],
)
def test_what_sglang_would_capture_for_given_ids(model_class, layers, given, outputs):
    target = Target(model_class, layers)
    assert translate(given, Numbering.SGLANG, Numbering.OUTPUTS, target, "here") == outputs
    assert translate(given, Numbering.SGLANG, Numbering.ENTRIES, target, "here") == tuple(x + 1 for x in outputs)


@pytest.mark.parametrize(
    ("model_class", "outputs", "given"),
    [(LLAMA, (1, 3, 4), (1, 3, 4)), (DEEPSEEK, (2, 3, 4), (3, 4, 5)), (DEEPSEEK, (1, 3, 4), (1, 3, 4))],
)
def test_what_sglang_is_given_for_wanted_outputs(model_class, outputs, given):
    assert translate(outputs, Numbering.OUTPUTS, Numbering.SGLANG, Target(model_class, 8), "here") == given


@pytest.mark.parametrize(
    ("ids", "source", "to", "target"),
    [
        ((0, 3), Numbering.ENTRIES, Numbering.OUTPUTS, Target()),
        ((1, 3), Numbering.SGLANG, Numbering.OUTPUTS, Target("NobodyKnowsMe", 8)),
        ((1, 7), Numbering.OUTPUTS, Numbering.SGLANG, Target(LLAMA, 8)),
        ((1, 3), Numbering.OUTPUTS, Numbering.SGLANG, Target(LLAMA)),
        ((1, 4, 7), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((0, 3, 7), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((5, 4, 1), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((1, 4, 4), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((1, 4, 99), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((-1, 3), Numbering.SGLANG, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((0, 3, 5), Numbering.SGLANG, Numbering.OUTPUTS, Target(DEEPSEEK, 8)),
        ((1, 3, 7), Numbering.SGLANG, Numbering.OUTPUTS, Target(DEEPSEEK, 8)),
        ((2, 3, 8), Numbering.SGLANG, Numbering.OUTPUTS, Target(DEEPSEEK, 8)),
        ((5, 3, 2), Numbering.SGLANG, Numbering.OUTPUTS, Target(DEEPSEEK, 8)),
        ((1, 4, 9), Numbering.SGLANG, Numbering.OUTPUTS, Target(GPT_OSS, 8)),
        ((0, 4, 8), Numbering.SGLANG, Numbering.OUTPUTS, Target(GPT_OSS, 8)),
        ((5, 4, 1), Numbering.SGLANG, Numbering.SGLANG, Target()),
        ((-1, 3), Numbering.SGLANG, Numbering.SGLANG, Target()),
        ((1, 4, 8), Numbering.OUTPUTS, Numbering.OUTPUTS, Target(LLAMA, 8)),
        ((1, 4, 8), Numbering.OUTPUTS, Numbering.ENTRIES, Target(LLAMA, 8)),
        ((2, 5, 9), Numbering.ENTRIES, Numbering.ENTRIES, Target(LLAMA, 8)),
        ((6, 5, 2), Numbering.ENTRIES, Numbering.ENTRIES, Target()),
        ((), Numbering.ENTRIES, Numbering.OUTPUTS, Target()),
    ],
)
def test_ids_that_cannot_be_translated_are_an_export_error(ids, source, to, target):
    with pytest.raises(ExportError) as caught:
        translate(ids, source, to, target, "here")
    assert not isinstance(caught.value, EngineArgsError)


def test_layers_that_two_engines_hand_out_differently_are_not_renumbered(tmp_path):
    gemma = tiny.target(architectures=["Gemma3ForCausalLM"])
    for name, to in (("sglang", "vllm"), ("speculators", "sglang")):
        source = tiny.write(tmp_path / name, name)
        with pytest.raises(ExportError, match="found Gemma3ForCausalLM: SGLang hands out what each"):
            remap(source, tmp_path / "out", to, target=gemma)
    assert remap(tmp_path / "sglang", tmp_path / "own", "own", target=gemma).out.exists()
    assert remap(tmp_path / "speculators", tmp_path / "vllm", "vllm", target=gemma).out.exists()
