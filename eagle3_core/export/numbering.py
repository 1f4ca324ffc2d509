"""Translate aux layer ids: the same key means another layer in another engine.

`outputs` names the layer whose output is taken, from 0; `entries` the layer that output enters (one more); SGLang turns
what it is given into entries by a rule of the target's class (`engine/layers.py`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from eagle3_core.engine.layers import boundaries, engine_layer_ids
from eagle3_core.errors import EngineArgsError, ExportError
from eagle3_core.export.dialects import Numbering


@dataclass(frozen=True)
class Target:
    """What is known of the target a drafter is for; nothing of it stands in a drafter's own sizes."""

    model_class: str | None = None
    num_layers: int | None = None
    sha256: str | None = None

    def needed(self, what: str) -> tuple[str, int]:
        """Return class and number of layers.

        Raises:
            ExportError: one of them is not known.
        """
        if self.model_class is None or self.num_layers is None:
            raise ExportError(
                f"{what}: expected to know the target, whose class and layers decide what SGLang's ids mean, found "
                "neither; give --target DIRECTORY"
            )
        return self.model_class, self.num_layers


def translate(ids: Sequence[int], source: Numbering, to: Numbering, target: Target, where: str) -> tuple[int, ...]:
    """Return the ids that mean the same layers in another numbering.

    Raises:
        ExportError: the engine cannot express them, or only the target could tell what they mean.
    """
    if source is to:
        return tuple(ids)
    try:
        return _from_outputs(_outputs(ids, source, target, where), to, target, where)
    except EngineArgsError as error:
        raise ExportError(f"{where}: layer ids: expected some that {to} can name, found {list(ids)}: {error}") from None


def _outputs(ids: Sequence[int], source: Numbering, target: Target, where: str) -> tuple[int, ...]:
    if source is Numbering.OUTPUTS:
        return tuple(ids)
    lower = tuple(layer - 1 for layer in ids)
    if source is Numbering.ENTRIES:
        if min(lower) < 0:
            raise ExportError(f"{where}: layer ids {list(ids)}: expected 1 or more, 0 is the embedding, not a layer")
        return lower
    model_class, layers = target.needed(f"{where}: layer ids {list(ids)}")
    engine_layer_ids((1,), model_class, layers)  # refuses a class whose rule is not known
    if _given(ids, model_class, layers) == tuple(ids):
        return tuple(ids)
    if min(lower) >= 0 and _given(lower, model_class, layers) == tuple(ids):
        return lower
    # Neither is how SGLang would be asked. gpt-oss adds one to ids up to n - 1, the DeepSeek family takes these as they
    # are; only the first can be asked for the output of the last layer.
    return tuple(ids) if _given(ids, model_class, layers) and ids[-1] == layers - 1 else lower


def _given(outputs_of: Sequence[int], model_class: str, layers: int) -> tuple[int, ...]:
    """Return what SGLang would be given for these outputs; empty where it cannot capture them."""
    try:
        return engine_layer_ids(outputs_of, model_class, layers)
    except EngineArgsError:
        return ()


def _from_outputs(outputs_of: tuple[int, ...], to: Numbering, target: Target, where: str) -> tuple[int, ...]:
    if to is Numbering.OUTPUTS:
        return outputs_of
    if to is Numbering.ENTRIES:
        return boundaries(outputs_of)
    model_class, layers = target.needed(f"{where}: aux layers {list(outputs_of)}")
    return engine_layer_ids(outputs_of, model_class, layers)
