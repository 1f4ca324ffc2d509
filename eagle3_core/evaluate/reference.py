"""A second, minimal drafter that reads an exported directory the way SGLang 0.5.23 does and computes what it would.

It shares no code with `eagle3_core.model` on purpose: parity means two independent readings of the same files agree.

Letters: T positions of one sample, S = T - 1 slots (slot t consumes token t+1 and predicts token t+2), D width,
A aux layers, V target vocab, U draft vocab, K draft steps, H query heads, G key/value heads, d head width; with MLA L
width of the latent and r of the rotated part.
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
from eagle3_core.evaluate.loaders import FUSED_A, LATENT, LAYER, MIDLAYER, load
from eagle3_core.evaluate.rotations import latent_rotations, latent_scale, rotations


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


@dataclass(frozen=True)
class Reference:
    """An exported drafter, loaded; all arithmetic in float32."""

    config: Mapping[str, Any]
    weights: Mapping[str, torch.Tensor]
    target_ids: torch.Tensor
    embedding: torch.Tensor
    without_norm: str = ""
    """A norm that is left out on purpose, for a negative control."""
    still: bool = False
    """Nothing is rotated, for another one."""

    @classmethod
    def load(cls, directory: Path, ends: TargetEnds) -> Reference:
        """Read `config.json` and `model.safetensors` as SGLang would.

        Raises:
            ParityError: what SGLang would not load as meant.
        """
        config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
        architecture = str((config.get("architectures") or ["none"])[0])
        weights = load(load_file(directory / "model.safetensors"), architecture, str(directory))
        _check_config(config, weights, str(directory))
        d2t = weights["d2t"]
        floats = {name: tensor.float() for name, tensor in weights.items() if tensor.is_floating_point()}
        kind = LatentReference if architecture == LATENT else Reference
        return kind(config, floats, d2t + torch.arange(d2t.numel()), ends.embedding)

    @property
    def layer(self) -> str:
        """Return the prefix of the decoder layer's parameters."""
        return LAYER

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

    def _layer(
        self, tokens: torch.Tensor, carried: torch.Tensor, step: int,
        keys: list[torch.Tensor], values: list[torch.Tensor],
    ) -> torch.Tensor:  # fmt: skip
        """Return the pre-norm output [S, D] of one step, and append its keys and values [H, S, ...]."""
        embedded = self._normed(f"{self.layer}input_layernorm", self.embedding[tokens])
        states = torch.cat([embedded, self._normed(f"{self.layer}hidden_norm", carried)], dim=-1)
        positions = torch.arange(step, step + tokens.numel())
        attended = self._attended(states, positions * 0 if self.still else positions, keys, values)
        residual = carried + attended @ self._weight("self_attn.o_proj").T
        inner = self._normed(f"{self.layer}post_attention_layernorm", residual)
        gate = inner @ self.weights[f"{self.layer}mlp.gate_up_proj.weight.gate_proj"].T
        up = inner @ self.weights[f"{self.layer}mlp.gate_up_proj.weight.up_proj"].T
        return residual + (torch.nn.functional.silu(gate) * up) @ self._weight("mlp.down_proj").T

    def _weight(self, name: str) -> torch.Tensor:
        return self.weights[f"{self.layer}{name}.weight"]

    def _attended(
        self, states: torch.Tensor, positions: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return attention's output [S, H*d] for states [S, 2D], and append keys and values [H, S, d]."""
        width = int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])
        queries, key, value = (
            (states @ self.weights[f"{self.layer}self_attn.qkv_proj.weight.{name}_proj"].T)
            .view(len(states), -1, width).transpose(0, 1)
            for name in "qkv"
        )  # fmt: skip
        cos, sin = rotations(self.config, positions, width)
        groups = queries.shape[0] // int(self.config["num_key_value_heads"])
        keys.append(_rotate(key, cos, sin).repeat_interleave(groups, dim=0))
        values.append(value.repeat_interleave(groups, dim=0))
        return _attend(_rotate(queries, cos, sin), keys, values, width**-0.5).transpose(0, 1).flatten(1)


@dataclass(frozen=True)
class LatentReference(Reference):
    """A drafter with MLA as SGLang decodes: what is cached is the latent and one rotated part of the key (absorbed)."""

    halves: bool = False
    """Halves are paired instead of neighbours, for a negative control."""
    values_first: bool = False
    """kv_b is read with the values' rows first, for another one."""

    @property
    def layer(self) -> str:
        """Return the prefix of the decoder layer's parameters."""
        return MIDLAYER

    def _attended(
        self, states: torch.Tensor, positions: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor]
    ) -> torch.Tensor:
        """Return attention's output [S, H*v] for states [S, 2D]; append keys [H, S, L + r] and values [H, S, L]."""
        plain, turned, latent, heads = (
            int(self.config[name])
            for name in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank", "num_attention_heads")
        )
        asked, cached, tail = (states @ self.weights[FUSED_A].T).split(
            [int(self.config["q_lora_rank"]), latent, turned], dim=-1
        )
        to_keys, to_values = self._kv_b(heads, plain)
        asked = self._normed(f"{self.layer}self_attn.q_a_layernorm", asked) @ self._weight("self_attn.q_b_proj").T
        before, behind = asked.view(len(states), heads, -1).transpose(0, 1).split([plain, turned], dim=-1)
        cos, sin = latent_rotations(self.config, positions, turned)
        rotate = _rotate if self.halves else _rotate_pairs
        queries = torch.cat((before @ to_keys, rotate(behind, cos, sin)), dim=-1)
        cached = self._normed(f"{self.layer}self_attn.kv_a_layernorm", cached)
        keys.append(torch.cat((cached, rotate(tail, cos, sin)), dim=-1).expand(heads, -1, -1))
        values.append(cached.expand(heads, -1, -1))
        out = _attend(queries, keys, values, latent_scale(self.config) * (plain + turned) ** -0.5)
        return (out @ to_values.transpose(1, 2)).transpose(0, 1).flatten(1)

    def _kv_b(self, heads: int, plain: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what makes keys [H, nope, L] and values [H, v, L] of the latent."""
        rows = self._weight("self_attn.kv_b_proj").unflatten(0, (heads, -1))
        width = rows.shape[1] - plain
        if self.values_first:
            return rows[:, width:], rows[:, :width]
        return rows[:, :plain], rows[:, plain:]


def _attend(queries: torch.Tensor, keys: list[torch.Tensor], values: list[torch.Tensor], scale: float) -> torch.Tensor:
    """Attend to the true history (step 0, causal) and to the own chain (later steps, same slot only)."""
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


def _rotate_pairs(states: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    even, odd = states[..., ::2], states[..., 1::2]
    return torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1).flatten(-2)


def _check_config(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor], where: str) -> None:
    """Check what SGLang takes from the config without looking at the weights."""
    aux = (config.get("eagle_config") or {}).get("eagle_aux_hidden_state_layer_ids") or []
    facts = {
        "tie_word_embeddings": (config.get("tie_word_embeddings"), False),
        "draft_vocab_size": (config.get("draft_vocab_size"), weights["lm_head.weight"].shape[0]),
        "rows of d2t": (weights["d2t"].numel(), weights["lm_head.weight"].shape[0]),
        "width of fc": (weights["model.fc.weight"].shape[1], len(aux) * int(config["hidden_size"])),
    }
    if config["architectures"] == [LATENT]:
        facts |= _latent_facts(config, weights)
    for name, (found, wanted) in facts.items():
        if found != wanted:
            raise ParityError(f"{where}: {name}: expected {wanted}, found {found}; export again")


def _latent_facts(config: Mapping[str, Any], weights: Mapping[str, torch.Tensor]) -> dict[str, tuple[Any, Any]]:
    """Return what of the config must fit the weights of a drafter with MLA: what is found, and what is wanted."""
    heads, plain, turned, wide = (
        int(config[name]) for name in ("num_attention_heads", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    )
    latents = int(config["q_lora_rank"]) + int(config["kv_lora_rank"])
    rows = {name: len(weights[f"{MIDLAYER}self_attn.{name}.weight"]) for name in ("q_b_proj", "kv_b_proj")}
    return {
        # Absent it means true to SGLang; false would pair halves.
        "rope_interleave": (config.get("rope_interleave", True), True),
        "rows of q_a and kv_a": (len(weights[FUSED_A]), latents + turned),
        "rows of q_b": (rows["q_b_proj"], heads * (plain + turned)),
        "rows of kv_b": (rows["kv_b_proj"], heads * (plain + wide)),
    }
