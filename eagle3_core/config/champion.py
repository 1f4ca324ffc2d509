"""The champion: the released drafter that a run challenges."""

from __future__ import annotations

from pydantic import Field

from eagle3_core.config.base import Section


class Pinned(Section):
    """An artifact by key and content."""

    key: str
    manifest_sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Champion(Section):
    """A release as it stood when a run began; retries and cleared tasks challenge the same one."""

    drafter: Pinned
    checkpoint: Pinned = Field(description="Its weights in float32, for a warm start.")
    report: Pinned = Field(description="Knows which prompts it was trained on.")
    target_sha256: str = Field(description="Fingerprint of the target it drafts for.")
