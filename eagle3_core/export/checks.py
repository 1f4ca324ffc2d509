"""What must hold of a drafter's tensors before any engine sees them."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from eagle3_core.errors import ExportError
from eagle3_core.model.architecture import DrafterArchitecture


def check_tensors(tensors: Mapping[str, torch.Tensor], sizes: DrafterArchitecture, where: str) -> None:
    """Check shapes, finite values and the two vocabulary maps of tensors in our own names.

    Raises:
        ExportError: names the first tensor that is wrong.
    """
    shapes = {
        **sizes.parameter_shapes(),
        "d2t": (sizes.draft_vocab_size,),
        "t2d": (sizes.vocab_size,),
        "embed_tokens.weight": (sizes.vocab_size, sizes.hidden_size),
    }
    for name, tensor in tensors.items():
        if tuple(tensor.shape) != shapes[name]:
            raise ExportError(f"{where}: {name} expected shape {shapes[name]}, found {tuple(tensor.shape)}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise ExportError(f"{where}: {name} holds NaN or infinite values; train again from an earlier checkpoint")
    check_vocab_maps(tensors["d2t"], tensors["t2d"], where)


def check_vocab_maps(d2t: torch.Tensor, t2d: torch.Tensor, where: str) -> None:
    """Check that d2t (int64 [U], offsets) and t2d (bool [V]) describe the same draft vocabulary.

    Raises:
        ExportError: a dtype is wrong, or draft ids + offsets are not exactly the flagged target ids in order.
    """
    if d2t.dtype != torch.int64 or t2d.dtype != torch.bool:
        raise ExportError(f"{where}: expected d2t int64 and t2d bool, found {d2t.dtype} and {t2d.dtype}")
    target_ids = torch.arange(d2t.numel()) + d2t
    flagged = t2d.nonzero().flatten()
    if not torch.equal(target_ids, flagged):
        hint = " (these are absolute ids; offsets are expected)" if torch.equal(d2t, flagged) else ""
        raise ExportError(
            f"{where}: d2t and t2d disagree{hint}: draft id + d2t must give the {flagged.numel()} target ids "
            f"flagged in t2d in rising order, found {target_ids[:4].tolist()}..., flagged {flagged[:4].tolist()}..."
        )
