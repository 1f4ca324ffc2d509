"""The gate: thresholds, reasons, and figures nobody measured."""

import pytest

from eagle3_core.config import GateConfig
from eagle3_core.errors import NotSpeculatingError
from eagle3_core.evaluate.against import Against, DomainAgainst, Ratio
from eagle3_core.evaluate.comparison import Difference
from eagle3_core.evaluate.gate import Figures, judge
from eagle3_core.evaluate.report import near_ties

GOOD = {"shape": "7/1/8", "acceptance_length": 2.5, "trainer_tau": 2.45, "speedup": 1.3, "equal_answers": 20,
        "compared_answers": 20}  # fmt: skip


def verdict(gate=None, **changes):
    return judge(Figures(**{**GOOD, **changes}), gate or GateConfig(min_acceptance_length=2.0, min_speedup=1.0))


def failed(given):
    return [check.name for check in given.checks if not check.passed]


def test_a_good_drafter_passes_with_a_reason_for_every_check():
    good = verdict()
    assert good.passed
    assert [check.name for check in good.checks] == [
        "acceptance length", "speedup", "tau disagreement", "equal answers",
    ]  # fmt: skip
    assert all(check.reason for check in good.checks)


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"acceptance_length": 1.9, "trainer_tau": 1.9}, "acceptance length"),
        ({"speedup": 0.9}, "speedup"),
        ({"trainer_tau": 2.9}, "tau disagreement"),
        ({"equal_answers": 19}, "equal answers"),
    ],
)
def test_each_threshold_refuses_by_itself_and_is_named(changes, name):
    refused = verdict(**changes)
    assert not refused.passed
    assert failed(refused) == [name]
    assert name in refused.summary


def test_answers_that_part_at_a_near_tie_count_as_equal_and_are_named():
    passed = verdict(equal_answers=16, near_ties=4)
    assert passed.passed
    assert passed.checks[-1].reason.startswith("16 of 20 answers equal token by token, 4 part at a near-tie")
    assert failed(verdict(equal_answers=16, near_ties=3)) == ["equal answers"]


def test_only_a_small_known_gap_of_the_shape_is_a_near_tie():
    one = Difference(id="p", shape="7/1/8", position=1, baseline_token=1, token=2, tokens=4)
    found = [one.model_copy(update={"logit_gap": gap}) for gap in (0.1, 0.25, 0.26, None)]
    found.append(one.model_copy(update={"logit_gap": 0.1, "shape": "3/1/4"}))
    assert near_ties(found, "7/1/8", 0.25) == 2


@pytest.mark.parametrize("value", [None, "nan"])
@pytest.mark.parametrize("name", ["acceptance_length", "trainer_tau", "speedup"])
def test_an_unknown_figure_is_an_error_never_a_number(name, value):
    figures = Figures(**GOOD).model_copy(update={name: None if value is None else float(value)})
    with pytest.raises(NotSpeculatingError, match="unknown"):
        judge(figures, GateConfig())


def test_an_acceptance_length_below_one_is_an_error():
    with pytest.raises(NotSpeculatingError, match="at least 1"):
        verdict(acceptance_length=0.4)


def test_no_compared_answer_is_an_error_not_full_agreement():
    with pytest.raises(NotSpeculatingError, match="no answer was compared"):
        verdict(equal_answers=0, compared_answers=0)


def test_a_dead_drafter_is_called_dead_with_what_to_check():
    dead = verdict(acceptance_length=1.0, trainer_tau=2.4)
    assert not dead.passed
    assert "contributes nothing" in dead.summary
    assert "d2t" in dead.summary


def test_slower_than_no_speculation_is_said_even_where_the_gate_allows_it():
    slow = verdict(GateConfig(min_acceptance_length=2.0, min_speedup=0.0), speedup=0.8)
    assert slow.passed
    assert "slower than no speculation" in slow.summary


def test_a_speed_that_the_passes_do_not_tell_from_one_is_not_called_slower():
    unsure = verdict(GateConfig(min_acceptance_length=2.0, min_speedup=0.0), speedup=0.8, word="no difference shown")
    assert "0.80 times the speed of no speculation, which these prompts and passes do not tell from 1" in unsure.summary
    assert "slower" not in unsure.summary


def test_a_served_length_far_above_the_estimate_is_as_suspicious_as_one_far_below():
    assert failed(verdict(acceptance_length=3.2, trainer_tau=2.45)) == ["tau disagreement"]


BETTER, WORSE, SAME = (1.05, 1.02, 1.08), (0.95, 0.92, 0.98), (1.01, 0.97, 1.05)
UNKNOWN = (1.3, None, None)


def ratio(values):
    return Ratio(ratio=values[0], low=values[1], high=values[2])


def against(acceptance=BETTER, speed=SAME, domains=((20, 2.5, 2.4), (9, 2.1, 2.2))):
    return Against(
        shape="7/1/8", prompts=29, passes=2, acceptance=ratio(acceptance), speed=ratio(speed),
        challenger_acceptance=2.5, champion_acceptance=2.4, challenger_tokens_per_s=100.0, champion_tokens_per_s=99.0,
        domains=tuple(
            DomainAgainst(domain=f"d{at}", prompts=count, challenger=ours, champion=theirs, ratio=None)
            for at, (count, ours, theirs) in enumerate(domains)
        ),
    )  # fmt: skip


def challenged(given, **gate):
    return judge(Figures(**GOOD), GateConfig(min_acceptance_length=2.0, **gate), given)


def test_a_challenger_that_is_better_and_passes_all_else_is_promoted():
    found = challenged(against())
    assert (found.passed, found.standing) == (True, "better")
    assert [check.name for check in found.checks][-2:] == ["lead over the champion", "every domain"]
    assert "against the champion better: acceptance length 1.050 times (1.020 to 1.080)" in found.summary


@pytest.mark.parametrize(
    ("acceptance", "speed", "word", "kept", "promoted"),
    [
        (BETTER, BETTER, "better", True, True),
        (BETTER, SAME, "better", True, True),
        (SAME, BETTER, "better", True, True),
        (SAME, SAME, "no difference shown", False, True),
        (WORSE, SAME, "worse", False, False),
        (SAME, WORSE, "worse", False, False),
        (WORSE, BETTER, "worse", False, False),
        (BETTER, WORSE, "worse", False, False),
        (BETTER, UNKNOWN, "better", True, True),
        (SAME, UNKNOWN, "no difference shown", False, True),
        (WORSE, UNKNOWN, "worse", False, False),
    ],
)
def test_every_pair_of_words_has_one_outcome_by_each_setting(acceptance, speed, word, kept, promoted):
    given = against(acceptance, speed)
    for setting, passed in (("keep", kept), ("promote", promoted)):
        found = challenged(given, no_difference=setting)
        assert (found.standing, found.passed) == (word, passed)
        assert failed(found) == ([] if passed else ["lead over the champion"])


@pytest.mark.parametrize(
    ("acceptance", "speed", "name", "shown"),
    [
        (BETTER, SAME, "acceptance length", 1.05),
        (SAME, BETTER, "speed", 1.05),
        (BETTER, WORSE, "speed", 0.95),
        (WORSE, WORSE, "acceptance length", 0.95),
        (SAME, SAME, "acceptance length", 1.01),
        (SAME, UNKNOWN, "acceptance length", 1.01),
    ],
)
def test_the_lead_shown_is_that_of_the_figure_that_decided(acceptance, speed, name, shown):
    check = next(one for one in challenged(against(acceptance, speed)).checks if one.name == "lead over the champion")
    assert check.found == shown
    assert check.reason.startswith(f"found: the {name}; ")
    assert ("a larger evaluation.repeats would tell" in check.reason) == (speed == UNKNOWN)


def test_better_does_not_outweigh_a_threshold():
    found = judge(Figures(**{**GOOD, "trainer_tau": 2.9}), GateConfig(), against())
    assert failed(found) == ["tau disagreement"]


def test_a_domain_that_falls_too_far_refuses_what_is_better_on_the_whole():
    found = challenged(against(domains=((20, 2.8, 2.4), (8, 2.0, 2.2))))
    assert failed(found) == ["every domain"]
    assert "d1 (8 prompts): acceptance length 2.00 against 2.20" in found.checks[-1].reason
    assert challenged(against(domains=((20, 2.8, 2.4), (8, 2.1, 2.2)))).passed
    assert challenged(against(domains=((20, 2.8, 2.4), (8, 2.0, 2.2))), min_domain_ratio=0.9).passed


def test_a_domain_of_few_prompts_decides_nothing():
    few = against(domains=((20, 2.8, 2.4), (7, 1.0, 2.2)))
    assert challenged(few).passed
    assert failed(challenged(few, min_domain_prompts=7)) == ["every domain"]
    assert "every domain" not in [check.name for check in challenged(against(domains=((7, 1.0, 2.2),))).checks]


def test_without_a_champion_the_thresholds_alone_decide():
    found = challenged(None)
    assert (found.passed, found.standing) == (True, None)
    assert "champion" not in found.summary
