# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Train on hidden states stored in different ways: `python benchmarks/store_options.py --root DIRECTORY`.

The demo's target answers `--prompts` prompts once; then each option captures, seals and trains with the same prompts
and seed. Every drafter is judged on held-out states of the first option, which loses nothing. Prints one JSON line an
option: bytes a token, their share of 8*H (three aux layers and the last state in bfloat16), tau at the primary shape,
and how far the teacher's distribution moved. What is done in the root already is not done again.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from synthetic import Pipeline

from eagle3_core.artifacts import Kind
from eagle3_core.config.recipes import load_recipe
from eagle3_core.data.encoding import label_rows
from eagle3_core.data.features import FeatureSet
from eagle3_core.storage import load
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.job import TrainJob
from eagle3_core.train.learner import Learner
from eagle3_core.train.prepare import build_job
from eagle3_core.train.request import TrainRequest
from eagle3_core.train.validate import validate

OPTIONS = {
    "float32, all rows": {"dtype": "float32", "last_rows": "all"},
    "float32": {"dtype": "float32"},
    "bfloat16": {"dtype": "bfloat16"},
    "bfloat16, aux in fp8": {"dtype": "bfloat16", "fp8": "aux"},
    "all in fp8": {"dtype": "bfloat16", "fp8": "all"},
}
COMMON = ("prepare", "regenerate", "build_vocab")


def job_of(pipeline: Pipeline) -> TrainJob:
    """Return the training job over a pipeline's feature set."""
    request = TrainRequest(
        root=pipeline.store.root, run=pipeline.run, feature_set=pipeline.refs[Kind.FEATURE_SET],
        vocab_map=pipeline.refs[Kind.VOCAB_MAP], output="none", work=pipeline.root, progress=pipeline.root,
        device="cpu",
    )  # fmt: skip
    return build_job(request, pipeline.store)


def tau_on(reference: TrainJob, checkpoint: Path) -> float:
    """Return tau of a trained drafter on the reference's held-out samples."""
    learner = Learner.of(replace(reference, start=load_file(checkpoint)), Ranks.alone())
    found = validate(reference, learner, Ranks.alone(), lambda: False)
    assert found is not None  # nobody stops it
    return found.score


def teacher_moved(reference: FeatureSet, other: FeatureSet, head: torch.Tensor) -> tuple[float, float]:
    """Return mean KL of the teacher's distribution from the reference's, and how often its greedy token is another."""
    divergence, differ, rows = 0.0, 0, 0
    for sample in reference.held_out.nonzero()[0].tolist():
        one, two = reference.read(sample).restored(), other.read(sample).restored()
        kept = label_rows(one.loss_mask)
        p, q = ((states.last_hidden_state[kept].float() @ head.T).log_softmax(-1) for states in (one, two))
        divergence += float((p.exp() * (p - q)).sum())
        differ += int((p.argmax(-1) != q.argmax(-1)).sum())
        rows += len(kept)
    return divergence / rows, differ / rows


def main() -> None:
    """Parse, train, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--root", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=1200)
    parser.add_argument("--epochs", type=float, default=4.0)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    base = {
        "data.max_prompts": arguments.prompts, "data.held_out_fraction": 0.12, "training.epochs": arguments.epochs,
        "drafter.min_coverage": 0.5, "training.seed": arguments.seed,
    }  # fmt: skip
    reference: Pipeline | None = None
    for name, option in OPTIONS.items():
        overrides = base | {f"capture.{key}": value for key, value in option.items()}
        pipeline = Pipeline(arguments.root, load_recipe("demo", overrides))
        with contextlib.redirect_stdout(sys.stderr):
            for stage in (*COMMON, "plan_capture"):
                pipeline.stage(stage)
            for index in range(len(pipeline.plan.shards)):
                pipeline.stage("capture", index)
            pipeline.stage("seal")
            trained = load(pipeline.store, pipeline.stage("train"))
            reference = reference or pipeline
            job = job_of(reference)
            kl, differ = teacher_moved(
                FeatureSet.open(reference.store, reference.refs[Kind.FEATURE_SET]),
                FeatureSet.open(pipeline.store, pipeline.refs[Kind.FEATURE_SET]),
                job.target.head,
            )
            tau = tau_on(job, trained.verified_path("drafter.safetensors"))
        print(json.dumps(figures(name, pipeline) | {
            "tau": round(tau, 4), "teacher_kl": float(f"{kl:.2e}"), "teacher_greedy_differs": float(f"{differ:.2e}"),
        }), flush=True)  # fmt: skip


def figures(name: str, pipeline: Pipeline) -> dict[str, Any]:
    """Return what an option takes."""
    plan = pipeline.plan
    tokens, labels = (sum(getattr(shard, key) for shard in plan.shards) for key in ("tokens", "label_rows"))
    return {
        "option": name, "bytes_per_token": round(plan.bytes / tokens, 1),
        "share_of_8h": round(plan.bytes / tokens / (8 * plan.hidden_size), 3), "label_rows": round(labels / tokens, 3),
        "tokens": tokens,
    }  # fmt: skip


if __name__ == "__main__":
    main()
