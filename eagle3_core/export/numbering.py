"""Translate aux layer ids: the same key means another layer in another engine.

`outputs` names the layer whose output is taken, from 0; `entries` the layer that output enters (one more); SGLang turns
what it is given into entries by a rule of the target's class (`engine/layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.engine.layers import boundaries, captured_outputs_of, engine_layer_ids
from eagle3_core.errors import EngineArgsError, ExportError
from eagle3_core.export.dialects import Numbering


@dataclass(frozen=True)
class Target:
    """What is known of the target a drafter is for; nothing of it stands in a drafter's own sizes."""

    model_class: str | None = None
    num_layers: int | None = None

    def needed(self, what: str) -> tuple[str, int]:
        """Return class and number of layers.

        Raises:
            ExportError: one of them is not known.
        """
        if self.model_class is None or self.num_layers is None:
            raise ExportError(
                f"{what}: expected to know the target, whose class and layers decide what SGLang's ids mean, found "
                "not both; give --target DIRECTORY with architectures and num_hidden_layers in its config.json"
            )
        return self.model_class, self.num_layers


def translate(ids: Sequence[int], source: Numbering, to: Numbering, target: Target, where: str) -> tuple[int, ...]:
    """Return the ids that mean the same layers in another numbering.

    Raises:
        ExportError: they are no layers, the engine cannot express them, or only the target could tell what they mean.
    """
    if not ids or list(ids) != sorted(set(ids)) or ids[0] < 0:
        raise ExportError(f"{where}: layer ids: expected them ascending, distinct and from 0 on, found {list(ids)}; "
                          "engines capture in the order of the layers, so correct them")  # fmt: skip
    if source is to is Numbering.SGLANG:
        return tuple(ids)
    try:
        return _from_outputs(_outputs(ids, source, target, where), to, target, where)
    except EngineArgsError as error:
        raise ExportError(f"{where}: layer ids: expected some that {to} can name, found {list(ids)}: {error}") from None


def _outputs(ids: Sequence[int], source: Numbering, target: Target, where: str) -> tuple[int, ...]:
    if source is Numbering.SGLANG:
        return captured_outputs_of(ids, *target.needed(f"{where}: layer ids {list(ids)}"))
    outputs_of = tuple(ids) if source is Numbering.OUTPUTS else tuple(layer - 1 for layer in ids)
    if outputs_of[0] < 0:
        raise ExportError(f"{where}: layer ids {list(ids)}: expected 1 or more, 0 is the embedding, not a layer")
    if target.num_layers is not None and outputs_of[-1] >= target.num_layers:
        raise ExportError(f"{where}: layer ids: expected layers of a target that has {target.num_layers}, found "
                          f"{list(ids)}, the outputs of {list(outputs_of)}; correct them")  # fmt: skip
    return outputs_of


def _from_outputs(outputs_of: tuple[int, ...], to: Numbering, target: Target, where: str) -> tuple[int, ...]:
    if to is Numbering.OUTPUTS:
        return outputs_of
    if to is Numbering.ENTRIES:
        return boundaries(outputs_of)
    return engine_layer_ids(outputs_of, *target.needed(f"{where}: aux layers {list(outputs_of)}"))
