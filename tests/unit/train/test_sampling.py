"""What SGLang accepts at temperature 1, against its definition, token by token over the whole vocab."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.evaluate.trainer import TrainerFigures
from eagle3_core.model import judge
from eagle3_core.model.unroll import Chains, unroll
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.validate import validate


def by_definition(job, learner, samples):
    """Return valid chains, and the sum of their probabilities to be accepted so far, by depth; passes of each sample.

    A draft token is the drafter's likeliest, and the target takes it as often as it would have written it itself.
    """
    depth, ids = job.evaluation.depth, torch.tensor(job.draft_to_target)
    valid, likely, passes = [0] * depth, [0.0] * depth, []
    for sample in (job.features.read(index) for index in samples):
        target = (sample.last_hidden_state @ job.target.head.T).softmax(-1)
        chains = Chains.build(sample.loss_mask, [len(sample.input_ids)])
        product, taken = [1.0] * len(chains.rows), {}
        with torch.no_grad():
            steps = unroll(learner.drafter, sample.input_ids, sample.aux_hidden_states, chains, depth)
            for k, carried in enumerate(steps):
                for row, slot in enumerate(chains.rows.tolist()):
                    if chains.depth[row] <= k:
                        continue
                    token = ids[learner.drafter.logits(carried[row : row + 1])[0].argmax()]
                    product[row] *= float(target[slot + 1 + k, token])
                    taken.setdefault(slot + 1, []).append(product[row])
                    valid[k] += 1
                    likely[k] += product[row]
        reached, longest = [], job.evaluation.max_new_tokens[0]
        for begin, end in answers_of(sample):
            reached.append([taken.get(at, []) for at in range(begin, end)])
        passes.append([sum(mean_passes(one, steps, longest) for one in reached) for steps in range(1, depth + 1)])
    return valid, likely, passes


def answers_of(sample):
    """Return begin and end of each run of the loss mask."""
    mask = sample.loss_mask.tolist()
    begins = [at for at, own in enumerate(mask) if own and not (at and mask[at - 1])]
    return [(at, at + [*mask[at:], False].index(False)) for at in begins]


def mean_passes(reached, steps, longest, known=1):
    """Return the passes still to come, from the end: every count of accepted tokens by its own probability."""
    if known >= min(len(reached), longest):
        return 0.0
    chances = [1.0, *reached[known - 1][:steps], *[0.0] * (steps - len(reached[known - 1])), 0.0]
    return 1.0 + sum(
        (chances[more] - chances[more + 1]) * mean_passes(reached, steps, longest, known + more + 1)
        for more in range(steps + 1)
        if chances[more] > chances[more + 1]
    )


@pytest.mark.parametrize(("at_once", "lengths"), [(judge.AT_ONCE, (64,)), (4 * 24 * 5, (8, 64))])
def test_what_is_accepted_at_temperature_1_is_what_the_target_would_have_written(
    make_job, features, monkeypatch, at_once, lengths
):
    """The first length decides, and is the one replayed; an answer of one token needs no verify pass and counts not."""
    monkeypatch.setattr(judge, "AT_ONCE", at_once)
    for sample in features.samples:
        sample.loss_mask[1] = True
        last = sample.last_hidden_state.mul_(
            0.1
        )  # a target that is not sure, and sometimes of tokens the drafter lacks
        sample.aux_hidden_states[:, -last.shape[1] :] = last.roll(-1, 0)
    job = make_job(lengths)
    learner = Learner.of(job, Ranks.alone())
    found = validate(job, learner, Ranks.alone(), lambda: False)
    assert found.held_out.greedy.valid != found.trained.greedy.valid
    for figures, samples in ((found.held_out, job.held_out), (found.trained, job.probe)):
        valid, likely, passes = by_definition(job, learner, samples)
        assert list(figures.sampling.valid) == valid
        assert figures.sampling.correct == pytest.approx(likely, rel=1e-5)
        assert figures.sampling.tau(5) == pytest.approx(1 + sum(p / v for p, v in zip(likely, valid, strict=True)))
        place = {job.features.sample_ids[sample]: sample for sample in samples}
        for name, wanted in zip(place, passes, strict=True):
            walks = figures.walks_sampling[name]
            assert [walk.verify_passes for walk in walks] == pytest.approx(wanted, rel=1e-5)
            served = [min(end - begin, lengths[0]) for begin, end in answers_of(job.features.read(place[name]))]
            assert min(served) == 1
            assert walks[0].completion_tokens == sum(tokens for tokens in served if tokens > 1)
            assert figures.walks[name][0].completion_tokens == walks[0].completion_tokens
    assert 1.2 < found.held_out.sampling.tau(5) < 5
    report = found.report()
    assert report["max_tokens"] == lengths[0]
    assert 1 < report["by_depth"][2]["tau_chain_sampling"] == TrainerFigures(report).tau_chain(3, sampling=True)
    assert report["by_depth"][2]["tau_chain_sampling"] != report["by_depth"][2]["tau_chain"]
    assert not set(job.held_out) & set(job.probe)
    assert len(job.probe) == len(job.held_out)
