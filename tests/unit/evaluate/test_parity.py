"""The parity gate passes a faithful export, and each mistake has been seen to fail it."""

from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.errors import ParityError
from eagle3_core.evaluate.loaders import LLAMA, load
from eagle3_core.evaluate.parity import (
    MAX_LOGIT_DIFFERENCE,
    MIN_CONTROL_LOSS,
    ORDER,
    compare,
    controls,
    require,
    trained_logits,
)
from eagle3_core.evaluate.reference import Reference
from eagle3_core.stages.parity import Told

DEPTH = 5


def measure(world, reference):
    return compare(reference, trained_logits(world.network()), world.samples, DEPTH)


def test_a_faithful_export_passes_and_drafts_as_the_trained_drafter_does(world):
    parity = measure(world, world.reference())
    require(parity, validation_tau=parity.tau_trainer)
    assert parity.max_logit_difference < 1e-4
    assert parity.argmax_agreement == 1.0
    assert parity.tau_export == parity.tau_trainer
    assert 2.0 < parity.tau_export < 4.0


def test_the_gate_tells_how_far_it_is_from_the_first_sample_to_the_last_mistake(world):
    heard, reference = [], world.reference()
    told = Told(world.samples, heard.append)
    assert compare(reference, trained_logits(world.network()), told, DEPTH) == measure(world, reference)
    assert heard == list(range(len(world.samples) * (1 + len(list(controls(reference)))) + 1))


def test_each_deliberate_mistake_costs_more_than_a_tenth_of_the_gain(world):
    losses = measure(world, world.reference()).losses
    assert set(losses) == {"lm_head zeroed", "d2t absolute", "ids shifted by one", "aux layers out of order"}
    assert min(losses.values()) > 5 * MIN_CONTROL_LOSS


def test_quiet_mistakes_move_the_logits_far_beyond_what_the_gate_looks_for(world):
    parity = measure(world, world.reference())
    assert set(parity.moved) == {"RoPE standing still", "missing norm", ORDER}
    assert min(parity.moved.values()) > 100 * MAX_LOGIT_DIFFERENCE
    with pytest.raises(ParityError, match=r"no power: with RoPE standing still the logits move by 0\.0005"):
        require(parity.model_copy(update={"moved": {"RoPE standing still": 0.0005}}))


def test_the_reference_agrees_with_the_trained_network_on_random_weights_at_every_step(world):
    generator = torch.Generator().manual_seed(3)
    world.own = {name: torch.randn(tensor.shape, generator=generator) / 4 for name, tensor in world.own.items()}
    reference, sample = world.reference(), world.samples[0]
    theirs = trained_logits(world.network())(sample, DEPTH)
    ours = reference.unroll(sample.input_ids, sample.aux_hidden_states, DEPTH, rows=sample.rows)
    known = sample.labels(DEPTH) >= 0
    assert (ours - theirs)[known].abs().max() < 1e-4
    assert known[0].all()
    assert not known[-1].all()


@pytest.mark.parametrize("mistake", ["rope_theta", "rms_norm_eps", "swapped norms", "swapped halves", "missing norm"])
def test_a_mistake_in_the_export_fails_on_logits(world, mistake):
    generator = torch.Generator().manual_seed(3)
    world.own = {name: torch.randn(tensor.shape, generator=generator) / 4 for name, tensor in world.own.items()}
    reference = world.reference()
    if mistake == "rope_theta":
        world.edit_config(rope_parameters={"rope_type": "default", "rope_theta": 12.0})
        reference = Reference.load(world.directory, world.ends)
    elif mistake == "rms_norm_eps":
        world.edit_config(rms_norm_eps=0.01)
        reference = Reference.load(world.directory, world.ends)
    else:
        weights = dict(reference.weights)
        prefix = "model.layers.0."
        if mistake == "swapped norms":
            names = prefix + "input_layernorm.weight", prefix + "hidden_norm.weight"
            weights[names[0]], weights[names[1]] = weights[names[1]], weights[names[0]]
        elif mistake == "swapped halves":
            name = prefix + "self_attn.qkv_proj.weight.q_proj"
            weights[name] = weights[name].roll(weights[name].shape[1] // 2, dims=1)
        else:
            weights["model.norm.weight"] = torch.ones_like(weights["model.norm.weight"])
        reference = replace(reference, weights=weights)
    with pytest.raises(ParityError, match="differ by up to"):
        require(measure(world, reference))


def test_the_controls_are_the_mistakes_they_are_named_for(world):
    named = {name: (wrong, mistake) for name, wrong, mistake in controls(world.reference())}
    sample = world.samples[0]
    assert not named["lm_head zeroed"][0].weights["lm_head.weight"].any()
    assert torch.equal(named["d2t absolute"][0].target_ids, world.reference().target_ids + torch.arange(56))
    assert torch.equal(named["ids shifted by one"][1](sample).input_ids[1:], sample.input_ids[:-1])
    aux = sample.aux_hidden_states
    low, middle, high = aux[:, :16], aux[:, 16:32], aux[:, 32:]
    wrong = [mistake(sample).aux_hidden_states for name, _, mistake in controls(world.reference()) if "order" in name]
    expected = [(middle, high, low), (high, low, middle), (high, middle, low)]
    assert all(torch.equal(one, torch.cat(order, dim=1)) for one, order in zip(wrong, expected, strict=True))


def test_a_drafter_too_weak_to_be_told_from_a_broken_one_fails_the_gate(world):
    world.own["lm_head.weight"] = torch.zeros_like(world.own["lm_head.weight"])
    with pytest.raises(ParityError, match="no power"):
        require(measure(world, world.reference()))


@pytest.mark.parametrize(("tau", "loss"), [(1.05, 0.9), (2.5, 0.05)], ids=["nothing to lose", "nothing lost"])
def test_a_control_that_costs_nothing_worth_losing_fails_the_gate(world, tau, loss):
    parity = measure(world, world.reference())
    weak = parity.model_copy(update={"tau_export": tau, "tau_trainer": tau, "losses": {"lm_head zeroed": loss}})
    with pytest.raises(ParityError, match="no power: with lm_head zeroed"):
        require(weak)


@pytest.mark.parametrize(
    ("loss", "moved", "sound"), [(0.09, 2.0, True), (0.09, 0.05, False), (0.0, 2.0, False), (0.11, 0.05, True)]
)
def test_an_order_of_layers_that_costs_little_must_at_least_be_plain_in_the_logits(world, loss, moved, sound):
    found = measure(world, world.reference())
    parity = found.model_copy(update={
        "losses": found.losses | {ORDER: loss}, "moved": found.moved | {ORDER: moved}
    })  # fmt: skip
    if sound:
        require(parity)
    else:
        with pytest.raises(ParityError, match=f"no power: with {ORDER}"):
            require(parity)


def test_another_tau_than_the_trainer_wrote_fails_the_gate(world):
    parity = measure(world, world.reference())
    with pytest.raises(ParityError, match="validation of the checkpoint"):
        require(parity, validation_tau=parity.tau_export * 1.02)


def test_nan_weights_fail_the_gate(world):
    world.own["norm.weight"] = torch.full((16,), 1e30)
    world.own["lm_head.weight"] = world.own["lm_head.weight"] * 1e30
    with pytest.raises(ParityError, match="NaN or infinite"):
        measure(world, world.reference())


def test_no_sample_to_compare_on_is_an_error(world):
    world.samples = []
    with pytest.raises(ParityError, match="no held-out sample"):
        measure(world, world.reference())


@pytest.mark.parametrize(
    ("old", "new"), [("midlayer.", "layers.0."), ("midlayer.", "model.layers.0."), ("midlayer.", "model.midlayer.")]
)
def test_names_sglang_understands_are_understood(world, old, new):
    world.reference()
    tensors = load_file(world.directory / "model.safetensors")
    renamed = {name.replace(old, new): tensor for name, tensor in tensors.items()}
    assert set(load(renamed, LLAMA, "here")) == set(load(tensors, LLAMA, "here"))


@pytest.mark.parametrize(("old", "new"), [("midlayer.", "layer."), ("fc.", "_orig_mod.fc."), ("lm_head.", "head.")])
def test_names_sglang_would_drop_are_refused(world, old, new):
    world.reference()
    tensors = load_file(world.directory / "model.safetensors")
    save_file({name.replace(old, new): t for name, t in tensors.items()}, world.directory / "model.safetensors")
    with pytest.raises(ParityError, match="would drop"):
        Reference.load(world.directory, world.ends)


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_word_embeddings": True},
        {"draft_vocab_size": 64},
        {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3]}},
        {"architectures": ["LlamaForCausalLM"]},
    ],
)
def test_a_config_that_contradicts_the_weights_is_refused(world, changes):
    world.reference()
    world.edit_config(**changes)
    with pytest.raises(ParityError, match="export again"):
        Reference.load(world.directory, world.ends)
