"""How long a run will take on this machine, said before it starts; rough on purpose, and it says so."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from collections.abc import Callable
from functools import cache
from pathlib import Path

from eagle3_core.config import RunConfig
from eagle3_core.estimate import DTYPE_BYTES, Workload, drafter_parameters
from eagle3_core.identity import DEMO, SMOLLM2, target_shape
from eagle3_core.prompt_files import checked_prompts, prompt_files

CPU_FLOPS, CPU_FLOPS_BFLOAT16 = 1.4e11, 2.4e11
"""Large matrix products on two cores of a cloud machine, in float32, and in bfloat16 where the processor has it."""
GPU_FLOPS = 4e13
MEMORY_BYTES_PER_S = 1e10
"""Speed at which one request's tokens read the target's weights, one by one."""
SERVED_LAYER_S, DECODE_LAYER_S, DECODE_REQUEST_LAYER_S = 6e-4, 1e-3, 2.5e-5
"""What a layer of the target costs on a CPU beside its arithmetic: a token of a single request; of many requests, a
step for all together and for each of them."""
DECODE_FORWARD = 2.0
"""A few rows at a time use half of the arithmetic that large products reach."""
CAPTURED_PER_S, TRAINED_PER_S = 4000.0, 8000.0
"""Most tokens a second on two cores however small the target is: prefill with capture, training."""
CHECKED_PER_S, CHECK_S_PER_PARAMETER, CHECKED_TOKENS = 200.0, 2e-9, 8192
"""The same of the parity check, what a drafter's parameters add to each of its tokens, and the most it looks at."""
ANSWER_TOKENS = {DEMO: 65, SMOLLM2: 410}
OTHER_ANSWER_TOKENS = 400
"""Mean length of an answer that nothing cuts; measured for the two targets that have a name."""
PROMPT_TOKENS = 32
FIXED_S = 240.0
"""Starts of Airflow, of SGLang (once a stage that serves) and of torchrun."""


def forecast(run: RunConfig) -> str:
    """Return one line."""
    low, high = minutes(run)
    where = "the GPU" if has_gpu() else f"{os.cpu_count()} CPU cores"
    span = f"{low:,.0f} to {high:,.0f} minutes" if high < 120 else f"{low / 60:,.1f} to {high / 60:,.1f} hours"
    return f"This run will take about {span} on {where} (what is committed already costs nothing)."


def minutes(run: RunConfig) -> tuple[float, float]:
    """Return a low and a high estimate."""
    shape = target_shape(run)
    prompts = checked_prompts(prompt_files(run))
    samples = min(prompts, run.data.max_prompts or prompts)
    answers = samples * _answer_tokens(run, run.data.max_new_tokens)
    tokens = answers + samples * PROMPT_TOKENS
    work = Workload(
        samples=samples, tokens=round(tokens), hidden_size=shape.hidden_size,
        intermediate_size=run.drafter.intermediate_size or shape.intermediate_size,
        draft_vocab_size=run.drafter.vocab_size(shape.vocab_size),
    )  # fmt: skip
    checked = min(CHECKED_TOKENS, tokens * run.data.held_out_fraction)
    forward = 2 * shape.parameters / _flops(run.target.dtype)
    read = 0.0 if has_gpu() else shape.parameters * DTYPE_BYTES[run.target.dtype] / MEMORY_BYTES_PER_S

    def many(requests: int) -> float:
        """Return what a token costs of so many requests in flight."""
        step = DECODE_LAYER_S / requests + DECODE_REQUEST_LAYER_S
        return shape.num_layers * step + DECODE_FORWARD * forward

    train_flops = 6 * drafter_parameters(work) * run.training.ttt_steps
    seconds = (
        FIXED_S
        + answers * many(run.serving.max_running_requests)
        + tokens * (1 / CAPTURED_PER_S + forward)
        + _served_s(run, shape.num_layers * SERVED_LAYER_S + read, many)
        + tokens * run.training.epochs * (1 / TRAINED_PER_S + train_flops / _flops(run.training.precision))
        + checked * (1 / CHECKED_PER_S + drafter_parameters(work) * CHECK_S_PER_PARAMETER)
    )
    return seconds / 60 * 0.7, seconds / 60 * 1.4


def _served_s(run: RunConfig, alone_s: float, many_s: Callable[[int], float]) -> float:
    """Return how long the evaluation's servers answer, point by point, from the seconds a token takes."""
    seconds = 0.0
    for plan in run.evaluation.plans:
        for cell in plan.cells:
            longest = cell.max_new_tokens
            tokens = longest if plan.ignore_eos else _answer_tokens(run, longest)
            seconds += tokens * (alone_s if cell.concurrency == 1 else min(alone_s, many_s(cell.concurrency)))
    return seconds * run.evaluation.repeats * run.evaluation.max_prompts


def _answer_tokens(run: RunConfig, longest: int) -> float:
    """Return the mean length of an answer of at most `longest` tokens; lengths are roughly exponential."""
    mean = ANSWER_TOKENS.get(run.target.model, OTHER_ANSWER_TOKENS)
    return mean * (1 - math.exp(-longest / mean))


def _flops(dtype: str) -> float:
    if has_gpu():
        return GPU_FLOPS
    fast = dtype != "float32" and any(flag in _processor() for flag in ("avx512_bf16", "amx_bf16"))
    return (CPU_FLOPS_BFLOAT16 if fast else CPU_FLOPS) * (os.cpu_count() or 1) / 2


def _processor() -> str:
    path = Path("/proc/cpuinfo")
    return path.read_text(encoding="utf-8") if path.is_file() else ""


@cache
def has_gpu() -> bool:
    """Return whether the engine environment is the one for GPUs, by the question the set-up asks."""
    if chosen := os.environ.get("EAGLE3_ENGINE"):
        return chosen == "gpu"
    tool = shutil.which("nvidia-smi")
    return tool is not None and subprocess.run([tool, "-L"], capture_output=True, check=False).returncode == 0
