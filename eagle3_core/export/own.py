"""Write trained tensors as a checkpoint of our own, in the precision they will be served in, and export that."""

from __future__ import annotations

import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle3_core.errors import ExportError
from eagle3_core.export.plan import TargetFacts
from eagle3_core.export.remap import Remapped, remap
from eagle3_core.export.source import OWN_FILES
from eagle3_core.model.architecture import CONFIG_FILE, DrafterArchitecture

Tensors = Mapping[str, torch.Tensor]


def export_drafter(
    out: Path, own: Tensors, vocab: Tensors, sizes: DrafterArchitecture, target: TargetFacts, dtype: str, where: str
) -> Remapped:
    """Write the directory SGLang loads: our tensors through the same checks and tables as `eagle3 remap`.

    Weights are cast to `dtype` before anything is checked, so that what overflows there is refused; d2t and t2d stay.

    Raises:
        ExportError: says what of `where` is wrong.
    """
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".own-", dir=out.parent) as name:
        checkpoint = Path(name)
        save_file(_cast(own, dtype), checkpoint / OWN_FILES[0])
        save_file(_cast(vocab, dtype), checkpoint / OWN_FILES[1])
        (checkpoint / CONFIG_FILE).write_text(sizes.model_dump_json(), encoding="utf-8")
        try:
            return remap(checkpoint, out, "sglang", target=target)
        except ExportError as error:
            raise ExportError(str(error).replace(name, where)) from None


def _cast(tensors: Tensors, dtype: str) -> dict[str, torch.Tensor]:
    """Return a copy of each (safetensors refuses shared storage), floating ones in `dtype`."""
    kind = getattr(torch, dtype)
    cast = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    return {name: tensor.clone().contiguous() for name, tensor in cast.items()}
