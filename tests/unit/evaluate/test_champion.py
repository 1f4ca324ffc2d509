"""Challenger against champion: the figures, and that the word is right as often as it says."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.errors import InputError, NotSpeculatingError
from eagle3_core.evaluate.against import Ratio
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.champion import compare_drafters

TOKENS = 60


def answer(name, passes, seconds=1.0, repeat=0, domain="code", tokens=TOKENS):
    return StreamedAnswer(
        id=name, domain=domain, repeat=repeat, prompt_tokens=3, output_ids=tuple(range(tokens)),
        completion_tokens=tokens, finish_reason="length", verify_passes=passes,
        accept_histogram=None if passes is None else (passes,), latency_s=seconds, ttft_s=0.1, concurrency=1,
        max_new_tokens=tokens, temperature=0.0, empty=False, loop=False,
    )  # fmt: skip


def side(passes, seconds=None, repeats=4, domains=None):
    seconds = seconds or [1.0] * len(passes)
    return [
        answer(f"p{at}", count, seconds[at], repeat, domains[at] if domains else "code")
        for repeat in range(repeats)
        for at, count in enumerate(passes)
    ]


def test_the_figures_are_pooled_over_prompts_and_passes():
    found = compare_drafters("7/1/8", side([20, 30, 30]), side([30, 30, 60]))
    assert found.challenger_acceptance == 3 * TOKENS / 80
    assert found.champion_acceptance == 3 * TOKENS / 120
    assert found.acceptance.ratio == pytest.approx(1.5)
    assert found.speed.ratio == 1.0
    assert (found.prompts, found.passes) == (3, 4)


def test_a_lead_on_every_prompt_is_better_and_the_other_way_round_worse():
    better = [20, 22, 21, 24, 20, 23, 22, 21]
    worse = [count + 6 for count in better]
    assert compare_drafters("s", side(better), side(worse)).word == "better"
    assert compare_drafters("s", side(worse), side(better)).word == "worse"


def test_a_lead_on_half_the_prompts_shows_nothing():
    ours, theirs = [20, 30] * 6, [30, 20] * 6
    assert compare_drafters("s", side(ours), side(theirs)).word == "no difference shown"


def test_accepted_more_and_slower_is_worse():
    ours, theirs = [20] * 10, [24] * 10
    found = compare_drafters("s", side(ours, [2.0] * 10), side(theirs, [1.0] * 10))
    assert (found.acceptance.word, found.speed.word, found.word) == ("better", "worse", "worse")


def test_accepted_as_often_and_faster_is_better():
    found = compare_drafters("s", side([20] * 10, [0.5] * 10), side([20] * 10))
    assert (found.acceptance.word, found.speed.word, found.word) == ("no difference shown", "better", "better")


def test_passes_that_differ_much_leave_a_speed_untold():
    ours = [answer(f"p{at}", 20, 0.5 if repeat == 0 else 1.1, repeat) for repeat in range(4) for at in range(10)]
    theirs = [answer(f"p{at}", 20, 1.0, repeat) for repeat in range(4) for at in range(10)]
    assert compare_drafters("s", ours, theirs).speed.word == "no difference shown"


@pytest.mark.parametrize("repeats", [1, 2])
def test_too_few_passes_leave_a_speed_unknown_and_deciding_nothing(repeats):
    """Two passes that agree by chance would call it better, and the acceptance length tells nothing."""
    found = compare_drafters("s", side([20] * 10, [0.5] * 10, repeats), side([20] * 10, repeats=repeats))
    assert (found.speed.ratio, found.speed.low, found.speed.high, found.speed.word) == (2.0, None, None, "unknown")
    assert (found.word, str(found.speed)) == ("no difference shown", "2.000 times (uncertainty unknown)")
    slower = compare_drafters("s", side([20] * 10, [2.0] * 10, repeats), side([24] * 10, repeats=repeats))
    assert (slower.word, slower.decided[0]) == ("better", "acceptance length")


def test_a_prompt_that_lacks_a_pass_takes_none_from_the_others():
    ours, theirs = side([20] * 10, [0.5] * 10), side([20] * 10)
    found = compare_drafters("s", [one for one in ours if one.id != "p0" or one.repeat < 2], theirs)
    assert (found.passes, found.speed.word) == (4, "better")


@pytest.mark.parametrize(("prompts", "student"), [(4, 3.18), (5, 2.78), (16, 2.13)])
def test_the_interval_of_few_prompts_is_students(prompts, student):
    """Of equal answers that need a little more or less: t times the standard error of the logarithm."""
    widths = []
    for seed in range(6):
        more = np.random.default_rng(seed).normal(size=prompts) * 0.01
        found = compare_drafters("s", side(np.rint(1e5 * np.exp(more)).astype(int).tolist()), side([100_000] * prompts))
        wide = np.log(found.acceptance.high / found.acceptance.low) / 2
        widths.append(wide / (student * more.std(ddof=1) / prompts**0.5))
    assert np.mean(widths) == pytest.approx(1, abs=0.035)


def test_each_domain_has_its_own_figures():
    found = compare_drafters(
        "s", side([20, 20, 30], domains=["a", "a", "b"]), side([30, 30, 30], domains=["a", "a", "b"])
    )
    first, second = found.domains
    assert (first.domain, first.prompts, first.share) == ("a", 2, pytest.approx(1.5))
    assert (second.domain, second.prompts, second.share, second.ratio) == ("b", 1, 1.0, None)


def test_a_prompt_without_a_verify_pass_says_nothing_of_the_acceptance():
    short = answer("short", 0, tokens=1)
    assert compare_drafters("s", [*side([20, 30]), short], [*side([20, 30]), short]).acceptance.ratio == 1.0


def test_one_prompt_is_no_comparison():
    with pytest.raises(InputError, match="at least 2 held-out prompts that both drafters answered"):
        compare_drafters("s", side([20]), side([20]))


def test_other_prompts_are_no_comparison():
    others = [one.model_copy(update={"id": f"other {one.id}"}) for one in side([20, 30])]
    with pytest.raises(InputError, match="found 0"):
        compare_drafters("s", side([20, 30]), others)


def test_missing_counters_are_an_error_and_not_a_tie():
    with pytest.raises(NotSpeculatingError, match="no speculation counters"):
        compare_drafters("s", side([None, None]), side([20, 20]))


@pytest.mark.parametrize(("low", "high", "word"), [(1.01, 1.2, "better"), (0.8, 0.99, "worse"), (0.9, 1.1, "no")])
def test_the_word_is_the_intervals(low, high, word):
    assert Ratio(ratio=1.0, low=low, high=high).word.startswith(word)


counts = st.lists(st.tuples(st.integers(8, 59), st.integers(8, 59)), min_size=2, max_size=30)


@settings(max_examples=60, deadline=None)
@given(counts)
def test_the_interval_holds_the_ratio_and_turns_round_with_the_sides(pairs):
    ours, theirs = [side(list(one)) for one in zip(*pairs, strict=True)]
    there, back = compare_drafters("s", ours, theirs), compare_drafters("s", theirs, ours)
    for found in (there.acceptance, there.speed):
        assert found.low <= found.ratio * (1 + 1e-9)
        assert found.ratio <= found.high * (1 + 1e-9)
    assert there.acceptance.ratio * back.acceptance.ratio == pytest.approx(1)
    assert there.acceptance.low * back.acceptance.high == pytest.approx(1)
    assert {there.word, back.word} in ({"better", "worse"}, {"no difference shown"})


@settings(max_examples=40, deadline=None)
@given(counts)
def test_a_drafter_is_never_told_from_itself(pairs):
    mine = side([one for one, _ in pairs])
    assert compare_drafters("s", mine, mine).word == "no difference shown"


@settings(max_examples=30, deadline=None)
@given(counts, st.integers(1, 5))
def test_fewer_verify_passes_never_make_a_challenger_worse(pairs, fewer):
    order = ["worse", "no difference shown", "better"]
    ours, theirs = [list(one) for one in zip(*pairs, strict=True)]
    before = compare_drafters("s", side(ours), side(theirs)).acceptance
    after = compare_drafters("s", side([count - fewer for count in ours]), side(theirs)).acceptance
    assert after.ratio > before.ratio
    assert order.index(after.word) >= order.index(before.word) or len(pairs) < 4


@pytest.mark.parametrize("prompts", [3, 6, 24])
def test_of_equal_drafters_few_are_called_better(prompts):
    """An interval of 95 % may be wrong on this side once in forty; without the widening three prompts are in seven."""
    random = np.random.default_rng(prompts)
    wrong = 0
    for _ in range(400):
        ours, theirs = random.integers(15, 40, (2, prompts)).tolist()
        wrong += compare_drafters("s", side(ours, repeats=1), side(theirs, repeats=1)).acceptance.word == "better"
    assert wrong <= 400 * 0.045
