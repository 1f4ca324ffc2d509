"""How the two draft classes of SGLang 0.5.23 that EAGLE3 serves fill their parameters from a file: name by name.

Both drop keys that they do not know and leave uninitialised what no key fills, without an error; here both are one.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import torch

from eagle3_core.errors import ParityError

LLAMA, LATENT = "LlamaForCausalLMEagle3", "Eagle3DeepseekV2ForCausalLM"
NORMS = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
RENAMED = (("midlayer", "layers.0"),)
STACKED = ((".qkv_proj", ".q_proj"), (".qkv_proj", ".k_proj"), (".qkv_proj", ".v_proj"),
           (".gate_up_proj", ".gate_proj"), (".gate_up_proj", ".up_proj"))  # fmt: skip
LAYER, MIDLAYER = "model.layers.0.", "model.midlayer."
REQUIRED = frozenset((
    "model.fc.weight", "model.norm.weight", "lm_head.weight",
    *(f"{LAYER}{norm}.weight" for norm in NORMS),
    *(f"{LAYER}self_attn.qkv_proj.weight{shard}" for shard in (".q_proj", ".k_proj", ".v_proj")),
    f"{LAYER}self_attn.o_proj.weight",
    *(f"{LAYER}mlp.gate_up_proj.weight{shard}" for shard in (".gate_proj", ".up_proj")),
    f"{LAYER}mlp.down_proj.weight",
))  # fmt: skip
"""What SGLang's class allocates, fused parameters one by one; it leaves uninitialised what no key fills."""
FUSED_A = f"{MIDLAYER}self_attn.fused_qkv_a_proj_with_mqa.weight"
REQUIRED_LATENT = frozenset((
    "model.fc.weight", "model.norm.weight", "lm_head.weight", FUSED_A,
    *(f"{MIDLAYER}{norm}.weight" for norm in NORMS),
    *(f"{MIDLAYER}self_attn.{name}.weight"
      for name in ("q_a_layernorm", "q_b_proj", "kv_a_layernorm", "kv_b_proj", "o_proj")),
    *(f"{MIDLAYER}mlp.gate_up_proj.weight{shard}" for shard in (".gate_proj", ".up_proj")),
    f"{MIDLAYER}mlp.down_proj.weight",
))  # fmt: skip
"""The same of its class with multi-latent attention."""


def load(tensors: Mapping[str, torch.Tensor], architecture: str, where: str) -> dict[str, torch.Tensor]:
    """Return parameters under the names of the class that `architecture` means, and the vocabulary maps.

    Raises:
        ParityError: a key the class would drop, a parameter it would leave uninitialised, or a class that is not known.
    """
    if architecture not in (LLAMA, LATENT):
        raise ParityError(f"{where}: architectures: expected {LLAMA} or {LATENT}, found {architecture}; export again")
    latent = architecture == LATENT
    filled, dropped = _fill_latent(tensors) if latent else _fill_llama(tensors)
    missing = sorted(((REQUIRED_LATENT if latent else REQUIRED) | {"d2t"}) - set(filled))
    if dropped or missing:
        raise ParityError(f"{where}: SGLang would drop {dropped} and leave {missing} uninitialised; export again")
    return filled


Filled = tuple[dict[str, torch.Tensor], list[str]]


def _fill_llama(tensors: Mapping[str, torch.Tensor]) -> Filled:
    filled: dict[str, torch.Tensor] = {}
    dropped = []
    for key, tensor in tensors.items():
        name = key
        for old, new in RENAMED:
            name = name.replace(old, new)
        if "d2t" in name or "t2d" in name:
            filled[name] = tensor
            continue
        shard = next((part for fused, part in STACKED if part in name), "")
        if shard:
            fused = next(fused for fused, part in STACKED if part == shard)
            name = name.replace(shard, fused) + shard
        full = name if name in REQUIRED else f"model.{name}"
        if full in REQUIRED and full not in filled:
            filled[full] = tensor
        else:
            dropped.append(key)
    return filled, dropped


def _fill_latent(tensors: Mapping[str, torch.Tensor]) -> Filled:
    """The two first projections become one parameter, queries first, once both are there."""
    filled: dict[str, torch.Tensor] = {}
    first: dict[str, torch.Tensor] = {}
    dropped = []
    for key, tensor in tensors.items():
        if key in ("d2t", "t2d"):
            filled[key] = tensor
            continue
        name = re.sub(r"^layers\.0\.", "midlayer.", key)
        name = name if name.startswith("lm_head.") else f"model.{name}"
        for part in ("gate_proj", "up_proj"):
            if f".{part}" in name:
                name = name.replace(part, "gate_up_proj") + f".{part}"
        kind = next((part for part in ("q_a_proj", "kv_a_proj_with_mqa") if part in name), "")
        if kind and name == FUSED_A.replace("fused_qkv_a_proj_with_mqa", kind):
            first[kind] = tensor
            if len(first) == 2:
                filled[FUSED_A] = torch.cat((first["q_a_proj"], first["kv_a_proj_with_mqa"]))
        elif name in REQUIRED_LATENT and name not in filled and not kind:
            filled[name] = tensor
        else:
            dropped.append(key)
    return filled, dropped
