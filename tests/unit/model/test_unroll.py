"""The unroll against a second implementation that decodes slot by slot with a cache, as a server does."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.config import TrainingConfig
from eagle3_core.model.attention import Documents, History, attend, dense
from eagle3_core.model.matrices import Matrices, views
from eagle3_core.model.pointwise import turn as turn_heads
from eagle3_core.model.unroll import Chains, unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.optim import AdamW, StepSums
from tests.unit.model.conftest import MHA
from tests.unit.model.decoders import decoder_of

STEPS = 5


def all_logits(drafter, ids, aux, chains, steps=STEPS):
    return [drafter.logits(carried) for carried in unroll(drafter, ids, aux, chains, steps)]


def supervised_steps_by_definition(mask, slot, most):
    steps = 0
    while steps < most:
        k = steps
        if slot + 2 + k > len(mask) - 1 or not all(mask[slot + 1 + i] for i in range(k + 1)):
            break
        steps += 1
    return steps


def test_every_supervised_logit_equals_cached_decoding_at_every_depth(drafter, packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    with torch.no_grad():
        found = all_logits(drafter, packed.input_ids, packed.aux, chains)
    decoder, row, compared, start = decoder_of(drafter), 0, 0, 0
    for length in packed.lengths:
        part = slice(start, start + length)
        ids, aux, mask = packed.input_ids[part], packed.aux[part], packed.loss_mask[part]
        for slot in range(length):
            steps = supervised_steps_by_definition(mask, slot, STEPS)
            if not steps:
                continue
            for k, expected in enumerate(decoder.chain(ids, aux, slot, steps)):
                torch.testing.assert_close(found[k][row], expected, atol=1e-5, rtol=1e-5)
                compared += 1
            row += 1
        start += length
    assert row == len(chains.rows)
    assert compared > 60


def test_chains_follow_the_definition_of_the_loss_mask(packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    expected, start = {}, 0
    for length in packed.lengths:
        mask = packed.loss_mask[start : start + length]
        for slot in range(length):
            if steps := supervised_steps_by_definition(mask, slot, 99):
                expected[start + slot] = steps
        start += length
    assert dict(zip(chains.rows.tolist(), chains.depth.tolist(), strict=True)) == expected
    first_answer_token = 4
    assert first_answer_token - 1 in expected, "the slot that starts every answer must be trained"


def test_the_label_of_a_chain_at_step_k_is_that_of_the_row_k_further(packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    for step in range(STEPS):
        for row in chains.supervised(step).nonzero().flatten().tolist():
            assert chains.rows[row + step] == chains.rows[row] + step


def test_documents_in_a_row_do_not_see_each_other(drafter, packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    with torch.no_grad():
        before = all_logits(drafter, packed.input_ids, packed.aux, chains)
        ids, aux = packed.input_ids.clone(), packed.aux.clone()
        ids[:13], aux[:13] = (ids[:13] + 1) % 50, aux[:13] + 1
        after = all_logits(drafter, ids, aux, chains)
    other = chains.rows >= 13
    for step in range(STEPS):
        rows = other & chains.supervised(step)
        torch.testing.assert_close(after[step][rows], before[step][rows], atol=0, rtol=0)
        mine = ~other & chains.supervised(step)
        assert not torch.allclose(after[step][mine], before[step][mine])


def test_a_slot_does_not_see_what_comes_after_its_token(drafter, packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    aux = packed.aux.clone().requires_grad_()
    logits = all_logits(drafter, packed.input_ids, aux, chains, 1)[0]
    (grad,) = torch.autograd.grad(logits[2].sum(), aux)
    slot = int(chains.rows[2])
    assert grad[: slot + 1].abs().sum(-1).min() > 0
    assert grad[slot + 1 :].abs().max() == 0


@pytest.mark.parametrize("sizes", [MHA], indirect=True)
@pytest.mark.parametrize("rope", [
    {"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0},
    {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
     "original_max_position_embeddings": 32},
    {"rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "original_max_position_embeddings": 32},
])  # fmt: skip
def test_rope_settings_equal_those_of_transformers(sizes, rope):
    from transformers import LlamaConfig
    from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

    from eagle3_core.model.drafter import Eagle3Drafter

    scaled = sizes.model_copy(update={"rope_parameters": rope})
    drafter = Eagle3Drafter(scaled, torch.zeros(sizes.vocab_size, sizes.hidden_size))
    config = LlamaConfig(hidden_size=32, num_attention_heads=4, head_dim=8, max_position_embeddings=128,
                         rope_parameters=dict(rope))  # fmt: skip
    states, positions = torch.randn(6, 4, 8), torch.tensor([0, 1, 7, 40, 90, 127])
    cos, sin = LlamaRotaryEmbedding(config)(states, positions[None])
    expected, _ = apply_rotary_pos_emb(states.transpose(0, 1)[None], states.transpose(0, 1)[None], cos, sin)
    turned = turn_heads(torch.zeros(6, 32), states.flatten(1), *drafter.rope(positions), 4)
    torch.testing.assert_close(turned.transpose(0, 1), expected[0])


def test_both_attentions_give_the_same_output_and_gradients(packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    rows, tokens, own = len(chains.rows), len(packed.input_ids), 3
    generator = torch.Generator().manual_seed(9)
    shapes = [(rows, 4, 8), (tokens, 2, 8), (tokens, 2, 8), *[(rows, 2, 8)] * (2 * own)]
    results = []
    inputs = [torch.randn(shape, generator=generator) for shape in shapes]
    weight = torch.randn(rows, 32, generator=generator)
    for which in (attend, lambda *a: dense(*a).flatten(1)):
        leaves = [tensor.clone().requires_grad_() for tensor in inputs]
        history = History(leaves[1], leaves[2], chains.documents)
        out = which(leaves[0], history, leaves[3 : 3 + own], leaves[3 + own :])
        results.append([out, *torch.autograd.grad((out * weight).sum(), leaves)])
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, atol=1e-5, rtol=1e-5)


def test_what_asks_of_a_document_is_its_end_from_the_first_chain_on(packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    documents, asking = chains.documents, chains.documents.asking
    found = []
    for index, count in enumerate(documents.chains):
        skipped = int(documents.bounds[index + 1] - documents.bounds[index]) - int(
            asking.bounds[index + 1] - asking.bounds[index]
        )
        found += [
            int(place) - int(asking.bounds[index]) + int(documents.bounds[index]) + skipped
            for place in asking.places[len(found) : len(found) + count]
        ]
    assert found == chains.rows.tolist()
    assert asking.count == int(asking.bounds[-1]) < len(packed.input_ids)
    assert asking.longest == 15, "17 tokens, the first chain is at slot 2"


def test_a_document_without_chains_takes_part_in_nothing():
    keys, values, queries = torch.randn(7, 2, 8), torch.randn(7, 2, 8), torch.randn(1, 2, 8)
    both = Documents.of((4, 3), (0, 1), torch.tensor([5]))
    alone = Documents.of((3,), (1,), torch.tensor([1]))
    torch.testing.assert_close(
        attend(queries, History(keys, values, both), [], []),
        attend(queries, History(keys[4:], values[4:], alone), [], []),
    )


def gradients(drafter, packed, chains):
    sum(
        logits.float().square().mean() for logits in all_logits(drafter, packed.input_ids, packed.aux, chains)
    ).backward()


def test_matrices_sum_the_gradients_autograd_would(drafter, packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    gradients(drafter, packed, chains)
    expected = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    found = attach(drafter, torch.float32)
    gradients(drafter, packed, chains)
    assert set(found) == set(expected)
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, expected[name], atol=1e-5, rtol=1e-4)


def test_a_frozen_head_multiplies_and_has_no_gradient(drafter, packed):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    exact = all_logits(drafter, packed.input_ids, packed.aux, chains)
    drafter.lm_head.weight.requires_grad_(False)
    attach(drafter, torch.float32)
    assert drafter.matrices.gradient("lm_head.weight") is None
    torch.testing.assert_close(all_logits(drafter, packed.input_ids, packed.aux, chains), exact)
    gradients(drafter, packed, chains)
    assert drafter.lm_head.weight.grad is None


def attach(drafter, dtype):
    """Give a drafter the flat buffers of a training run; return the gradients' part of each parameter."""
    alone = Ranks.alone()
    sums, optimizer = StepSums(drafter, STEPS, alone), AdamW(drafter, TrainingConfig(), alone, dtype)
    drafter.matrices = Matrices(drafter, optimizer.weights, sums.gradients)
    return views(sums.gradients, drafter)


def test_half_precision_on_a_cpu_trains_close_to_float32(drafter, packed):
    chains = Chains.build(packed.loss_mask, list(packed.lengths))
    exact = all_logits(drafter, packed.input_ids, packed.aux, chains)
    gradients(drafter, packed, chains)
    expected = {name: parameter.grad.clone() for name, parameter in drafter.named_parameters()}
    found = attach(drafter, torch.bfloat16)
    rough = all_logits(drafter, packed.input_ids, packed.aux, chains)
    assert rough[0].dtype == torch.bfloat16
    for one, other in zip(exact, rough, strict=True):
        assert torch.nn.functional.cosine_similarity(one.flatten(), other.float().flatten(), dim=0) > 0.999
    gradients(drafter, packed, chains)
    for name, gradient in found.items():
        alike = torch.nn.functional.cosine_similarity(gradient.flatten(), expected[name].flatten(), dim=0)
        assert alike > 0.98, name
