"""Write the directory SGLang loads from a checkpoint."""

from __future__ import annotations

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.errors import ExportError
from eagle3_core.identity import read_config, resolve_target, target_fingerprint


def run(context: StageContext) -> Ref:
    """Return a drafter: `config.json` and `model.safetensors` with exactly the keys SGLang's class loads.

    Raises:
        ExportError: key set, shapes, vocabulary maps or target do not fit.
    """
    content = {"dtype": context.run.target.dtype}
    if done := context.done(content):
        return done
    from safetensors.torch import load_file

    from eagle3_core.export.own import export_drafter
    from eagle3_core.export.plan import TargetFacts
    from eagle3_core.model.architecture import CONFIG_FILE, DrafterArchitecture

    checkpoint = context.input("checkpoint")
    sizes = DrafterArchitecture.parse(checkpoint.json(CONFIG_FILE), f"{checkpoint.ref.key}/{CONFIG_FILE}")
    target = resolve_target(context.run)
    found = target_fingerprint(target).sha256
    if found != sizes.target_sha256:
        raise ExportError(
            f"{target}: expected target {sizes.target_sha256[:12]}, which the drafter was trained for, found "
            f"{found[:12]}; set target.model to that one, or train again"
        )
    own = load_file(checkpoint.verified_path("drafter.safetensors"))
    vocab = load_file(checkpoint.verified_path("vocab.safetensors"))
    dtype = context.run.target.dtype
    staged = context.staged()
    facts_of_target = TargetFacts(read_config(target), str(target), lambda: found)
    plan = export_drafter(staged, own, vocab, sizes, facts_of_target, dtype, checkpoint.ref.key).plan
    facts = {
        "dialect": plan.to.name,
        "parameters": plan.parameters,
        "dtype": dtype,
        "draft_vocab_size": sizes.draft_vocab_size,
        "aux_layers": list(sizes.aux_layers),
        "target_sha256": sizes.target_sha256,
    }
    return context.commit(staged, content=content, facts=facts, ref_facts={"parameters": plan.parameters})
