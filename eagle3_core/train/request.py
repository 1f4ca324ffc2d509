"""TrainRequest: what the stage hands to the ranks, as one JSON file; and the names of the files they answer with."""

from __future__ import annotations

from pathlib import Path

from eagle3_core.artifacts import Ref
from eagle3_core.config import RunConfig
from eagle3_core.config.base import Section

REQUEST = "request.json"
OUTCOME = "outcome.json"
FINAL = "final"
ERRORS = "errors"


class TrainRequest(Section):
    """One training run: where its inputs are, where its checkpoints go, from which it resumes, where it may write.

    `leads` is false on all machines but the one of the stage.
    """

    root: str
    run: RunConfig
    feature_set: Ref
    vocab_map: Ref
    output: str
    work: Path
    progress: Path
    device: str
    leads: bool = True
    checkpoint: Ref | None = None


class Outcome(Section):
    """How far the ranks came."""

    step: int
    total_steps: int
    tokens: int
    best_step: int
    trainer_tau: float
