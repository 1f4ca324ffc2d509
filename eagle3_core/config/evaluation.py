"""What is measured on real SGLang, and what decides."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, field_validator, model_validator

from eagle3_core.config.base import Section
from eagle3_core.config.sweep import BenchPlan
from eagle3_core.errors import ConfigError


class DraftShape(Section):
    """SGLang's three numbers, always set together: steps / topk / draft tokens."""

    num_steps: int = Field(ge=1, le=64, description="Draft forward passes per verify pass.")
    topk: int = Field(1, ge=1, le=64, description="Branches per step; 1 is a chain.")
    num_draft_tokens: int = Field(ge=2, le=1024, description="Tokens verified at once, the root included.")

    @property
    def name(self) -> str:
        """Return for example `7/1/8`."""
        return f"{self.num_steps}/{self.topk}/{self.num_draft_tokens}"

    @classmethod
    def from_name(cls, name: str) -> DraftShape:
        """Read `7/1/8`."""
        return cls.model_validate(name)

    @model_validator(mode="before")
    @classmethod
    def _may_be_a_name(cls, value: object) -> object:
        if not isinstance(value, str):
            return value
        parts = value.split("/")
        if len(parts) != 3 or not all(part.strip().isdigit() for part in parts):
            raise ValueError(f"expected steps/topk/draft tokens like 7/1/8, found {value!r}")
        return dict(zip(("num_steps", "topk", "num_draft_tokens"), map(int, parts), strict=True))

    @model_validator(mode="after")
    def _what_sglang_does_not_check(self) -> Self:
        if self.topk == 1 and self.num_draft_tokens != self.num_steps + 1:
            chain, tree = f"{self.num_draft_tokens - 1}/1/{self.num_draft_tokens}", self._tree()
            raise ValueError(
                f"{self.name}: at topk 1 the draft is a chain, and SGLang would silently verify steps+1 = "
                f"{self.num_steps + 1} tokens, not {self.num_draft_tokens}; ask for the longer chain {chain}"
                f"{f', or for the tree {tree}' if tree else ''}, or for {self.num_steps}/1/{self.num_steps + 1}"
            )
        most = most_tokens(self.num_steps, self.topk)
        if self.num_draft_tokens > most:
            raise ValueError(
                f"{self.name}: {self.num_steps} steps at topk {self.topk} yield a tree of at most {most} tokens "
                f"(1 + topk + (steps-1)*topk^2), where SGLang ends with `selected index k out of range`; ask for "
                f"{self.num_steps}/{self.topk}/{most} or fewer"
            )
        return self

    def _tree(self) -> str:
        """Return a tree of as many tokens and steps, empty where none is large enough."""
        fitting = (topk for topk in (2, 4, 8) if self.num_draft_tokens <= most_tokens(self.num_steps, topk))
        topk = next(fitting, None)
        return f"{self.num_steps}/{topk}/{self.num_draft_tokens}" if topk else ""


def most_tokens(num_steps: int, topk: int) -> int:
    """Return how many tokens a draft tree can hold, the root included."""
    return 1 + topk + (num_steps - 1) * topk**2


SimulatedLength = Annotated[float, Field(ge=1)]
Concurrency = Annotated[int, Field(ge=1, le=1024)]
Temperature = Annotated[float, Field(ge=0, le=2)]
AnswerTokens = Annotated[int, Field(ge=8)]


class EvaluationConfig(Section):
    """Which draft shapes are served, on how many held-out prompts."""

    shapes: tuple[DraftShape, ...] = Field(
        (
            DraftShape(num_steps=3, topk=1, num_draft_tokens=4),
            DraftShape(num_steps=5, topk=1, num_draft_tokens=6),
            DraftShape(num_steps=7, topk=1, num_draft_tokens=8),
            DraftShape(num_steps=5, topk=4, num_draft_tokens=16),
        ),
        min_length=1,
        description="Draft shapes to measure, beside no speculation. Training judges by them: others train anew.",
    )
    primary: str = Field("7/1/8", description="The shape that decides, in training too: another trains anew.")
    simulated_lengths: tuple[SimulatedLength, ...] = Field(
        (),
        description="Acceptance lengths that SGLang pretends at the primary shape, each on a server of its own, e.g. "
        "[1.5, 2.5, 4]: the report then draws which length would pay. Empty: none.",
    )
    max_prompts: int = Field(80, ge=1, description="Held-out prompts served per shape.")
    max_new_tokens: tuple[AnswerTokens, ...] = Field(
        (256,),
        min_length=1,
        description="Longest answer in tokens, one or several, e.g. 256 or [256, 1024]. The first decides, in "
        "training too: another first one trains anew.",
    )
    concurrency: tuple[Concurrency, ...] = Field(
        (1,),
        min_length=1,
        description="Requests in flight, one or several to sweep over, e.g. 8 or [1, 8, 32]. The first decides: there "
        "the trainer's estimate and the gate are held to.",
    )
    temperatures: tuple[Temperature, ...] = Field(
        (0.0,),
        min_length=1,
        description="Sampling temperatures; 0, greedy, comes first and decides, [0, 1] samples too. One server a shape "
        "measures every temperature at every length and concurrency. Not on a CPU, where SGLang verifies greedily.",
    )
    repeats: int = Field(
        1,
        ge=1,
        le=20,
        description="Passes over the prompts; the median speed counts. With 1 the machine's drift is unknown: speed's "
        "intervals assume 15 %, and speed decides nothing against a champion; 2 tell little, 3 or more well.",
    )

    @field_validator("concurrency", "max_new_tokens", "temperatures", mode="before")
    @classmethod
    def _one_is_a_sweep_of_one(cls, value: object) -> object:
        """Take `[1, 8]`, a single 8, and the text `1, 8` that a form sends."""
        if isinstance(value, str):
            return tuple(part.strip() for part in value.strip("[] ").split(","))
        return (value,) if isinstance(value, int | float) else value

    @model_validator(mode="after")
    def _points_are_different(self) -> Self:
        for name in ("concurrency", "max_new_tokens", "temperatures"):
            values = getattr(self, name)
            if len(set(values)) != len(values):
                raise ValueError(f"{name} {list(values)}: expected each once")
        if self.temperatures[0] != 0:
            raise ValueError(
                f"temperatures {list(self.temperatures)}: expected 0 first: the gate, the trainer's estimate and the "
                "comparison with the champion are about greedy answers; add the others after it"
            )
        return self

    @model_validator(mode="after")
    def _prompts_fill_the_sweep(self) -> Self:
        if max(self.concurrency) > self.max_prompts:
            raise ValueError(
                f"concurrency {max(self.concurrency)}: expected at least as many prompts, found max_prompts "
                f"{self.max_prompts}; raise it, or sweep less far"
            )
        return self

    @model_validator(mode="after")
    def _primary_is_measured(self) -> Self:
        if self.primary not in {shape.name for shape in self.shapes}:
            raise ValueError(f"primary {self.primary} is not among the shapes {[s.name for s in self.shapes]}")
        return self

    @model_validator(mode="after")
    def _primary_is_a_chain(self) -> Self:
        if self.primary_shape.topk != 1:
            raise ValueError(f"primary {self.primary}: expected a chain (topk 1): the trainer predicts no tree")
        return self

    @model_validator(mode="after")
    def _simulated_lengths_can_be_drafted(self) -> Self:
        most = self.primary_shape.num_draft_tokens
        if self.simulated_lengths and max(self.simulated_lengths) > most:
            raise ValueError(
                f"simulated_lengths {list(self.simulated_lengths)}: expected at most the {most} tokens that "
                f"{self.primary} verifies"
            )
        return self

    def require_prompts(self, held_out: int) -> None:
        """Refuse a sweep that so many held-out prompts cannot fill.

        Raises:
            ConfigError: fewer prompts than requests to be in flight.
        """
        if max(self.concurrency) > held_out:
            raise ConfigError(
                f"evaluation.concurrency {max(self.concurrency)}: expected as many held-out prompts, found {held_out}; "
                "raise data.held_out_fraction, or sweep less far"
            )

    @property
    def plan(self) -> BenchPlan:
        """Return what a server without speculation is asked, or one of any shape; the first point decides."""
        return BenchPlan(
            concurrency=self.concurrency, max_new_tokens=self.max_new_tokens, temperatures=self.temperatures,
            repeats=self.repeats,
        )  # fmt: skip

    @property
    def plans(self) -> list[BenchPlan]:
        """Return what each server of a run is asked: that without speculation, each shape's, each pretended length's.

        How much a run serves is their sum, whoever asks.
        """
        # What a server pretends is no text: where it would end, or what it would sample, means nothing.
        pretending = self.plan.first.model_copy(update={"concurrency": self.concurrency, "ignore_eos": True})
        return [self.plan] * (1 + len(self.shapes)) + [pretending] * len(self.simulated_lengths)

    @property
    def told(self) -> str:
        """Return in words how much is served, for people to judge how long that may be."""
        passes = sum(plan.passes for plan in self.plans)
        longest = sum(cell.max_new_tokens for plan in self.plans for cell in plan.cells) * self.repeats
        return (f"{passes:,} passes over {self.max_prompts:,} prompts or fewer, by {len(self.plans)} servers; at most "
                f"{longest * self.max_prompts:,} answer tokens")  # fmt: skip

    @property
    def primary_shape(self) -> DraftShape:
        """Return the shape that decides."""
        return next(shape for shape in self.shapes if shape.name == self.primary)

    @property
    def depth(self) -> int:
        """Return the deepest chain any shape asks for: the depth at which the trainer reports tau."""
        return max(shape.num_steps for shape in self.shapes)


class GateConfig(Section):
    """What a drafter must reach to be published; where there is a champion, it must also be better."""

    min_acceptance_length: float = Field(1.5, ge=1, description="Least acceptance length at the primary shape.")
    min_speedup: float = Field(0.0, ge=0, description="Least speed against no speculation at the primary shape.")
    max_tau_disagreement: float = Field(
        0.10, gt=0, lt=1, description="Largest relative difference of SGLang's acceptance length and the trainer's tau."
    )
    min_token_agreement: float = Field(
        0.99, ge=0, le=1, description="Least share of answers equal, token by token, to those without speculation."
    )
    near_tie_gap: float = Field(
        0.25,
        ge=0,
        description="Answers that part where the target's logits of the two tokens, in float32, are at most this far "
        "from the best count as equal: half precision decides such near-ties by how many tokens it computes at once. "
        "Targets of over a billion parameters are not looked at.",
    )
    no_difference: Literal["keep", "promote"] = Field(
        "keep",
        description="What happens where a challenger passes all else and neither its acceptance length nor its speed "
        "can be told from the champion's.",
    )
    min_domain_ratio: float = Field(
        0.95, ge=0, le=1, description="Least acceptance length in a domain, as a share of the champion's there."
    )
    min_domain_prompts: int = Field(
        8, ge=1, description="Domains with fewer prompts served by both are shown and decide nothing."
    )
