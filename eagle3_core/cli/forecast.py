"""How long a run will take on this machine, said before it starts; rough on purpose, and it says so."""

from __future__ import annotations

import os
import shutil

from eagle3_core.config import RunConfig
from eagle3_core.estimate import Workload, drafter_parameters
from eagle3_core.identity import checked_prompts, resolve_prompts, target_shape

CPU_FLOPS_PER_CORE = 1e10
"""Forward passes of a small target on one core of a cloud machine; training reaches twice as much."""
GPU_FLOPS = 4e13
DECODED_PER_S, SERVED_PER_S = 300.0, 60.0
"""Most tokens a second SGLang gives on two cores however small the target is: many requests at once, and one."""
ANSWER_SHARE, PROMPT_TOKENS = 0.45, 32
"""Mean length of an answer, as a share of the longest allowed, and of a prompt."""
FIXED_S = 240.0
"""Starts of Airflow, of SGLang (once a stage that serves) and of torchrun."""


def forecast(run: RunConfig) -> str:
    """Return one line."""
    low, high = minutes(run)
    where = "the GPU" if _has_gpu() else f"{os.cpu_count()} CPU cores"
    span = f"{low:,.0f} to {high:,.0f} minutes" if high < 120 else f"{low / 60:,.1f} to {high / 60:,.1f} hours"
    return f"This run will take about {span} on {where} (what is committed already costs nothing)."


def minutes(run: RunConfig) -> tuple[float, float]:
    """Return a low and a high estimate."""
    shape = target_shape(run)
    prompts = checked_prompts(resolve_prompts(run))
    samples = min(prompts, run.data.max_prompts or prompts)
    answers = samples * run.data.max_new_tokens * ANSWER_SHARE
    tokens = answers + samples * PROMPT_TOKENS
    work = Workload(
        samples=samples, tokens=round(tokens), hidden_size=shape.hidden_size,
        intermediate_size=run.drafter.intermediate_size or shape.intermediate_size,
        draft_vocab_size=run.drafter.vocab_size(shape.vocab_size),
    )  # fmt: skip
    evaluation = run.evaluation
    served = evaluation.max_prompts * evaluation.max_new_tokens * ANSWER_SHARE * evaluation.repeats
    served *= 1 + len(evaluation.shapes)
    speed = GPU_FLOPS if _has_gpu() else CPU_FLOPS_PER_CORE * (os.cpu_count() or 1)
    forward = 2 * shape.parameters / speed
    train_flops = 6 * drafter_parameters(work) * tokens * run.training.ttt_steps * run.training.epochs
    seconds = (
        FIXED_S
        + answers * (1 / DECODED_PER_S + forward)
        + tokens * forward
        + served * (1 / SERVED_PER_S + forward)
        + train_flops / (2 * speed)
    )
    return seconds / 60 * 0.5, seconds / 60 * 1.4


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None
