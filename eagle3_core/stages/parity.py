"""Compare the export with the trained drafter on held-out samples, before any server starts."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.errors import ParityError
from eagle3_core.identity import read_target, resolve_target

if TYPE_CHECKING:
    from eagle3_core.data.features import FeatureSet
    from eagle3_core.evaluate.parity import HeldOut
    from eagle3_core.evaluate.reference import TargetEnds
    from eagle3_core.model.architecture import DrafterArchitecture
    from eagle3_core.model.drafter import Eagle3Drafter
    from eagle3_core.storage import Artifact

MAX_TOKENS = 8192
FILE = "parity.json"


def run(context: StageContext) -> Ref:
    """Write `parity.json`, or refuse the export.

    Raises:
        ParityError: export and trained drafter differ, or a deliberate mistake would not be noticed.
    """
    if done := context.done():
        return done
    from eagle3_core.data.features import FeatureSet
    from eagle3_core.evaluate.parity import compare, controls, require, require_layer_ids, trained_logits
    from eagle3_core.evaluate.reference import Reference, TargetEnds
    from eagle3_core.evaluate.trainer import TrainerFigures
    from eagle3_core.export.directory import materialise
    from eagle3_core.model.architecture import CONFIG_FILE, DrafterArchitecture

    context.progress.phase("reading the export and held-out samples")
    drafter, checkpoint = context.input("drafter"), context.input("checkpoint")
    ends = TargetEnds.load(resolve_target(context.run))
    reference = Reference.load(materialise(drafter, context.work / "drafter"), ends)
    sizes = DrafterArchitecture.parse(checkpoint.json(CONFIG_FILE), f"{checkpoint.ref.key}/{CONFIG_FILE}")
    features = FeatureSet.open(context.store, context.inputs["feature_set"])
    if tuple(features.aux_layers) != sizes.aux_layers:
        raise ParityError(f"features are of layers {features.aux_layers}, the drafter expects {sizes.aux_layers}")
    require_layer_ids(reference, features.aux_layers, read_target(resolve_target(context.run)))
    samples = list(_held_out(features, ends))
    evaluation = context.run.evaluation
    depth = evaluation.primary_shape.num_steps
    network = _network(checkpoint, sizes, ends, drafter.manifest.facts["dtype"])
    # Each sample as it is, and with every mistake on purpose.
    total = len(samples) * (1 + sum(1 for _ in controls(reference)))
    told = Told(samples, lambda done: context.progress.update(done, total, "comparisons", samples=len(samples)))
    parity = compare(reference, trained_logits(network), told, depth, evaluation.max_new_tokens[0])
    (context.work / FILE).write_text(parity.model_dump_json(indent=1), encoding="utf-8")
    trainer = TrainerFigures(checkpoint.json("validation.json"))
    require(parity, trainer.tau_chain(depth, [sample.id for sample in samples]))
    staged = context.staged()
    (staged / FILE).write_text(parity.model_dump_json(indent=1), encoding="utf-8")
    shown = {"tau": round(parity.tau_export, 4), "max_logit_difference": parity.max_logit_difference}
    return context.commit(staged, facts=parity.model_dump(mode="json"), ref_facts=shown)


class Told(list["HeldOut"]):
    """Held-out samples that tell how many of them have been gone through, in all walks over them together."""

    def __init__(self, samples: Iterable[HeldOut], tell: Callable[[int], None]) -> None:
        """Tell 0 at once, and one more after each sample."""
        super().__init__(samples)
        self._tell, self._done = tell, 0
        tell(0)

    def __iter__(self) -> Iterator[HeldOut]:
        """Go through all samples once."""
        for sample in super().__iter__():
            yield sample
            self._done += 1
            self._tell(self._done)


def _held_out(features: FeatureSet, ends: TargetEnds) -> Iterator[HeldOut]:
    """Yield held-out samples whose answer has a token to draft, until enough tokens are seen."""
    from eagle3_core.evaluate.parity import HeldOut

    tokens = 0
    for index in features.held_out.nonzero()[0].tolist():
        if tokens >= MAX_TOKENS:
            return
        sample = features.read(index).restored()
        answer = sample.loss_mask.nonzero().flatten()
        if len(answer) < 2 or int(answer[0]) == 0:
            continue
        tokens += sample.input_ids.numel()
        greedy = ends.argmax(sample.last_hidden_state)
        yield HeldOut(
            str(features.sample_ids[index]),
            sample.input_ids.long(),
            sample.aux_hidden_states.float(),
            greedy,
            int(answer[0]),
        )


def _network(checkpoint: Artifact, sizes: DrafterArchitecture, ends: TargetEnds, dtype: str) -> Eagle3Drafter:
    """Return the trained network; weights are rounded to the export's dtype, arithmetic is float32."""
    import torch
    from safetensors.torch import load_file

    from eagle3_core.model.drafter import Eagle3Drafter

    network = Eagle3Drafter(sizes, ends.embedding)
    weights = load_file(checkpoint.verified_path("drafter.safetensors"))
    network.load_state_dict({name: tensor.to(getattr(torch, dtype)).float() for name, tensor in weights.items()})
    return network
