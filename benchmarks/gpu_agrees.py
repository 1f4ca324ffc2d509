# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Does a GPU in half precision compute what a CPU does in float32? See `python benchmarks/gpu_agrees.py`.

One packed row of a small drafter, Llama-style and with MLA, KL and LK, head trained and frozen: loss, counts and every
gradient. Prints one JSON line a case and ends with 1 if a cosine is below 0.99. CI has no GPU, which is why this is a
program and not a test.
"""

from __future__ import annotations

import itertools
import json
import sys
from dataclasses import replace

import torch
from train_step import Setting, make_job

from eagle3_core.model.latent_sizes import LatentSizes
from eagle3_core.model.matrices import views
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches

SMALL = Setting(512, 8, 2, 64, 1024, 4096, 1500, 10000.0, 300, 700, 2048, 2048)
LATENT = replace(
    SMALL,
    kv_heads=8,
    head_dim=96,
    mla=LatentSizes(q_lora_rank=192, kv_lora_rank=128, qk_nope_head_dim=64, qk_rope_head_dim=32, v_head_dim=64),
)
ATTENTIONS = {"mha": SMALL, "mla": LATENT}
LEAST_COSINE = 0.99


def gradients(job: TrainJob, device: str) -> tuple[list[float], dict[str, torch.Tensor]]:
    """Return counts and named gradients of the first row."""
    learner = Learner.of(job, Ranks.alone(device))
    learner.accumulate(next(batches(job.features, job.order.rows(0)[:1], torch.device(device), job.dtype)))
    found = {name: view.cpu() for name, view in views(learner.sums.gradients, learner.drafter).items()}
    return [*learner.sums.read().values()], found


def main() -> int:
    """Compare, print, tell."""
    worst = 1.0
    for attention, kind, train_head in itertools.product(ATTENTIONS, ("kl", "lk"), (True, False)):
        jobs = [
            make_job(ATTENTIONS[attention], 4, precision, train_head, kind) for precision in ("float32", "bfloat16")
        ]
        expected_counts, expected = gradients(jobs[0], "cpu")
        counts, found = gradients(jobs[1], "cuda")
        alike, sizes = {}, {}
        for name, wanted in expected.items():
            alike[name] = float(torch.nn.functional.cosine_similarity(found[name].flatten(), wanted.flatten(), dim=0))
            sizes[name] = float(found[name].norm() / wanted.norm())
        low = min(alike, key=lambda name: alike[name])
        worst = min(worst, alike[low])
        print(json.dumps({"attention": attention, "loss": kind, "head": train_head, "cpu": expected_counts,
                          "gpu": counts, "least_cosine": alike[low], "of": low,
                          "norm_ratios": (min(sizes.values()), max(sizes.values()))}))  # fmt: skip
    return int(worst < LEAST_COSINE)


if __name__ == "__main__":
    sys.exit(main())
