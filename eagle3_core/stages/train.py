"""Train the drafter under torchrun, resuming from the newest checkpoint."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from eagle3_core.artifacts import Ref
    from eagle3_core.context import StageContext

VOCAB_FILE = "vocab.safetensors"


def run(context: StageContext) -> Ref:
    """Return the trained drafter: the best checkpoint by held-out tau at the primary shape."""
    if done := context.done():
        return done
    from eagle3_core.train.destinations import require_trackers
    from eagle3_core.train.launch import run_torchrun
    from eagle3_core.train.request import FINAL, TrainRequest
    from eagle3_core.train.rotation import keep_checkpoints, newest_checkpoint

    device, nproc = _place(context)
    require_trackers(context.run.training.trackers)
    work = context.work.resolve()
    # Read here, before ranks wait for each other: a large one may take longer to come than a rank waits.
    checkpoint = newest_checkpoint(context.store, context.key())
    request = TrainRequest(
        root=context.store.root, run=context.run, feature_set=context.inputs["feature_set"],
        vocab_map=context.inputs["vocab_map"], output=context.key(), work=work, progress=work.parent, device=device,
        checkpoint=checkpoint,
    )  # fmt: skip
    context.progress.phase(f"starting {nproc} rank(s) on {device}")
    outcome = run_torchrun(request, nproc)
    staged = context.staged()
    for path in sorted((work / FINAL).iterdir()):
        path.replace(staged / path.name)
    shutil.copyfile(context.input("vocab_map").verified_path(VOCAB_FILE), staged / VOCAB_FILE)
    figures = {"trainer_tau": round(outcome.trainer_tau, 4), "steps": outcome.step, "tokens": outcome.tokens}
    ref = context.commit(staged, facts={"best_step": outcome.best_step}, ref_facts=figures)
    keep_checkpoints(context.store, context.key(), ())
    return ref


def _place(context: StageContext) -> tuple[str, int]:
    """Return the device and how many ranks: on GPUs at most one rank each."""
    from eagle3_core.engine.platform import resolve_device

    device, nproc = resolve_device(context.run.serving.device), context.run.training.nproc
    if device == "cuda":
        import torch

        nproc = min(nproc, torch.cuda.device_count())
    return device, nproc
