"""What a run will cost, before anything runs: bytes, tasks, GPU-hours. Arithmetic only."""

from __future__ import annotations

import math
from dataclasses import dataclass

DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True)
class Workload:
    """What is to be captured and trained.

    `tokens` is prompt plus answer tokens of all samples; `target_parameters` those active for one token. Without
    `attention_parameters` the drafter's attention counts as heads of full width.
    """

    samples: int
    tokens: int
    hidden_size: int
    num_aux: int = 3
    dtype: str = "bfloat16"
    fp8: str = "none"
    target_parameters: float = 0.0
    intermediate_size: int = 0
    draft_vocab_size: int = 32000
    ttt_steps: int = 7
    epochs: float = 2.0
    attention_parameters: int = 0


@dataclass(frozen=True)
class Estimate:
    """Bytes, tasks and GPU-hours of a workload."""

    feature_bytes: int
    bytes_per_token: int
    shards: int
    capture_tasks: int
    capture_gpu_hours: float
    train_gpu_hours: float
    checkpoint_bytes: int


def feature_bytes_per_token(hidden_size: int, num_aux: int, dtype: str, fp8: str = "none") -> int:
    """Return the most bytes one token takes in a feature set: A aux states and the last one, plus its id and mask.

    A token whose last hidden state is not stored takes less.
    """
    aux, last = (1 if fp8 in known else DTYPE_BYTES[dtype] for known in (("aux", "all"), ("all",)))
    scales = 4 * (num_aux * (fp8 != "none") + (fp8 == "all"))
    return (num_aux * aux + last) * hidden_size + scales + 5


def drafter_parameters(work: Workload) -> int:
    """Return the trained parameters of the drafter's matrices."""
    d = work.hidden_size
    attention = work.attention_parameters or 2 * d * 3 * d + d * d
    mlp = 3 * d * (work.intermediate_size or 4 * d)
    return work.num_aux * d * d + attention + mlp + work.draft_vocab_size * d


def estimate(
    work: Workload, *, shard_tokens: int, max_tasks: int, gpu_tflops: float = 790.0, utilisation: float = 0.4
) -> Estimate:
    """Return the cost of `work`.

    Capture is one forward pass of the target: 2 FLOPs a parameter and token. Training is forward and backward of the
    drafter at every TTT step: 6 FLOPs a parameter, token and step (fc once). Both at `utilisation` of `gpu_tflops`,
    which is a bf16 matrix product on one H200 (measured, 790 TFLOP/s).
    """
    per_token = feature_bytes_per_token(work.hidden_size, work.num_aux, work.dtype, work.fp8)
    shards = max(1, math.ceil(work.tokens / shard_tokens))
    flops_per_hour = gpu_tflops * 1e12 * utilisation * 3600
    parameters = drafter_parameters(work)
    train_flops = 6 * parameters * work.tokens * work.ttt_steps * work.epochs
    return Estimate(
        feature_bytes=per_token * work.tokens,
        bytes_per_token=per_token,
        shards=shards,
        capture_tasks=min(shards, max_tasks),
        capture_gpu_hours=2 * work.target_parameters * work.tokens / flops_per_hour,
        train_gpu_hours=train_flops / flops_per_hour,
        checkpoint_bytes=parameters * 4 * 3,
    )
