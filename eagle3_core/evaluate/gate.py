"""Judge a drafter: figures, thresholds and the champion in, a verdict with reasons out. Pure.

An unknown figure is an error.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.evaluation import GateConfig
from eagle3_core.errors import NotSpeculatingError
from eagle3_core.evaluate.against import Against, DomainAgainst, Standing

DEAD_BELOW = 1.05
"""Below this acceptance length the drafter proposes nothing useful, however good the answers look."""


Word = Literal["faster", "slower", "no difference shown", "drafter dead"]
"""What an interval of the speed allows to say."""


class Figures(Section):
    """What the primary shape measured."""

    shape: str
    acceptance_length: float | None = Field(description="SGLang's, pooled; None: the server counted nothing.")
    trainer_tau: float | None = Field(description="The trainer's chain replay at the same depth.")
    speedup: float | None = Field(description="Output tokens per second against no speculation.")
    word: Word | None = Field(None, description="What prompts and passes allow to say of that speed.")
    equal_answers: int = Field(ge=0)
    near_ties: int = Field(0, ge=0, description="Answers that part at a near-tie of the target's; they count as equal.")
    unknown_gaps: int = Field(0, ge=0, description="Answers that part where nobody looked how close the tokens were.")
    compared_answers: int = Field(ge=0)


class Check(Section):
    """One threshold, met or not."""

    name: str
    threshold: float
    found: float
    passed: bool
    reason: str


class Verdict(Section):
    """All checks must pass; `summary` is one sentence for people."""

    passed: bool
    checks: tuple[Check, ...]
    summary: str
    standing: Standing | None = Field(None, description="Against the champion; None: there was none to compare with.")


def judge(figures: Figures, gate: GateConfig, against: Against | None = None) -> Verdict:
    """Compare every figure with its threshold, and with the champion where there is one.

    Raises:
        NotSpeculatingError: a figure is unknown; unknown is never taken for 0 or 1.
    """
    acceptance = _known(figures.acceptance_length, "acceptance length", figures.shape)
    trainer_tau = _known(figures.trainer_tau, "trainer tau", figures.shape)
    speedup = _known(figures.speedup, "speedup", figures.shape)
    if acceptance < 1 or trainer_tau < 1:
        raise NotSpeculatingError(
            f"{figures.shape}: an acceptance length is at least 1, found {acceptance} and trainer tau {trainer_tau}"
        )
    if figures.compared_answers == 0:
        raise NotSpeculatingError(f"{figures.shape}: no answer was compared with its counterpart without speculation")
    agreement = (figures.equal_answers + figures.near_ties) / figures.compared_answers
    disagreement = abs(acceptance - trainer_tau) / trainer_tau
    checks: tuple[Check, ...] = (
        _at_least("acceptance length", acceptance, gate.min_acceptance_length, "served acceptance length"),
        _at_least("speedup", speedup, gate.min_speedup, "speed against no speculation"),
        _at_most("tau disagreement", disagreement, gate.max_tau_disagreement,
                 f"served {acceptance:.2f} against the trainer's {trainer_tau:.2f}"),
        _at_least("equal answers", agreement, gate.min_token_agreement,
                  f"{figures.equal_answers} of {figures.compared_answers} answers equal token by token, "
                  f"{figures.near_ties} part at a near-tie, {figures.unknown_gaps} where no gap is known"),
    )  # fmt: skip
    summary = f"at {figures.shape} acceptance length {acceptance:.2f}, {_pace(speedup, figures.word)}"
    if against is not None:
        checks += tuple(_against(against, gate))
        summary += f"; {_told(against)}"
    passed = all(check.passed for check in checks)
    return Verdict(
        passed=passed, checks=checks, summary=_summary(figures.shape, acceptance, summary, checks),
        standing=against.word if against else None,
    )  # fmt: skip


def _against(against: Against, gate: GateConfig) -> Iterator[Check]:
    """Yield the checks against the champion; a domain of few prompts decides nothing."""
    name, decided = against.decided
    yield Check(
        name="lead over the champion", threshold=1.0, found=decided.ratio,
        passed=against.word == "better" or (against.word, gate.no_difference) == ("no difference shown", "promote"),
        reason=f"found: the {name}; {_told(against)}, over {against.prompts} prompts; "
        f"gate.no_difference: {gate.no_difference}",
    )  # fmt: skip
    deciding = [one for one in against.domains if one.prompts >= gate.min_domain_prompts]
    if deciding:
        worst = min(deciding, key=lambda one: one.share)
        yield _at_least("every domain", worst.share, gate.min_domain_ratio, _in_domain(worst, len(deciding)))


def _in_domain(worst: DomainAgainst, domains: int) -> str:
    return (f"least of {domains} domains, {worst.domain} ({worst.prompts} prompts): acceptance length "
            f"{worst.challenger:.2f} against {worst.champion:.2f}, as a share")  # fmt: skip


def _told(against: Against) -> str:
    untold = ", which a larger evaluation.repeats would tell" if against.speed.word == "unknown" else ""
    return f"against the champion {against.word}: acceptance length {against.acceptance}, speed {against.speed}{untold}"


def _pace(speedup: float, word: Word | None) -> str:
    if word == "no difference shown":
        return f"{speedup:.2f} times the speed of no speculation, which these prompts and passes do not tell from 1"
    if speedup < 1:
        return f"slower than no speculation ({speedup:.2f} times its speed)"
    return f"{speedup:.2f} times the speed of no speculation"


def _known(value: float | None, name: str, shape: str) -> float:
    if value is None or not math.isfinite(value):
        raise NotSpeculatingError(f"{shape}: {name} is unknown ({value}); a gate cannot judge what nobody measured")
    return value


def _at_least(name: str, found: float, threshold: float, what: str) -> Check:
    passed = found >= threshold
    return Check(name=name, threshold=threshold, found=found, passed=passed,
                 reason=f"{what}: {found:.3g}, at least {threshold:.3g} asked")  # fmt: skip


def _at_most(name: str, found: float, threshold: float, what: str) -> Check:
    passed = found <= threshold
    return Check(name=name, threshold=threshold, found=found, passed=passed,
                 reason=f"{what}: {found:.1%} apart, at most {threshold:.1%} allowed")  # fmt: skip


def _summary(shape: str, acceptance: float, figures: str, checks: tuple[Check, ...]) -> str:
    failed = [check.name for check in checks if not check.passed]
    if acceptance < DEAD_BELOW:
        return (f"Refused: at {shape} the drafter contributes nothing (acceptance length {acceptance:.2f}); check the "
                "parameter names, d2t, the aux layers and that the algorithm is EAGLE3.")  # fmt: skip
    head = f"Refused for {', '.join(failed)}" if failed else "Passed"
    return f"{head}: {figures}."
