"""How captured states travel from SGLang's scheduler to our client: one safetensors file per request, in memory.

The request's id says how many tokens it has; the file holds the ids the engine really ran, so that the client can prove
that the states belong to its request.
"""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.errors import CaptureMismatchError

if TYPE_CHECKING:
    import torch

_PREFIX = "eagle3"


@dataclass(frozen=True)
class CapturedSample:
    """Hidden states of one sample of T tokens; A aux layers, D target width.

    Attributes:
        index: position of the sample in what was asked for.
        input_ids: int64 [T].
        aux_hidden_states: [T, A * D], lowest layer first, in the target's dtype.
        last_hidden_state: [T, D], after the target's final norm.
    """

    index: int
    input_ids: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_state: torch.Tensor


def new_rid(tokens: int) -> str:
    """Return a fresh request id that carries the number of tokens."""
    return f"{_PREFIX}-{uuid.uuid4().hex}-{tokens}"


def expected_tokens(rid: str) -> int | None:
    """Return the number of tokens a request id carries, None for requests that are not ours."""
    parts = rid.split("-")
    return int(parts[2]) if len(parts) == 3 and parts[0] == _PREFIX and parts[2].isdigit() else None


def write(directory: Path, rid: str, tensors: Mapping[str, Any]) -> None:
    """Write one request's tensors under its id; the name appears when the file is complete."""
    from safetensors.torch import save_file

    temp = directory / f".{rid}.tmp"
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, temp)
    temp.rename(directory / rid)


def take(directory: Path, rid: str, index: int, input_ids: Sequence[int], width: int | None) -> CapturedSample:
    """Read, check and remove one request's states.

    Args:
        directory: the spool.
        rid: the request's id.
        index: copied into the sample.
        input_ids: what the client sent.
        width: A * D, None where it is not known.

    Raises:
        CaptureMismatchError: nothing was written, or ids, rows or widths differ from what was asked for.
    """
    import torch
    from safetensors.torch import load

    path = directory / rid
    if not path.exists():
        raise CaptureMismatchError(
            f"sample {index}: expected states of {len(input_ids)} tokens in the spool, found no file; the engine ran "
            "without the capture plugin, or served rows from its prefix cache"
        )
    tensors = load(path.read_bytes())
    path.unlink()
    ids = tensors["input_ids"].to(torch.int64)
    aux, last = tensors["aux_hidden_states"], tensors["last_hidden_state"]
    if ids.tolist() != list(input_ids):
        raise CaptureMismatchError(
            f"sample {index}: the captured token ids ({ids.numel()}) differ from those sent ({len(input_ids)})"
        )
    if aux.shape[0] != len(input_ids) or last.shape[0] != len(input_ids) or width not in (None, aux.shape[1]):
        raise CaptureMismatchError(
            f"sample {index}: expected {len(input_ids)} rows, aux {width} wide; found aux {tuple(aux.shape)}, "
            f"last {tuple(last.shape)}"
        )
    return CapturedSample(index, ids, aux, last)
