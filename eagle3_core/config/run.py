"""RunConfig: every section of one run, and the rules that span sections."""

from __future__ import annotations

from typing import Any, Self

from pydantic import Field, model_validator

from eagle3_core.config.base import Section, canonical_sha256
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
        """Return the identity of sections, or of fields like "evaluation.shapes": what a content name depends on."""
        found: dict[str, Any] = {}
        for name in names:
            section, _, field = name.partition(".")
            identity = self.section(section).identity()
            found[name] = identity[field] if field else identity
        return found

    def digest(self) -> str:
        """Return the sha256 of the whole configuration, locations included."""
        return canonical_sha256(self.model_dump(mode="json"))
