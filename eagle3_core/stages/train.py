"""Train the drafter under torchrun, resuming from the newest checkpoint."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Kind
from eagle3_core.config.base import canonical_sha256
from eagle3_core.releases import opened
from eagle3_core.storage import load

if TYPE_CHECKING:
    from eagle3_core.artifacts import Ref
    from eagle3_core.context import StageContext

VOCAB_FILE = "vocab.safetensors"


def run(context: StageContext) -> Ref:
    """Return the trained drafter: the best checkpoint by held-out tau at the primary shape."""
    if done := context.done():
        return done
    if (learnt := _learnt_already(context)) is not None:
        return learnt
    from eagle3_core.engine.platform import resolve_device
    from eagle3_core.train.destinations import require_trackers
    from eagle3_core.train.launch import run_torchrun
    from eagle3_core.train.request import FINAL, TrainRequest
    from eagle3_core.train.rotation import keep_checkpoints, newest_checkpoint

    require_trackers(context.run.training.trackers)
    work = context.work.resolve()
    # Read here, before ranks wait for each other: a large one may take longer to come than a rank waits.
    checkpoint = newest_checkpoint(context.store, context.key())
    request = TrainRequest(
        root=context.store.root, run=context.run, feature_set=context.inputs["feature_set"],
        vocab_map=context.inputs["vocab_map"], output=context.key(), work=work, progress=work.parent,
        device=resolve_device(context.run.serving.device),
        checkpoint=checkpoint,
    )  # fmt: skip
    outcome = run_torchrun(request, context.progress.phase)
    staged = context.staged()
    for path in sorted((work / FINAL).iterdir()):
        path.replace(staged / path.name)
    shutil.copyfile(context.input("vocab_map").verified_path(VOCAB_FILE), staged / VOCAB_FILE)
    figures = {"trainer_tau": round(outcome.trainer_tau, 4), "steps": outcome.step, "tokens": outcome.tokens}
    facts = {"best_step": outcome.best_step, "recipe_sha256": _recipe_sha256(context)}
    ref = context.commit(staged, facts=facts, ref_facts=figures)
    keep_checkpoints(context.store, context.key(), ())
    return ref


def _learnt_already(context: StageContext) -> Ref | None:
    """Return the champion's own checkpoint if it was trained by this recipe on these features: nothing is new."""
    start = context.run.start
    if start is None:
        return None
    champion = load(context.store, opened(Kind.CHECKPOINT, start.checkpoint))
    if champion.manifest.facts.get("recipe_sha256") != _recipe_sha256(context):
        return None
    context.progress.phase(f"nothing new since the champion {champion.ref.key}; its checkpoint stands")
    return champion.ref


def _recipe_sha256(context: StageContext) -> str:
    """Return what names a training but for what it starts from."""
    sections = tuple(name for name in context.stage.sections if name != "start")
    inputs = {name: ref.manifest_sha256 for name, ref in context.inputs.items()}
    rate = context.run.training.warm_learning_rate
    return canonical_sha256({"config": context.run.slice(sections), "warm_learning_rate": rate, "inputs": inputs})
