"""The gate on a drafter with multi-latent attention: an absorbed reading against the trainer's, and its mistakes."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.errors import ParityError
from eagle3_core.evaluate.loaders import FUSED_A, LATENT, load
from eagle3_core.evaluate.parity import MAX_LOGIT_DIFFERENCE, ORDER, compare, quiet_controls, require, trained_logits
from eagle3_core.evaluate.reference import LatentReference, Reference

DEPTH = 5
QUIET = {"RoPE standing still", "missing norm", "missing norm of the latent", "kv_b read with values first",
         "RoPE pairing halves"}  # fmt: skip


def differing(world, reference):
    sample = world.samples[0]
    theirs = trained_logits(world.network())(sample, DEPTH)
    ours = reference.unroll(sample.input_ids, sample.aux_hidden_states, DEPTH, rows=sample.rows)
    return float((ours - theirs)[sample.labels(DEPTH) >= 0].abs().max())


def test_the_absorbed_reference_agrees_with_the_trained_network_at_every_step(latent_world):
    reference = latent_world.reference()
    assert isinstance(reference, LatentReference)
    assert differing(latent_world, reference) < 1e-4


def test_each_quiet_mistake_moves_the_logits(latent_world):
    reference = latent_world.reference()
    found = {name: differing(latent_world, wrong) for name, wrong in quiet_controls(reference)}
    assert set(found) == QUIET
    assert min(found.values()) > 10 * MAX_LOGIT_DIFFERENCE, found
    assert set(
        compare(reference, trained_logits(latent_world.network()), latent_world.samples[:1], 2).moved
    ) == QUIET | {ORDER}


@pytest.mark.parametrize("mistake", [
    {"rope_parameters": {"rope_type": "default", "rope_theta": 10.0}}, {"rms_norm_eps": 0.01},
    {"rope_parameters": {"rope_type": "yarn", "rope_theta": 10.0, "factor": 4.0,
                         "original_max_position_embeddings": 16, "mscale": 0.7}},
    "q and kv latents swapped", "norm of the queries' latent", "heads of kv_b",
])  # fmt: skip
def test_a_mistake_in_the_export_fails_on_logits(latent_world, mistake):
    reference = latent_world.reference()
    if isinstance(mistake, dict):
        latent_world.edit_config(**mistake)
        reference = Reference.load(latent_world.directory, latent_world.ends)
    else:
        attention = f"{reference.layer}self_attn."
        name, change = {
            "q and kv latents swapped": (FUSED_A, lambda t: t.roll(14, dims=0)),
            "norm of the queries' latent": (f"{attention}q_a_layernorm.weight", torch.ones_like),
            "heads of kv_b": (f"{attention}kv_b_proj.weight", lambda t: t.roll(13, dims=0)),
        }[mistake]
        weights = {**reference.weights, name: change(reference.weights[name])}
        reference = replace(reference, weights=weights)
    with pytest.raises(ParityError, match="differ by up to"):
        require(compare(reference, trained_logits(latent_world.network()), latent_world.samples[:2], DEPTH))


@pytest.mark.parametrize("prefix", ["midlayer.", "layers.0."])
def test_both_names_of_the_layer_are_understood_and_the_first_projections_become_one(latent_world, prefix):
    latent_world.reference()
    tensors = load_file(latent_world.directory / "model.safetensors")
    found = load({name.replace("midlayer.", prefix): tensor for name, tensor in tensors.items()}, LATENT, "here")
    parts = [tensors[f"midlayer.self_attn.{name}.weight"] for name in ("q_a_proj", "kv_a_proj_with_mqa")]
    assert torch.equal(found[FUSED_A], torch.cat(parts))


@pytest.mark.parametrize(("old", "new"), [
    ("midlayer.", "model.layers.0."), ("midlayer.", "layer."), ("q_a_proj", "q_proj"), ("kv_a_layernorm", "kv_norm"),
    ("lm_head.", "head."), ("d2t", "map"),
])  # fmt: skip
def test_names_the_class_would_drop_are_refused(latent_world, old, new):
    latent_world.reference()
    tensors = load_file(latent_world.directory / "model.safetensors")
    with pytest.raises(ParityError, match="would drop"):
        load({name.replace(old, new): tensor for name, tensor in tensors.items()}, LATENT, "here")


@pytest.mark.parametrize("changes", [
    {"rope_interleave": False}, {"qk_nope_head_dim": 7, "v_head_dim": 6}, {"v_head_dim": 8}, {"kv_lora_rank": 9},
    {"tie_word_embeddings": True}, {"draft_vocab_size": 64},
    {"architectures": ["LlamaForCausalLMEagle3"]}, {"architectures": ["DeepseekV3ForCausalLM"]},
])  # fmt: skip
def test_a_config_that_contradicts_the_weights_is_refused(latent_world, changes):
    latent_world.reference()
    latent_world.edit_config(**changes)
    with pytest.raises(ParityError, match="export again"):
        Reference.load(latent_world.directory, latent_world.ends)
