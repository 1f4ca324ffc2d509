"""What the trainer said a server would measure, pooled over exactly the answers somebody else looked at. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_core.errors import ArtifactError
from eagle3_core.evaluate.acceptance import Walk


@dataclass(frozen=True)
class TrainerFigures:
    """The content of a checkpoint's `validation.json`."""

    values: Mapping[str, Any]

    def tau_chain(self, num_steps: int, ids: Iterable[str] | None = None, *, sampling: bool = False) -> float:
        """Return completion tokens per verify pass of a chain of `num_steps`, over `ids` or over all samples.

        Greedy, or to be expected where the target samples at temperature 1.

        Raises:
            ArtifactError: the trainer did not look that deep, or at none of these samples.
        """
        samples: Mapping[str, Any] = self.values["samples"]
        if num_steps > self.values["depth"]:
            raise ArtifactError(f"validation.json: depth {self.values['depth']} is less than {num_steps}; train again")
        names = self.shared(samples if ids is None else ids)
        if not names:
            raise ArtifactError("validation.json: expected figures of the served held-out samples, found none of them")
        passes = "verify_passes_sampling" if sampling else "verify_passes"
        walks = (Walk(samples[name]["completion_tokens"], samples[name][passes][num_steps - 1]) for name in names)
        return Walk.pool(walks).accept_length

    def shared(self, ids: Iterable[str]) -> list[str]:
        """Return those of `ids` that the trainer looked at."""
        return [name for name in ids if name in self.values["samples"]]
