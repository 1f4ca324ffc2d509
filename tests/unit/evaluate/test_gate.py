"""The gate: thresholds, reasons, and figures nobody measured."""

import pytest

from eagle3_core.config import GateConfig
from eagle3_core.errors import NotSpeculatingError
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
