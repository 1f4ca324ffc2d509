"""Everything a restart must restore; saved complete or not at all.

A checkpoint is a committed artifact below the output's own key: drafter.safetensors (parameters), optimizer.safetensors
(AdamW moments, random state) and state.json. The newest that verifies is resumed; the last two and the best are kept.
Training waits for the copy to host memory; the disk or bucket takes it beside the next steps.
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
from safetensors.torch import load_file, save_file
from torch import nn

from eagle3_core.artifacts import Kind
from eagle3_core.config import TrainingConfig
from eagle3_core.errors import ArtifactError, TrainingError
from eagle3_core.storage import ObjectStore, commit, full_disk_is_typed, load, quarantine, verify
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.optim import AdamW
from eagle3_core.train.rotation import checkpoint_key, checkpoint_steps, keep_checkpoints
from eagle3_core.train.validate import Validation

PARAMETERS, OPTIMIZER, STATE = "drafter.safetensors", "optimizer.safetensors", "state.json"
KEPT = 2
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
    """Counters of a training run; the order of samples follows from `step` alone."""

    step: int = 0
    tokens: int = 0
    bad_steps: int = 0
    best: Best | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)

    def consider(self, validation: Validation) -> bool:
        """Take over a validation that is better than all before; tell whether it was."""
        if self.best is not None and validation.score <= self.best.score:
            return False
        self.best = Best(self.step, validation.score, validation.report())
        return True

    @classmethod
    def from_json(cls, text: str) -> TrainState:
        """Read state.json."""
        values = json.loads(text)
        best = values.pop("best")
        return cls(**values, best=Best(**best) if best else None)

    def to_json(self) -> str:
        """Return state.json."""
        return json.dumps(asdict(self), sort_keys=True)


class Checkpoints:
    """Saves from the leading rank, resumes on all."""

    def __init__(
        self, store: ObjectStore, output: str, staging: Path, training: TrainingConfig, *, leads: bool = True
    ) -> None:
        """Keep checkpoints below `<output>/checkpoints`; prepare them in `staging`."""
        self._store, self._output, self._staging = store, output, staging
        self._training, self._leads = training, leads
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

    def resume(self, drafter: nn.Module, optimizer: AdamW, ranks: Ranks) -> TrainState:
        """Restore the newest checkpoint that verifies, on every rank; damaged ones are quarantined.

        Returns:
            Its state, or a new one where there is no checkpoint.

        Raises:
            TrainingError: the checkpoint is of another drafter.
        """
        text = self._restore(drafter, optimizer) if self._leads else ""
        length = torch.tensor([len(text.encode())], device=ranks.device)
        ranks.broadcast(length)
        if not int(length):
            return TrainState()
        encoded = text.encode() if self._leads else bytes(int(length))
        message = torch.frombuffer(bytearray(encoded), dtype=torch.uint8).to(ranks.device)
        ranks.broadcast(message)
        state = TrainState.from_json(bytes(message.tolist()).decode())
        optimizer.share(ranks)
        return state

    def save_if_due(self, drafter: nn.Module, optimizer: AdamW, state: TrainState, *, now: bool = False) -> None:
        """Begin a checkpoint when asked to, after the very first step, and when the time or the tokens have come.

        One that is only due does not wait for the one before; the other ranks would wait, too.

        Raises:
            Eagle3Error: the checkpoint before could not be written.
        """
        if not self._leads:
            return
        if self._writing is not None and self._writing.done():
            self.finish()
        if now or (self._writing is None and (state.step == 1 or self._due(state))):
            self.finish()
            self._writing = self._writer.submit(self._write, *_copy(drafter, optimizer), state.to_json(), state.step,
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

    def _due(self, state: TrainState) -> bool:
        if self._saved_at is None:
            self._saved_at, self._saved_tokens = time.monotonic(), state.tokens
        seconds, tokens = time.monotonic() - self._saved_at, state.tokens - self._saved_tokens
        every = self._training.checkpoint_every_tokens
        return seconds >= self._training.checkpoint_every_s or (every is not None and tokens >= every)

    def _write(
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

    def _restore(self, drafter: nn.Module, optimizer: AdamW) -> str:
        for step in reversed(checkpoint_steps(self._store, self._output)):
            try:
                artifact = verify(self._store, self.key(step))
            except ArtifactError as error:
                LOG.warning("checkpoint of step %d set aside: %s", step, error)
                quarantine(self._store, self.key(step), str(error))
                continue
            found = load_file(artifact.path(PARAMETERS))
            wanted = dict(drafter.named_parameters())
            if {name: tensor.shape for name, tensor in found.items()} != {n: p.shape for n, p in wanted.items()}:
                raise TrainingError(f"{artifact.ref.key}: checkpoint of another drafter; move it away and train again")
            with torch.no_grad():
                for name, parameter in wanted.items():
                    parameter.copy_(found[name])
            kept = load_file(artifact.path(OPTIMIZER))
            torch.set_rng_state(kept.pop(RANDOM_STATE))
            optimizer.load(kept)
            text = artifact.path(STATE).read_text(encoding="utf-8")
            LOG.info("resumed from the checkpoint of step %d", step)
            return text
        return ""


def _copy(drafter: nn.Module, optimizer: AdamW) -> tuple[dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Return copies in host memory of all parameters, and of moments and random state; training may go on."""
    parameters = {name: parameter.detach().to("cpu", copy=True) for name, parameter in drafter.named_parameters()}
    moments = {name: tensor.to("cpu", copy=True) for name, tensor in optimizer.state().items()}
    return parameters, {**moments, RANDOM_STATE: torch.get_rng_state()}
