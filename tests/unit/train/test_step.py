"""Two steps of training against the definition: sample by sample, loss by loss, with autograd and torch's own AdamW."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.model.unroll import Chains, unroll
from eagle3_core.storage import open_store
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.loader import batches
from eagle3_core.train.loop import train
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.trackers import Trackers
from eagle3_core.train.validate import by_answer

STEPS = 2


class Kept(Trackers):
    """Keeps what each step reports."""

    def __init__(self):
        super().__init__()
        self.losses, self.valid, self.correct = [], [], []

    def stepped(self, state, report):
        self.losses.append(report.loss)
        self.valid.append(report.valid.tolist())
        self.correct.append(report.correct.tolist())


def divergence(logits, label, kind):
    p, log_q = label.softmax(-1), logits.log_softmax(-1)
    kl = (p * (label.log_softmax(-1) - log_q)).sum()
    overlap = torch.minimum(p, log_q.exp()).sum()
    imitate = torch.exp(-3 * overlap).detach()
    return kl if kind == "kl" else imitate * kl + (1 - imitate) * (1 - overlap)


def sum_of_losses(job, drafter, sample, valid, correct):
    """Return one sample's loss and its chains; count valid and correct ones by depth."""
    training, ids = job.training, torch.tensor(job.draft_to_target)
    weights = [training.step_decay**k for k in range(training.ttt_steps)]
    full = sample.last_hidden_state @ job.target.head.T
    chains = Chains.build(sample.loss_mask, [len(sample.input_ids)])
    total, good = torch.zeros(()), [True] * len(chains.rows)
    steps = unroll(drafter, sample.input_ids, sample.aux_hidden_states, chains, training.ttt_steps)
    for k, carried in enumerate(steps):
        for row, slot in enumerate(chains.rows.tolist()):
            if chains.depth[row] <= k:
                continue
            label, logits = full[slot + 1 + k], drafter.logits(carried[row : row + 1])[0]
            good[row] &= int(ids[logits.argmax()]) == int(label.argmax())
            valid[k] += 1
            correct[k] += good[row]
            if int(label.argmax()) in job.draft_to_target:
                total = total + weights[k] / sum(weights) * divergence(logits, label[ids], training.loss)
    return total, len(chains.rows)


def by_definition(job):
    drafter, _ = job.build(torch.device("cpu"))
    parts = [[p for p in drafter.parameters() if (p.ndim > 1) is matrices] for matrices in (True, False)]
    optimizer = torch.optim.AdamW(
        [{"params": parts[0], "weight_decay": job.training.weight_decay}, {"params": parts[1], "weight_decay": 0.0}],
        betas=job.training.betas,
    )
    kept = Kept()
    for step in range(STEPS):
        valid, correct = ([0] * job.training.ttt_steps for _ in range(2))
        samples = [job.features.read(index) for row in job.order.rows(step) for index in row]
        found = [sum_of_losses(job, drafter, sample, valid, correct) for sample in samples]
        loss = sum(total for total, _ in found) / sum(count for _, count in found)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(drafter.parameters(), job.training.max_grad_norm)
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, job.order.total_steps, job.training)
        optimizer.step()
        kept.losses.append(loss.item())
        kept.valid.append(valid)
        kept.correct.append(correct)
    return dict(drafter.named_parameters()), kept


@pytest.mark.parametrize("loss", ["kl", "lk"])
def test_two_steps_of_training_are_those_of_the_definition(make_job, features, tmp_path, loss):
    for index, sample in enumerate(features.samples):
        # What the drafter passes on is right at depth 0 in one sample and at depth 1 alone in the next.
        last = sample.last_hidden_state
        sample.aux_hidden_states[:, -last.shape[1] :] = last.roll(-1 - index % 2, 0)
    job, kept = make_job(loss=loss, weight_decay=1.0, max_grad_norm=0.05, step_decay=0.5), Kept()
    checkpoints = Checkpoints(open_store(str(tmp_path)), "train/x", tmp_path / "staging", job.training)
    asked = iter([*[False] * (STEPS - 1), True])
    train(job, Ranks.alone(), checkpoints, kept, lambda: next(asked))
    expected, by_hand = by_definition(job)
    assert kept.losses == pytest.approx(by_hand.losses, rel=1e-4)
    assert (kept.valid, kept.correct) == (by_hand.valid, by_hand.correct)
    assert kept.correct[0][0] > 0
    for name, found in checkpoints.parameters(STEPS).items():
        torch.testing.assert_close(found, expected[name], atol=2e-5, rtol=1e-4, msg=lambda text, name=name: name + text)


def test_accept_lengths_belong_to_the_token_the_chain_reads_first(make_job, features):
    job = make_job()
    (batch,) = batches(features, [(0, 1)], torch.device("cpu"), job.dtype)
    found = by_answer(batch, batch.chains.rows + 1)
    start = 0
    for (answer,), length in zip(found, batch.lengths, strict=True):
        # Nothing follows the last token, so no chain reads it.
        assert answer.tolist() == [*range(start + 3, start + length - 1), 0]
        start += length
