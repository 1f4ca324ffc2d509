"""References to what stages write. Small, JSON, tensor-free: all that travels between tasks."""

from __future__ import annotations

from enum import StrEnum
from typing import Any

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.errors import ArtifactError


class Kind(StrEnum):
    """The artifacts, in the order in which a run makes them."""

    PREFLIGHT = "preflight"
    PROMPT_SET = "prompt_set"
    CORPUS = "corpus"
    VOCAB_MAP = "vocab_map"
    SHARD_PLAN = "shard_plan"
    SHARD = "shard"
    FEATURE_SET = "feature_set"
    CHECKPOINT = "checkpoint"
    DRAFTER = "drafter"
    PARITY = "parity"
    MEASUREMENT = "measurement"
    CHALLENGE = "challenge"
    EVAL_REPORT = "eval_report"
    RELEASE = "release"


class Ref(Section):
    """Where an artifact is and what it is: under 1 KB, safe in XCom."""

    kind: Kind
    key: str = Field(
        description="Path below the root, for example train/3f9c...; the manifest lies at key/manifest.json."
    )
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    facts: dict[str, Any] = Field(default_factory=dict, description="A few numbers worth seeing in XCom.")

    def expect(self, kind: Kind) -> Ref:
        """Return self if it is of `kind`.

        Raises:
            ArtifactError: a task was wired to the wrong upstream.
        """
        if self.kind != kind:
            raise ArtifactError(f"expected a {kind} reference, found {self.kind} at {self.key}; check the task wiring")
        return self
