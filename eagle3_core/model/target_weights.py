"""The target's own matrices that training needs, read from its safetensors files and nothing else."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import safe_open

from eagle3_core.errors import TargetError
from eagle3_core.identity import read_config
from eagle3_core.model.architecture import SCALED_EMBEDDING, refuse_scaled_logits

if TYPE_CHECKING:
    from collections.abc import Mapping

EMBEDDING, HEAD, NORM = "embed_tokens.weight", "lm_head.weight", "norm.weight"
NOT_THE_DECODER = (".layers.", ".blocks.", "vis", "mtp.")


@dataclass(frozen=True, slots=True)
class TargetWeights:
    """Embedding [V, D] as stored, head [V, D] and what the final norm multiplies by [D], all float32.

    Tied embeddings share one tensor.
    """

    embedding: torch.Tensor
    head: torch.Tensor
    final_norm: torch.Tensor


def read_target_weights(directory: Path) -> TargetWeights:
    """Read embedding, head and final norm.

    Raises:
        TargetError: a tensor is missing, or the target's logits are not simply head @ last hidden state.
    """
    config = read_config(directory)
    refuse_scaled_logits(config)
    files = _files_by_tensor(directory)
    embedding = _read(directory, files, _name(files, EMBEDDING, directory))
    tied = bool((config.get("text_config") or config).get("tie_word_embeddings", config.get("tie_word_embeddings")))
    has_head = any(_ends(name, HEAD) for name in files)
    if not has_head and not tied:
        raise TargetError(f"{directory}: expected {HEAD} (embeddings are not tied), found none")
    head = _read(directory, files, _name(files, HEAD, directory)) if has_head and not tied else embedding
    norm = _read(directory, files, _name(files, NORM, directory))
    if (config.get("text_config") or config).get("model_type") in SCALED_EMBEDDING:
        norm += 1
    if head.shape != embedding.shape:
        raise TargetError(
            f"{directory}: head {tuple(head.shape)} and embedding {tuple(embedding.shape)} differ in shape"
        )
    return TargetWeights(embedding, head, norm)


def _ends(name: str, wanted: str) -> bool:
    return name == wanted or name.endswith(f".{wanted}")


def _name(files: Mapping[str, Path], wanted: str, directory: Path) -> str:
    found = [name for name in files if _ends(name, wanted) and not any(part in name for part in NOT_THE_DECODER)]
    if len(found) != 1:
        raise TargetError(f"{directory}: expected one tensor called {wanted}, found {sorted(found) or 'none'}")
    return found[0]


def _files_by_tensor(directory: Path) -> dict[str, Path]:
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        return {name: directory / file for name, file in json.loads(index.read_text())["weight_map"].items()}
    found: dict[str, Path] = {}
    for file in sorted(directory.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found.update(dict.fromkeys(tensors.keys(), file))
    if not found:
        raise TargetError(f"{directory}: expected *.safetensors, found none; convert the weights to safetensors")
    return found


def _read(directory: Path, files: Mapping[str, Path], name: str) -> torch.Tensor:
    with safe_open(files[name], framework="pt") as tensors:
        tensor: torch.Tensor = tensors.get_tensor(name)
    if not tensor.is_floating_point():
        raise TargetError(
            f"{directory}: {name} is {tensor.dtype}; a quantised head cannot teach, give the original weights"
        )
    return tensor.float()
