"""A second, minimal drafter that reads an exported directory the way SGLang 0.5.23 does and computes what it would.

It shares no code with `eagle3_core.model` on purpose: parity means two independent readings of the same files agree.

Letters: T positions of one sample, S = T - 1 slots (slot t consumes token t+1 and predicts token t+2), D width,
A aux layers, V target vocab, U draft vocab, K draft steps, H query heads, G key/value heads, d head width.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file

from eagle3_core.errors import ParityError, TargetError
from eagle3_core.evaluate.rotations import rotations

RENAMED = (("midlayer", "layers.0"),)
STACKED = ((".qkv_proj", ".q_proj"), (".qkv_proj", ".k_proj"), (".qkv_proj", ".v_proj"),
           (".gate_up_proj", ".gate_proj"), (".gate_up_proj", ".up_proj"))  # fmt: skip
LAYER = "model.layers.0."
REQUIRED = frozenset((
    "model.fc.weight", "model.norm.weight", "lm_head.weight",
    *(f"{LAYER}{norm}.weight" for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm")),
    *(f"{LAYER}self_attn.qkv_proj.weight{shard}" for shard in (".q_proj", ".k_proj", ".v_proj")),
    f"{LAYER}self_attn.o_proj.weight",
    *(f"{LAYER}mlp.gate_up_proj.weight{shard}" for shard in (".gate_proj", ".up_proj")),
    f"{LAYER}mlp.down_proj.weight",
))  # fmt: skip
"""What SGLang's class allocates, fused parameters one by one; it leaves uninitialised what no key fills."""


@dataclass(frozen=True)
class TargetEnds:
    """The two matrices a drafter borrows: embedding and head, both [V, D] in float32."""

    embedding: torch.Tensor
    head: torch.Tensor

    @classmethod
    def load(cls, directory: Path) -> TargetEnds:
        """Read them from a target's safetensors files.

        Raises:
            TargetError: there is no embedding.
        """
        found: dict[str, torch.Tensor] = {}
        for file in sorted(directory.glob("*.safetensors")):
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 - not a dict
                    for wanted in ("embed_tokens.weight", "lm_head.weight"):
                        if name == wanted or name.endswith(f".{wanted}"):
                            found[wanted] = tensors.get_tensor(name).float()
        if "embed_tokens.weight" not in found:
            raise TargetError(f"{directory}: expected *.safetensors with embed_tokens.weight, found none")
        embedding = found["embed_tokens.weight"]
        return cls(embedding, found.get("lm_head.weight", embedding))

    def argmax(self, last_hidden_state: torch.Tensor) -> torch.Tensor:
        """Return the target's greedy tokens [T] from post-norm states [T, D], over the full vocab."""
        rows = [(chunk.float() @ self.head.T).argmax(-1) for chunk in last_hidden_state.split(512)]
        return torch.cat(rows)


def load_as_sglang(tensors: Mapping[str, torch.Tensor], where: str) -> dict[str, torch.Tensor]:
    """Return parameters under SGLang's names, following its loader's name rules.

    Raises:
        ParityError: a key SGLang would drop, or a parameter it would leave uninitialised.
    """
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
    missing = sorted((REQUIRED | {"d2t"}) - set(filled))
    if dropped or missing:
        raise ParityError(f"{where}: SGLang would drop {dropped} and leave {missing} uninitialised; export again")
    return filled


@dataclass(frozen=True)
class Reference:
    """An exported drafter, loaded; all arithmetic in float32."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    target_ids: torch.Tensor
    embedding: torch.Tensor
    without_norm: str = ""
    """A norm that is left out on purpose, for a negative control."""

    @classmethod
    def load(cls, directory: Path, ends: TargetEnds) -> Reference:
        """Read `config.json` and `model.safetensors` as SGLang would.

        Raises:
            ParityError: what SGLang would not load as meant.
        """
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        weights = load_as_sglang(load_file(directory / "model.safetensors"), str(directory))
        _check_config(config, weights, str(directory))
        d2t = weights["d2t"]
        return cls(config, {name: tensor.float() for name, tensor in weights.items() if name in REQUIRED},
                   d2t + torch.arange(d2t.numel()), ends.embedding)  # fmt: skip

    def fuse(self, aux_hidden_states: torch.Tensor) -> torch.Tensor:
        """Return f [T, D] from aux hidden states [T, A*D]."""
        return aux_hidden_states.float() @ self.weights["model.fc.weight"].T

    def unroll(
        self,
        input_ids: torch.Tensor,
        aux_hidden_states: torch.Tensor,
        steps: int,
        *,
        rows: torch.Tensor,
        drafting: bool = False,
    ) -> torch.Tensor:
        """Return draft logits [steps, R, U] at slots `rows`: at step k slot t, for token t+2+k.

        Step k reads the true token t+1+k (0 past the end, where the logits mean nothing); with `drafting` its own
        previous proposal instead, as a server does.
        """
        tokens = input_ids[1:]
        carried = self.fuse(aux_hidden_states[: tokens.numel()])
        keys: list[torch.Tensor] = []
        values: list[torch.Tensor] = []
        logits = []
        for step in range(steps):
            carried = self._layer(tokens, carried, step, keys, values)
            normed = self._normed("model.norm", carried[rows])
            logits.append(normed @ self.weights["lm_head.weight"].T)
            if drafting:
                tokens = tokens.clone()
                tokens[rows] = self.proposals(logits[-1]).clamp(0, self.embedding.shape[0] - 1)
            else:
                tokens = torch.cat([tokens[1:], tokens.new_zeros(1)])
        return torch.stack(logits)

    def proposals(self, logits: torch.Tensor) -> torch.Tensor:
        """Return the target ids SGLang would draft, by arg-max and d2t."""
        return self.target_ids[logits.argmax(-1)]

    def _normed(self, name: str, states: torch.Tensor) -> torch.Tensor:
        """Return states [..., D] after an RMS norm."""
        if name == self.without_norm:
            return states
        scale = torch.rsqrt(states.pow(2).mean(-1, keepdim=True) + float(self.config["rms_norm_eps"]))
        return states * scale * self.weights[f"{name}.weight"]

    def _heads(self, name: str, states: torch.Tensor, width: int) -> torch.Tensor:
        projected = states @ self.weights[f"{LAYER}self_attn.qkv_proj.weight.{name}_proj"].T
        return projected.view(states.shape[0], -1, width).transpose(0, 1)

    def _layer(
        self, tokens: torch.Tensor, carried: torch.Tensor, step: int,
        keys: list[torch.Tensor], values: list[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Return the pre-norm output [S, D] of one step, and append its keys and values [H, S, d]."""
        width = int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])
        embedded = self._normed(f"{LAYER}input_layernorm", self.embedding[tokens])
        normed = self._normed(f"{LAYER}hidden_norm", carried)
        states = torch.cat([embedded, normed], dim=-1)
        cos, sin = rotations(self.config, torch.arange(step, step + tokens.numel()), width)
        queries = _rotate(self._heads("q", states, width), cos, sin)
        groups = queries.shape[0] // int(self.config["num_key_value_heads"])
        keys.append(_rotate(self._heads("k", states, width), cos, sin).repeat_interleave(groups, dim=0))
        values.append(self._heads("v", states, width).repeat_interleave(groups, dim=0))
        attended = _attend(queries, keys, values).transpose(0, 1).reshape(tokens.numel(), -1)
        residual = carried + attended @ self.weights[f"{LAYER}self_attn.o_proj.weight"].T
        inner = self._normed(f"{LAYER}post_attention_layernorm", residual)
        gate = inner @ self.weights[f"{LAYER}mlp.gate_up_proj.weight.gate_proj"].T
        up = inner @ self.weights[f"{LAYER}mlp.gate_up_proj.weight.up_proj"].T
        mlp = (torch.nn.functional.silu(gate) * up) @ self.weights[f"{LAYER}mlp.down_proj.weight"].T
        return residual + mlp


def _attend(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]) -> torch.Tensor:
    """Attend to the true history (step 0, causal) and to the own chain (later steps, same slot only)."""
    scale = 1.0 / math.sqrt(queries.shape[-1])
    slots = queries.shape[1]
    history = queries @ keys[0].transpose(1, 2) * scale
    future = torch.ones(slots, slots, dtype=torch.bool).triu(1)
    scores = [history.masked_fill(future, -math.inf)]
    scores += [(queries * own).sum(-1, keepdim=True) * scale for own in keys[1:]]
    weights = torch.cat(scores, dim=-1).softmax(-1)
    out = weights[..., :slots] @ values[0]
    for index, own in enumerate(values[1:]):
        out = out + weights[..., slots + index : slots + index + 1] * own
    return out


def _rotate(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _check_config(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Check what SGLang takes from the config without looking at the weights."""
    aux = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    facts = {
        "architectures": (config.get("architectures"), ["LlamaForCausalLMEagle3"]),
        "tie_word_embeddings": (config.get("tie_word_embeddings"), False),
        "draft_vocab_size": (config.get("draft_vocab_size"), weights["lm_head.weight"].shape[0]),
        "rows of d2t": (weights["d2t"].numel(), weights["lm_head.weight"].shape[0]),
        "width of fc": (weights["model.fc.weight"].shape[1], len(aux) * int(config["hidden_size"])),
    }
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise ParityError(f"{where}: {name}: expected {wanted}, found {found}; export again")
