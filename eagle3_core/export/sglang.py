"""Write the directory SGLang 0.5.23 loads as `LlamaForCausalLMEagle3`: `config.json` and `model.safetensors`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from eagle3_core.engine.layers import engine_layer_ids
from eagle3_core.errors import EngineArgsError, ExportError
from eagle3_core.export.checks import check_tensors
from eagle3_core.export.dialects import DIALECTS, check_keys, remap
from eagle3_core.model.architecture import DrafterArchitecture


def drafter_config(sizes: DrafterArchitecture, target: Mapping[str, Any], dtype: str) -> dict[str, Any]:
    """Return the `config.json` of a drafter for a target with the given `config.json`.

    Raises:
        ExportError: SGLang cannot capture these aux layers of this target.
    """
    text = target.get("text_config") or target
    try:
        layer_ids = engine_layer_ids(sizes.aux_layers, sizes.target_class, int(text["num_hidden_layers"]))
    except EngineArgsError as error:
        raise ExportError(str(error)) from None
    rope = dict(sizes.rope_parameters)
    # SGLang reads rope_parameters where present; engines built on transformers 4 read only the older pair.
    scaling = None if rope.get("rope_type", "default") == "default" else rope
    return {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": sizes.hidden_size,
        "intermediate_size": sizes.intermediate_size,
        "num_hidden_layers": 1,
        "num_attention_heads": sizes.num_heads,
        "num_key_value_heads": sizes.num_kv_heads,
        "head_dim": sizes.head_dim,
        "hidden_act": "silu",
        "rms_norm_eps": sizes.rms_norm_eps,
        "attention_bias": False,
        "mlp_bias": False,
        "vocab_size": sizes.vocab_size,
        "draft_vocab_size": sizes.draft_vocab_size,
        # Inherited from a small target, True would make the head the target's embedding, with V rows for U tokens.
        "tie_word_embeddings": False,
        "max_position_embeddings": int(text.get("max_position_embeddings") or sizes.max_position_embeddings),
        "rope_theta": rope.get("rope_theta", 10000.0),
        "rope_scaling": scaling,
        "rope_parameters": rope,
        "target_hidden_size": sizes.hidden_size,
        "num_aux_hidden_states": len(sizes.aux_layers),
        "eagle_config": {"use_aux_hidden_state": True, "eagle_aux_hidden_state_layer_ids": list(layer_ids)},
        "bos_token_id": text.get("bos_token_id"),
        "eos_token_id": text.get("eos_token_id"),
        "torch_dtype": dtype,
    }


def drafter_tensors(
    own: Mapping[str, torch.Tensor],
    vocab: Mapping[str, torch.Tensor],
    sizes: DrafterArchitecture,
    dtype: str,
    where: str,
) -> dict[str, torch.Tensor]:
    """Return parameters in our own names, with the vocabulary maps, as SGLang's file holds them.

    Weights are cast to `dtype`; d2t stays int64 [U] and t2d bool [V].

    Raises:
        ExportError: a key is missing or unknown, or a tensor is not what the sizes ask for.
    """
    tensors = {**own, **vocab}
    check_keys(tensors, DIALECTS["own"], where)
    check_tensors(tensors, sizes, where)
    kind = getattr(torch, dtype)
    cast = {name: tensor.to(kind) if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    # A copy of each: safetensors refuses tensors that share storage.
    return {name: tensor.clone().contiguous() for name, tensor in remap(cast, "sglang", where).items()}


def write(directory: Path, tensors: Mapping[str, torch.Tensor], config: Mapping[str, Any]) -> None:
    """Write both files."""
    save_file(dict(tensors), directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
