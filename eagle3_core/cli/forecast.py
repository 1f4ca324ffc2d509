"""How long a run will take on this machine, said before it starts; rough on purpose, and it says so."""

from __future__ import annotations

import os
import shutil

from eagle3_core.config import RunConfig
from eagle3_core.estimate import Workload, drafter_parameters
from eagle3_core.identity import checked_prompts, read_target, resolve_prompts, resolve_target

CPU_FLOPS_PER_CORE = 6e9
"""What decoding and training of small models reach on one core of a cloud machine, all overheads included."""
GPU_FLOPS = 4e13
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
    shape = read_target(resolve_target(run))
    prompts = checked_prompts(resolve_prompts(run))
    samples = min(prompts, run.data.max_prompts or prompts)
    answers = samples * run.data.max_new_tokens * 0.6
    tokens = answers + samples * 64
    work = Workload(
        samples=samples, tokens=round(tokens), hidden_size=shape.hidden_size,
        intermediate_size=run.drafter.intermediate_size or shape.intermediate_size,
        draft_vocab_size=run.drafter.vocab_size(shape.vocab_size),
    )  # fmt: skip
    shapes = 1 + len(run.evaluation.shapes)
    served = run.evaluation.max_prompts * run.evaluation.max_new_tokens * run.evaluation.repeats * shapes
    target_flops = 2 * shape.parameters * (answers + tokens + served)
    train_flops = 6 * drafter_parameters(work) * tokens * run.training.ttt_steps * run.training.epochs
    speed = GPU_FLOPS if _has_gpu() else CPU_FLOPS_PER_CORE * (os.cpu_count() or 1)
    middle = (FIXED_S + (target_flops + train_flops) / speed) / 60
    return middle * 0.7, middle * 1.6


def _has_gpu() -> bool:
    return shutil.which("nvidia-smi") is not None
