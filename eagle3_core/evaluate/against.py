"""Challenger against champion: what was compared, the word that the intervals allow, what a champion has learnt."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from eagle3_core.artifacts import Kind
from eagle3_core.config.base import Section
from eagle3_core.config.champion import Champion
from eagle3_core.releases import opened
from eagle3_core.storage import ObjectStore, load

CHALLENGE_FILE = "challenge.json"
TRAINED_ON_FILE = "trained_on.txt"
"""Beside a report: what its drafter, and all it started from, were trained on, a digest of each conversation a line."""

Standing = Literal["better", "worse", "no difference shown"]
State = Literal["compared", "no champion", "other target", "same drafter"]


def learnt(store: ObjectStore, champion: Champion) -> frozenset[str]:
    """Return the conversations that a champion, and all it started from, were trained on."""
    report = load(store, opened(Kind.EVAL_REPORT, champion.report))
    return frozenset(report.verified_path(TRAINED_ON_FILE).read_text(encoding="utf-8").split())


class Ratio(Section):
    """The challenger's figure over the champion's, with its 95 % interval over prompts (and passes, for speed)."""

    ratio: float = Field(gt=0)
    low: float | None = Field(gt=0, description="None: too few passes to know how a machine drifts between them.")
    high: float | None = Field(gt=0)

    @property
    def word(self) -> Standing | Literal["unknown"]:
        """Return what the interval allows to say."""
        if self.low is None or self.high is None:
            return "unknown"
        if self.low > 1:
            return "better"
        return "worse" if self.high < 1 else "no difference shown"

    def __str__(self) -> str:
        """Return for example `1.04 times (1.01 to 1.07)`."""
        if self.low is None or self.high is None:
            return f"{self.ratio:.3f} times (uncertainty unknown)"
        return f"{self.ratio:.3f} times ({self.low:.3f} to {self.high:.3f})"


class DomainAgainst(Section):
    """One domain of prompts that both served."""

    domain: str
    prompts: int
    challenger: float = Field(description="Acceptance length, pooled.")
    champion: float
    ratio: Ratio | None = Field(description="None: a single prompt has no interval.")

    @property
    def share(self) -> float:
        """Return the challenger's acceptance length as a share of the champion's."""
        return self.challenger / self.champion


class Against(Section):
    """Both drafters at one shape, on the same prompts."""

    shape: str
    prompts: int
    passes: int
    acceptance: Ratio
    speed: Ratio
    challenger_acceptance: float
    champion_acceptance: float
    challenger_tokens_per_s: float = Field(description="Tokens of single answers per second of their latency, pooled.")
    champion_tokens_per_s: float
    domains: tuple[DomainAgainst, ...]

    @property
    def word(self) -> Standing:
        """Return worse if acceptance or speed is, better if at least one of them is and the other is not worse.

        A speed of unknown uncertainty decides nothing.
        """
        words = {self.acceptance.word, self.speed.word}
        if "worse" in words:
            return "worse"
        return "better" if "better" in words else "no difference shown"

    @property
    def decided(self) -> tuple[str, Ratio]:
        """Return the figure whose word is the whole comparison's, by name; the acceptance length where both are."""
        figures = {"acceptance length": self.acceptance, "speed": self.speed}
        return next((name, one) for name, one in figures.items() if one.word == self.word)


class Challenge(Section):
    """What came of a run's challenge; `challenge.json`."""

    schema_version: Literal["eagle3/challenge/2"] = "eagle3/challenge/2"
    state: State
    said: str = Field(description="The state in words.")
    champion: str | None = Field(None, description="Key of the champion's drafter.")
    left_out: int = Field(0, description="Held-out prompts of this run that the champion was trained on; not asked.")
    order: tuple[str, ...] = Field((), description="Whose server ran, in this order, with the passes of each.")
    against: Against | None = None
