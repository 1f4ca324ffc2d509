"""One small training step with the drafter's own heads: what does not run is known before capture."""

from __future__ import annotations

import math
import time
from dataclasses import dataclass

import torch

from eagle3_core.config import RunConfig
from eagle3_core.data.features import FeatureSample
from eagle3_core.errors import TrainingError
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.target_weights import TargetWeights
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches

V, U, D, F = 512, 256, 128, 256
LENGTHS = (150, 40)
PROMPT = 12


@dataclass(frozen=True)
class _RandomFeatures:
    num_aux: int
    lengths: tuple[int, ...] = LENGTHS
    supervised: tuple[int, ...] = tuple(length - PROMPT for length in LENGTHS)
    held_out: tuple[bool, ...] = (False, False)
    sample_ids: tuple[str, ...] = ("long", "short")

    def read(self, index: int) -> FeatureSample:
        length = self.lengths[index]
        states = torch.randn(length, (1 + self.num_aux) * D)
        mask = torch.arange(length) >= PROMPT
        return FeatureSample(torch.randint(0, V, (length,)), mask, states[:, D:], states[:, :D])


def try_training(run: RunConfig, sizes: DrafterArchitecture, device: str) -> dict[str, float]:
    """Train one step on `device` as the run would; the widths are small, heads and precision are the drafter's.

    Returns:
        The seconds it took, most of them a compiler's on a GPU.

    Raises:
        TrainingError: it does not run there, or its gradient is not finite.
    """
    began = time.monotonic()
    small = sizes.model_copy(update={"hidden_size": D, "intermediate_size": F, "vocab_size": V, "draft_vocab_size": U})
    head = torch.randn(V, D)
    target = TargetWeights(torch.randn(V, D), head, torch.ones(D))
    features = _RandomFeatures(len(sizes.aux_layers))
    job = TrainJob(run.training, run.evaluation, small, features, target, tuple(range(U)), run.drafter.train_lm_head)
    try:
        norm = _step(job, torch.device(device))
    except Exception as error:  # compilers and drivers raise what they like
        cause = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise TrainingError(
            f"a training step with {sizes.num_heads} heads of {sizes.head_dim} in {run.training.precision} does not "
            f"run on {device}: {type(error).__name__}: {cause[:300]}"
        ) from error
    if not math.isfinite(norm):
        raise TrainingError(f"a training step on {device} on random states has a gradient of norm {norm}")
    return {"seconds": round(time.monotonic() - began, 1)}


def _step(job: TrainJob, device: torch.device) -> float:
    learner = Learner.of(job, Ranks.alone(device.type))
    for batch in batches(job.features, [(0, 1)], device, job.dtype):
        learner.accumulate(batch)
    learner.update(job.training.learning_rate)
    return learner.sums.read()["norm"]
