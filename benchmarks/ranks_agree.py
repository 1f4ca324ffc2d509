# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Do several ranks learn what one learns? Run it alone and under torchrun, and compare what is printed.

python benchmarks/ranks_agree.py --setting S --device cuda --precision bfloat16
torchrun --standalone --nproc-per-node 2 benchmarks/ranks_agree.py --setting S --device cuda --precision bfloat16

Optimiser steps of two rows each, through the loop's own `step`; one JSON object: the loss and gradient norm of every
step, tokens per second, the milliseconds a step takes and those of them for collectives and AdamW, and peak memory.
"""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace

import torch
from train_step import SETTINGS, make_job, step_arguments

from eagle3_core.train.checkpoint import TrainState
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches
from eagle3_core.train.loop import step

WARM_UP = 3


def update_ms(learner: Learner, ranks: Ranks) -> float:
    """Return how long the sums over ranks, AdamW and the return of the weights take, with nothing to wait for."""
    best = float("inf")
    for _ in range(5):
        ranks.agree(0, "")
        began = time.perf_counter()
        learner.update(0.0)
        learner.sums.read()
        best = min(best, time.perf_counter() - began)
    return 1e3 * best


def main() -> None:
    """Train, print."""
    arguments = step_arguments(__doc__, ttt_steps=3, steps=12).parse_args()
    ranks = Ranks.join(arguments.device, 300.0) if "RANK" in os.environ else Ranks.alone(arguments.device)
    setting = SETTINGS[arguments.setting]
    job = make_job(
        replace(setting, batch_tokens=2 * setting.row_tokens), arguments.ttt_steps, arguments.precision, True
    )
    learner, state = Learner.of(job, ranks), TrainState()
    ahead = batches(job.features, job.order.rows_of(ranks.rank, ranks.world, 0), ranks.device, job.dtype)
    reports, seconds, tokens = [], 0.0, 0
    for number in range(WARM_UP + arguments.steps):
        before = state.tokens
        report = step(learner, ranks, state, ahead, save=False, stop=False)
        reports.append((round(report.loss, 5), round(report.grad_norm, 5)))
        if number >= WARM_UP:
            seconds, tokens = seconds + report.seconds, tokens + state.tokens - before
    figures = {"ranks": ranks.world, "tokens_per_s": round(tokens / seconds), "update_ms": update_ms(learner, ranks),
               "ms_per_step": 1e3 * seconds / arguments.steps, "loss_and_norm": reports}  # fmt: skip
    if ranks.device.type == "cuda":
        figures["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    if ranks.leads:
        print(json.dumps(figures))
    ranks.leave()


if __name__ == "__main__":
    main()
