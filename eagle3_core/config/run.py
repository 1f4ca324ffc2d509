"""RunConfig: every section of one run, and the rules that span sections."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from eagle3_core.config.base import Section, canonical_sha256
from eagle3_core.config.champion import Champion
from eagle3_core.config.data import CaptureConfig, DataConfig
from eagle3_core.config.drafter import DrafterConfig
from eagle3_core.config.evaluation import EvaluationConfig, GateConfig
from eagle3_core.config.serving import ServingConfig
from eagle3_core.config.target import TargetConfig
from eagle3_core.config.training import TrainingConfig


class RunConfig(Section):
    """One run: prompts in, a gated drafter out."""

    name: str = Field(
        "drafter",
        pattern=r"^[a-z0-9][a-z0-9._-]{0,62}$",
        description="Name under which the drafter is published.",
    )
    target: TargetConfig
    data: DataConfig
    capture: CaptureConfig = CaptureConfig()
    drafter: DrafterConfig = DrafterConfig()
    training: TrainingConfig = TrainingConfig()
    serving: ServingConfig = ServingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    gate: GateConfig = GateConfig()
    champion: Champion | None = Field(None, description="Frozen as the run begins; no business of a recipe.")

    @model_validator(mode="after")
    def _sections_agree(self) -> Self:
        if self.data.max_new_tokens >= self.data.max_sample_tokens:
            raise ValueError(
                f"data.max_new_tokens {self.data.max_new_tokens} leaves no room for a prompt in "
                f"data.max_sample_tokens {self.data.max_sample_tokens}"
            )
        return self

    def section(self, name: str) -> Section:
        """Return the section called `name`."""
        value = getattr(self, name)
        assert isinstance(value, Section), name
        return value

    def slice(self, names: tuple[str, ...]) -> dict[str, Any]:
        """Return the identity of sections, or of fields like "evaluation.shapes": what a content name depends on.

        "evaluation.concurrency[0]" is the first of several values alone.
        "champion" is the drafter that is challenged, "start" the one that training starts from, if there is one.
        """
        found: dict[str, Any] = {}
        for name in names:
            if name in ("champion", "start"):
                found |= self._frozen(name)
                continue
            section, _, field = name.partition(".")
            identity = self.section(section).identity()
            value: Any = identity[field.removesuffix("[0]")] if field else identity
            found[name] = value[0] if field.endswith("[0]") else value
        return found

    @property
    def start(self) -> Champion | None:
        """Return the champion if training starts from it."""
        return self.champion if self.training.start_from == "champion" else None

    def _frozen(self, name: str) -> dict[str, Any]:
        if name == "champion" and self.champion is not None:
            return {name: self.champion.model_dump(mode="json")}
        if name == "start" and self.start is not None:
            return {name: [self.start.checkpoint.manifest_sha256, self.training.warm_learning_rate]}
        return {}

    def digest(self) -> str:
        """Return the sha256 of the whole configuration, locations included."""
        return canonical_sha256(self.model_dump(mode="json"))
