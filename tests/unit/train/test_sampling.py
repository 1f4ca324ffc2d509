"""Expected acceptance at temperature 1 against its definition, token by token over the whole vocab."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.model import judge
from eagle3_core.model.unroll import Chains, unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.validate import validate


def by_definition(job, learner, samples):
    """Return valid chains, and the sum of their probabilities to be accepted so far, by depth."""
    depth, ids = job.evaluation.depth, torch.tensor(job.draft_to_target)
    valid, likely = [0] * depth, [0.0] * depth
    for sample in (job.features.read(index) for index in samples):
        target = (sample.last_hidden_state @ job.target.head.T).softmax(-1)
        chains = Chains.build(sample.loss_mask, [len(sample.input_ids)])
        product = [1.0] * len(chains.rows)
        with torch.no_grad():
            steps = unroll(learner.drafter, sample.input_ids, sample.aux_hidden_states, chains, depth)
            for k, carried in enumerate(steps):
                for row, slot in enumerate(chains.rows.tolist()):
                    if chains.depth[row] <= k:
                        continue
                    drafter = torch.zeros(len(job.target.head))
                    drafter[ids] = learner.drafter.logits(carried[row : row + 1])[0].softmax(-1)
                    product[row] *= float(torch.minimum(target[slot + 1 + k], drafter).sum())
                    valid[k] += 1
                    likely[k] += product[row]
    return valid, likely


@pytest.mark.parametrize("at_once", [judge.AT_ONCE, 4 * 24 * 5])
def test_expected_acceptance_is_that_of_the_definition(make_job, features, monkeypatch, at_once):
    monkeypatch.setattr(judge, "AT_ONCE", at_once)
    for sample in features.samples:
        last = sample.last_hidden_state.mul_(
            0.1
        )  # a target that is not sure, and sometimes of tokens the drafter lacks
        sample.aux_hidden_states[:, -last.shape[1] :] = last.roll(-1, 0)
    job = make_job()
    learner = Learner.of(job, Ranks.alone())
    found = validate(job, learner, Ranks.alone(), lambda: False)
    assert found.held_out.greedy.valid != found.trained.greedy.valid
    for figures, samples in ((found.held_out, job.held_out), (found.trained, job.probe)):
        valid, likely = by_definition(job, learner, samples)
        assert list(figures.sampling.valid) == valid
        assert figures.sampling.correct == pytest.approx(likely, rel=1e-5)
        assert figures.sampling.tau(5) == pytest.approx(1 + sum(p / v for p, v in zip(likely, valid, strict=True)))
    assert 1.2 < found.held_out.sampling.tau(5) < 5
    assert not set(job.held_out) & set(job.probe)
    assert len(job.probe) == len(job.held_out)
