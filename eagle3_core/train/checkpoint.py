"""Everything a restart must restore; saved complete or not at all.

A checkpoint is a committed artifact below the output's own key: drafter.safetensors (parameters), optimizer.safetensors
(AdamW moments, random state) and state.json. The newest that verifies is resumed; the last two and the best are kept.
Training waits for the copy to host memory; the disk or bucket takes it beside the next steps. Nothing in it depends on
the number of ranks.
"""

from __future__ import annotations

import json
import logging
import shutil
import time
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import TrainingConfig
from eagle3_core.errors import StoreUnreachableError, TrainingError
from eagle3_core.progress import finite
from eagle3_core.storage import ObjectStore, commit, full_disk_is_typed, load
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.optim import AdamW
from eagle3_core.train.rotation import checkpoint_key, checkpoint_steps, keep_checkpoints
from eagle3_core.train.validate import Validation

PARAMETERS, OPTIMIZER, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
KEPT = 2
WRITES, FIRST_PAUSE_S = 3, 1.0
RANDOM_STATE = "random_state"

LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Best:
    """The best validation so far; `report` is what validation.json will say."""

    step: int
    score: float
    report: dict[str, Any]


@dataclass
class TrainState:
    """Counters of a training run; the order of samples follows from `step` alone, `validated` is the last such step."""

    step: int = 0
    tokens: int = 0
    bad_steps: int = 0
    validated: int = 0
    best: Best | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def consider(self, validation: Validation) -> bool:
        """Take note of a validation, and take it over if it is better than all before; tell whether it was."""
        self.validated = self.step
        if self.best is not None and validation.score <= self.best.score:
            return False
        self.best = Best(self.step, validation.score, finite(validation.report()))
        return True

    @classmethod
    def from_json(cls, text: str) -> TrainState:
        """Read state.json."""
        values = json.loads(text)
        best = values.pop("best")
        values.setdefault("validated", values["step"])  # absent before validations could be put off
        return cls(**values, best=Best(**best) if best else None)

    def to_json(self) -> str:
        """Return state.json."""
        return json.dumps(asdict(self), sort_keys=True, allow_nan=False)


class Checkpoints:
    """Saves what all ranks hold from the leading one; each resumes from the file by itself."""

    def __init__(
        self, store: ObjectStore, output: str, staging: Path, training: TrainingConfig, newest: Ref | None = None
    ) -> None:
        """Keep checkpoints below `<output>/checkpoints`; prepare them in `staging`; `newest` is resumed from."""
        self._store, self._output, self._staging = store, output, staging
        self._training, self._newest = training, newest
        self._saved_at: float | None = None
        self._saved_tokens = 0
        self._writer = ThreadPoolExecutor(1, "checkpoint")
        self._writing: Future[None] | None = None

    def key(self, step: int) -> str:
        """Return where the checkpoint of a step is."""
        return checkpoint_key(self._output, step)

    def parameters(self, step: int) -> dict[str, torch.Tensor]:
        """Return the drafter's parameters of a committed checkpoint."""
        found: dict[str, torch.Tensor] = load_file(load(self._store, self.key(step)).verified_path(PARAMETERS))
        return found

    def resume(self, optimizer: AdamW) -> TrainState:
        """Restore this rank's part of the newest checkpoint, which `rotation.newest_checkpoint` has verified.

        No rank waits for another here, however long the file takes to come.

        Returns:
            Its state, or a new one where there is no checkpoint.

        Raises:
            TrainingError: the checkpoint is of another drafter.
        """
        if self._newest is None:
            return TrainState()
        artifact = load(self._store, self._newest)
        kept = load_file(artifact.path(OPTIMIZER))
        torch.set_rng_state(kept.pop(RANDOM_STATE))
        try:
            optimizer.load(load_file(artifact.path(PARAMETERS)), kept)
        except (KeyError, ValueError):
            raise TrainingError(
                f"{artifact.ref.key}: checkpoint of another drafter; move it away and train again"
            ) from None
        state = TrainState.from_json(artifact.path(STATE).read_text(encoding="utf-8"))
        LOG.info("resumed from the checkpoint of step %d", state.step)
        return state

    def due(self, state: TrainState) -> bool:
        """Tell whether to save after the coming step: the very first one, and when the time or the tokens have come.

        What is only due does not wait for the checkpoint before; the other ranks would wait, too.

        Raises:
            Eagle3Error: the checkpoint before could not be written.
        """
        if self._writing is not None and self._writing.done():
            self.finish()
        return self._writing is None and (state.step == 0 or self._time_or_tokens(state))

    def save(self, optimizer: AdamW, state: TrainState, ranks: Ranks) -> None:
        """Begin a checkpoint; all ranks take part, and the leading one waits until the one before is committed.

        Raises:
            Eagle3Error: the checkpoint before could not be written.
        """
        self.finish()
        parameters, moments = optimizer.collect()
        if not ranks.leads:
            return
        moments[RANDOM_STATE] = torch.get_rng_state()
        self._writing = self._writer.submit(self._write, parameters, moments, state.to_json(), state.step,
                                            state.best.step if state.best else state.step)  # fmt: skip
        self._saved_at, self._saved_tokens = time.monotonic(), state.tokens

    def finish(self) -> None:
        """Wait until what was begun is committed.

        Raises:
            Eagle3Error: it could not be written.
        """
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def _time_or_tokens(self, state: TrainState) -> bool:
        if self._saved_at is None:
            self._saved_at, self._saved_tokens = time.monotonic(), state.tokens
        seconds, tokens = time.monotonic() - self._saved_at, state.tokens - self._saved_tokens
        every = self._training.checkpoint_every_tokens
        return seconds >= self._training.checkpoint_every_s or (every is not None and tokens >= every)

    def _write(
        self, parameters: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], state: str, step: int, best: int
    ) -> None:
        """Write a checkpoint; what a disk or network refuses once is tried again, a full disk is not."""
        cause = ""
        for attempt in range(1, WRITES + 1):
            try:
                return self._write_once(parameters, moments, state, step, best)
            except (OSError, SafetensorError) as error:
                cause = str(error)
                LOG.warning("checkpoint of step %d, attempt %d of %d: %s", step, attempt, WRITES, cause)
                if attempt < WRITES:
                    time.sleep(FIRST_PAUSE_S * 4 ** (attempt - 1))
        raise StoreUnreachableError(
            f"checkpoint of step {step}: not written in {WRITES} attempts: {cause}; the one before is intact, see to "
            f"{self._staging.parent} and {self._store.root}"
        )

    def _write_once(
        self, parameters: dict[str, torch.Tensor], moments: dict[str, torch.Tensor], state: str, step: int, best: int
    ) -> None:
        shutil.rmtree(self._staging, ignore_errors=True)
        try:
            with full_disk_is_typed(self._staging):
                self._staging.mkdir(parents=True)
                save_file(parameters, self._staging / PARAMETERS)
                save_file(moments, self._staging / OPTIMIZER)
                (self._staging / STATE).write_text(state, encoding="utf-8")
            commit(self._store, self.key(step), self._staging, Kind.CHECKPOINT, facts={"step": step})
        finally:
            # On a full disk the room is for the word about it.
            shutil.rmtree(self._staging, ignore_errors=True)
        newest = checkpoint_steps(self._store, self._output)[-KEPT:]
        keep_checkpoints(self._store, self._output, {*newest, best})
