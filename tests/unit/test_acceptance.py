from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.errors import NotSpeculatingError
from eagle3_core.evaluate.acceptance import DepthCounts, Walk, chain_walk, expected_passes


def simulate_server(right, num_steps, max_tokens):
    """Emit token by token as SGLang does; right[j][i] tells whether draft i after known token j is the target's."""
    answer = len(right)
    emitted, passes = 1, 0
    while emitted < min(answer, max_tokens):
        passes += 1
        draft, last = 0, emitted - 1
        while draft < num_steps and draft < len(right[last]) and right[last][draft]:
            draft += 1
        for _ in range(draft + 1):
            emitted += 1
    return min(emitted, answer, max_tokens), passes


@given(st.data(), st.integers(1, 8), st.integers(1, 40))
def test_chain_walk_equals_a_token_by_token_simulation(data, num_steps, max_tokens):
    length = data.draw(st.integers(1, 40))
    right = [data.draw(st.lists(st.booleans(), min_size=0, max_size=9)) for _ in range(length)]
    accepted = [next((i for i, ok in enumerate(row) if not ok), len(row)) for row in right]
    walk = chain_walk(accepted, num_steps, max_tokens)
    assert (walk.completion_tokens, walk.verify_passes) == simulate_server(right, num_steps, max_tokens)


@settings(max_examples=30, deadline=None)
@given(st.integers(1, 5), st.integers(1, 3), st.integers(1, 6), st.integers(0, 2**16))
def test_the_passes_to_expect_are_the_mean_over_every_way_it_can_go(tokens, depth, longest, seed):
    """Each draft token of each position is accepted or not, by its own probability: all outcomes, walked one by one."""
    single = np.random.default_rng(seed).uniform(size=(tokens, depth))
    mean = [0.0] * depth
    for outcome in itertools.product(range(depth + 1), repeat=tokens):
        weight = 1.0
        for row, accepted in zip(single, outcome, strict=True):
            weight *= row[:accepted].prod() * (1 - row[accepted] if accepted < depth else 1)
        for steps in range(1, depth + 1):
            mean[steps - 1] += weight * chain_walk(outcome, steps, longest).verify_passes
    assert expected_passes(single.cumprod(axis=1), longest) == pytest.approx(mean)


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30), st.integers(1, 30))
def test_of_a_target_that_is_sure_the_passes_to_expect_are_those_of_the_walk(accepted, longest):
    likely = np.array([[float(count > at) for at in range(4)] for count in accepted])
    walked = [chain_walk(accepted, steps, longest).verify_passes for steps in range(1, 5)]
    assert expected_passes(likely, longest) == walked


def test_the_first_token_costs_no_verify_pass_and_the_last_pass_is_cut():
    assert chain_walk([7] * 8, 7) == Walk(8, 1)
    assert chain_walk([7] * 9, 7) == Walk(9, 1)
    assert chain_walk([7] * 10, 7) == Walk(10, 2)
    assert chain_walk([0] * 10, 7) == Walk(10, 9)
    assert chain_walk([7] * 100, 3, max_tokens=20).completion_tokens == 20


def test_answers_without_a_verify_pass_say_nothing():
    assert Walk.pool([Walk(1, 0), Walk(10, 5)]) == Walk(10, 5)
    with pytest.raises(NotSpeculatingError, match="no verify pass"):
        _ = Walk.pool([Walk(1, 0)]).accept_length


def test_pooling_is_a_ratio_of_sums():
    assert Walk.pool([Walk(10, 10), Walk(90, 10)]).accept_length == 5.0


def test_tau_and_accuracies_from_counts():
    counts = DepthCounts(valid=(10, 8, 4), correct=(5, 2, 0))
    assert counts.full_acc == [0.5, 0.25, 0.0]
    assert counts.cond_acc == [0.5, 0.5, 0.0]
    assert counts.tau(2) == 1.75
    assert DepthCounts((4, 4, 4), (2, 0, 0)).cond_acc == [0.5, 0.0, None]


def test_a_depth_no_chain_reaches_is_an_error():
    with pytest.raises(NotSpeculatingError, match="2 steps deep"):
        _ = DepthCounts((3, 0), (3, 0)).full_acc
