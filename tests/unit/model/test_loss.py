from __future__ import annotations

import pytest
import torch

from eagle3_core.model.loss import TargetHead, judge_step, step_weights
from eagle3_core.model.unroll import Chains, unroll

STEPS = 4


def ask(head, draft_to_target, states):
    target = TargetHead.of(head, draft_to_target)
    return target.teach(states, target.greedy(states))


def total_loss(drafter, packed, head, draft_to_target, lengths, part, kind="kl"):
    """Summed loss and joint correct counts of the documents in `part`."""
    ids, mask, aux, last = (t[part] for t in (packed.input_ids, packed.loss_mask, packed.aux, packed.last))
    chains = Chains.build(mask, lengths)
    teacher = ask(head, draft_to_target, last[(chains.rows + 1)])
    loss, right, joint = torch.zeros(()), [], torch.ones(len(chains.rows), dtype=torch.bool)
    weights = step_weights(STEPS, 0.8)
    for step, carried in enumerate(unroll(drafter, ids, aux, chains, STEPS)):
        judged = judge_step(drafter.logits(carried), teacher, chains.supervised(step), step, kind)
        loss, joint = loss + weights[step] * judged.loss, joint & judged.correct
        right.append(int(joint.sum()))
    return loss, right


@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_packed_loss_and_gradient_equal_unpacked(drafter, packed, head, draft_to_target, kind):
    whole, right = total_loss(drafter, packed, head, draft_to_target, packed.lengths, slice(None), kind)
    whole.backward()
    packed_grads = {name: p.grad.clone() for name, p in drafter.named_parameters()}
    drafter.zero_grad()
    parts, counts, start = torch.zeros(()), [0] * STEPS, 0
    for length in packed.lengths:
        if bool(packed.loss_mask[start : start + length].any()):
            loss, found = total_loss(
                drafter, packed, head, draft_to_target, [length], slice(start, start + length), kind
            )
            parts, counts = parts + loss, [a + b for a, b in zip(counts, found, strict=True)]
        start += length
    parts.backward()
    torch.testing.assert_close(parts, whole)
    assert counts == right
    for name, p in drafter.named_parameters():
        torch.testing.assert_close(p.grad, packed_grads[name], atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("chains", [1, 2, 3, 5])
def test_a_row_of_fewer_chains_than_steps_is_judged_as_deep_as_it_is(sizes, head, draft_to_target, chains):
    teacher = ask(head, draft_to_target, torch.randn(chains, sizes.hidden_size))
    logits = torch.randn(chains, sizes.draft_vocab_size, requires_grad=True)
    for step in range(chains, 2 * chains + 1):
        judged = judge_step(logits, teacher, torch.zeros(chains, dtype=torch.bool), step)
        assert judged.loss == 0
        assert not judged.correct.any()


@torch.no_grad()
def test_the_loss_is_the_kl_divergence_written_out(drafter, packed, head, draft_to_target):
    chains = Chains.build(packed.loss_mask, packed.lengths)
    teacher = ask(head, draft_to_target, packed.last[chains.rows + 1])
    logits = [drafter.logits(carried) for carried in unroll(drafter, packed.input_ids, packed.aux, chains, STEPS)]
    for step in range(STEPS):
        expected = 0.0
        for row, slot in enumerate(chains.rows.tolist()):
            if chains.depth[row] <= step:
                continue
            full = head @ packed.last[slot + 1 + step]
            if int(full.argmax()) not in draft_to_target.tolist():
                continue
            p = torch.exp(full[draft_to_target]) / torch.exp(full[draft_to_target]).sum()
            q = logits[step][row].softmax(-1)
            expected += float((p * (p.log() - q.log())).sum())
        found = judge_step(logits[step], teacher, chains.supervised(step), step).loss
        assert float(found) == pytest.approx(expected, rel=1e-4)


def test_rows_without_label_give_no_gradient_and_may_hold_nan(sizes, draft_to_target, head):
    teacher = ask(head, draft_to_target, torch.randn(6, sizes.hidden_size))
    supervised = torch.tensor([True, False, True, False, True, False])
    logits = torch.randn(6, sizes.draft_vocab_size)
    for kind in ("kl", "lk"):
        bad = logits.clone()
        bad[1] = float("nan")
        assert bool(judge_step(bad, teacher, supervised, 0, kind).loss.isfinite())
    for kind in ("kl", "lk"):
        asked = logits.clone().requires_grad_()
        judge_step(asked, teacher, supervised, 1, kind).loss.backward()
        used = torch.cat((supervised[:5] & (teacher.token[1:] >= 0), torch.tensor([False])))
        assert bool((asked.grad[~used] == 0).all())
        assert bool((asked.grad[used].abs().sum(-1) > 0).all())


def test_a_greedy_token_outside_the_draft_vocab_has_no_loss_and_counts_as_a_miss(sizes, draft_to_target, head):
    outside = next(i for i in range(sizes.vocab_size) if i not in draft_to_target.tolist())
    inside = int(draft_to_target[4])
    teacher = ask(head, draft_to_target, torch.stack((head[outside], head[inside])) * 99)
    assert teacher.token.tolist() == [-1, 4]
    logits = torch.zeros(2, sizes.draft_vocab_size)
    logits[:, 4] = 5.0
    judged = judge_step(logits, teacher, torch.tensor([True, True]), 0)
    assert judged.correct.tolist() == [False, True]
    alone = judge_step(logits, teacher, torch.tensor([False, True]), 0)
    assert judged.loss == alone.loss


def test_lk_falls_to_zero_with_full_overlap(sizes, draft_to_target, head):
    states = torch.randn(3, sizes.hidden_size, generator=torch.Generator().manual_seed(4))
    teacher = ask(head, draft_to_target, states)
    perfect = (states @ head.T)[:, draft_to_target]
    everything = torch.ones(3, dtype=torch.bool)
    assert float(judge_step(perfect, teacher, everything, 0, "lk").loss) == pytest.approx(0, abs=1e-4)
    assert float(judge_step(-perfect, teacher, everything, 0, "lk").loss) > 0.1


def test_step_weights_sum_to_one():
    assert sum(step_weights(7, 0.8)) == pytest.approx(1)
    weights = step_weights(3, 0.5)
    assert weights[1] / weights[0] == pytest.approx(0.5)


def test_a_head_goes_to_half_precision_only_if_that_rounds_nothing(draft_to_target, head):
    cpu = torch.device("cpu")
    exact = TargetHead.of(head.bfloat16().float(), draft_to_target)
    assert exact.to(cpu, torch.bfloat16).rows.dtype == torch.bfloat16
    assert TargetHead.of(head, draft_to_target).to(cpu, torch.bfloat16).rows.dtype == torch.float32


def test_teacher_is_softmax_over_the_draft_vocab_and_greedy_over_the_whole(draft_to_target, head):
    states = torch.randn(40, head.shape[1], generator=torch.Generator().manual_seed(7))
    teacher = ask(head, draft_to_target, states)
    logits = states @ head.T
    torch.testing.assert_close(teacher.probabilities, logits[:, draft_to_target].softmax(-1))
    torch.testing.assert_close(teacher.entropy, -(teacher.probabilities * teacher.probabilities.log()).sum(-1))
    places = {int(token): index for index, token in enumerate(draft_to_target)}
    assert teacher.token.tolist() == [places.get(int(token), -1) for token in logits.argmax(-1)]
    assert -1 in teacher.token
