"""DrafterArchitecture: every size of one drafter, as written to `drafter_config.json`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import Field, model_validator

from eagle3_core.config import DrafterConfig, Section
from eagle3_core.errors import ConfigError, TargetError
from eagle3_core.model.latent_sizes import LatentSizes, attention_shapes, check_latent_rope, latent_sizes
from eagle3_core.model.rope_kinds import check_rope

CONFIG_FILE = "drafter_config.json"

MHA_OF_MLA_HEAD_DIM = 128
"""Width every attention kernel of the engines has, for drafters of MLA targets that attend as Llama does."""
SCALED_LOGITS = ("final_logit_softcapping", "logits_scaling", "logit_scale", "embedding_multiplier")
"""Target settings that put something between the last hidden state and the logits, or behind the embedding."""

SCALED_EMBEDDING = ("gemma3_text",)
"""Model types that multiply the embedding on the way in, and whose norms multiply by 1 + weight."""


class DrafterArchitecture(Section):
    """Sizes and constants from which the network is built.

    Version 1 has no `schema_version` and no `mla`; it is read as what it always meant. With `mla` a head is `head_dim`
    wide in queries and keys, and every head has a key and a value of its own.
    """

    schema_version: Literal["eagle3/drafter/2"] = "eagle3/drafter/2"
    hidden_size: int = Field(ge=1, description="Width D, that of the target.")
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    mla: LatentSizes | None = Field(None, description="Sizes of multi-latent attention; none: heads as in Llama.")
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any] = Field(description="As in a transformers 5 config: rope_type, rope_theta, ...")
    max_position_embeddings: int = Field(ge=1)
    vocab_size: int = Field(ge=1, description="Rows of the target's embedding, V.")
    draft_vocab_size: int = Field(ge=1, description="U.")
    aux_layers: tuple[int, ...] = Field(min_length=1, description="Target layers whose outputs are fused, from 0.")
    target_sha256: str = Field(description="Fingerprint of the target the drafter was trained for.")
    target_class: str = Field(description="The target's model class, which decides SGLang's layer-id dialect.")

    @model_validator(mode="after")
    def _heads_divide(self) -> Self:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(f"{self.num_heads} heads cannot share {self.num_kv_heads} key/value heads evenly")
        if self.mla is not None:
            if (self.num_kv_heads, self.head_dim) != (self.num_heads, self.mla.head_dim):
                raise ValueError(
                    f"with mla: expected {self.num_heads} key/value heads of {self.mla.head_dim}, found "
                    f"{self.num_kv_heads} of {self.head_dim}"
                )
            check_latent_rope(self.rope_parameters)
        check_rope(self.rope_parameters)
        return self

    @property
    def value_dim(self) -> int:
        """Return the width of one value head."""
        return self.head_dim if self.mla is None else self.mla.v_head_dim

    @classmethod
    def for_target(
        cls,
        target: Mapping[str, Any],
        wanted: DrafterConfig,
        *,
        aux_layers: tuple[int, ...],
        draft_vocab_size: int,
        target_sha256: str,
    ) -> Self:
        """Derive the sizes from the target's `config.json`; what `wanted` leaves open is the target's.

        Raises:
            TargetError: the target scales or caps its logits, or lacks a size or its class.
            ConfigError: the sizes do not fit together.
        """
        refuse_scaled_logits(target)
        text = target.get("text_config") or target
        try:
            values = {
                "hidden_size": text["hidden_size"],
                "intermediate_size": wanted.intermediate_size or text["intermediate_size"],
                **_heads(text, wanted),
                "rms_norm_eps": text.get("rms_norm_eps", 1e-6),
                "rope_parameters": _rope(text),
                "max_position_embeddings": text["max_position_embeddings"],
                "vocab_size": text["vocab_size"],
            }
        except KeyError as missing:
            raise TargetError(f"target config.json: expected the key {missing}, found none; is it a decoder?") from None
        values |= {"draft_vocab_size": draft_vocab_size, "aux_layers": aux_layers, "target_sha256": target_sha256}
        if not target.get("architectures"):
            raise TargetError("target config.json: expected architectures, found none: the class decides what SGLang's "
                              "layer ids mean; add it")  # fmt: skip
        values["target_class"] = target["architectures"][0]
        return cls.parse(values, "drafter sizes")

    def parameter_shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every trainable or saved tensor, by name."""
        D, F = self.hidden_size, self.intermediate_size
        attention = attention_shapes(D, self.num_heads, self.num_kv_heads, self.head_dim, self.mla)
        return {
            "fc.weight": (D, len(self.aux_layers) * D),
            "layer.input_layernorm.weight": (D,),
            "layer.hidden_norm.weight": (D,),
            **{f"layer.self_attn.{name}.weight": shape for name, shape in attention.items()},
            "layer.post_attention_layernorm.weight": (D,),
            "layer.mlp.gate_proj.weight": (F, D),
            "layer.mlp.up_proj.weight": (F, D),
            "layer.mlp.down_proj.weight": (D, F),
            "norm.weight": (D,),
            "lm_head.weight": (self.draft_vocab_size, D),
        }


def refuse_scaled_logits(target: Mapping[str, Any]) -> None:
    """Refuse targets whose logits are not simply head @ last hidden state.

    Gemma 3's are. Its embedding is scaled on the way in alone, and the drafter norms what it embeds.

    Raises:
        TargetError: names the setting.
    """
    text = target.get("text_config") or target
    for name in SCALED_LOGITS:
        if text.get(name) not in (None, 1, 1.0, 0):
            raise TargetError(
                f"target config.json: {name} = {text[name]}: scaled or capped logits are not supported yet"
            )
    kind = str(text.get("model_type", ""))
    if kind.startswith("gemma") and kind not in SCALED_EMBEDDING:
        raise TargetError(
            f"target model type {kind}: expected {' or '.join(SCALED_EMBEDDING)} of the Gemmas, found another: its "
            "embedding and norms are scaled in ways nobody has checked here; not supported yet"
        )


def _heads(text: Mapping[str, Any], wanted: DrafterConfig) -> dict[str, Any]:
    """Return the attention's sizes: the target's, but with mha of an MLA target, whose heads have no one width."""
    if wanted.attention == "mla":
        heads, mla = wanted.num_heads or text["num_attention_heads"], latent_sizes(text, wanted)
        return {"num_heads": heads, "num_kv_heads": heads, "head_dim": mla.head_dim, "mla": mla}
    if text.get("kv_lora_rank"):
        width = wanted.head_dim or min(MHA_OF_MLA_HEAD_DIM, text["hidden_size"])
        heads = wanted.num_heads or max(1, text["hidden_size"] // width)
        return {"num_heads": heads, "num_kv_heads": wanted.num_kv_heads or heads, "head_dim": width}
    return {
        "num_heads": wanted.num_heads or text["num_attention_heads"],
        "num_kv_heads": wanted.num_kv_heads or _kv_heads(text, wanted),
        "head_dim": wanted.head_dim or text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"],
    }


def _kv_heads(text: Mapping[str, Any], wanted: DrafterConfig) -> int:
    heads, kv_heads = text["num_attention_heads"], text.get("num_key_value_heads") or text["num_attention_heads"]
    if wanted.num_heads is None or wanted.num_heads % kv_heads == 0:
        return int(kv_heads)
    raise ConfigError(
        f"drafter.num_heads {wanted.num_heads}: cannot share the target's {kv_heads} key/value heads (it has {heads} "
        "heads); set drafter.num_kv_heads too"
    )


def _rope(text: Mapping[str, Any]) -> dict[str, Any]:
    """Return the target's RoPE settings in the spelling of transformers 5, whichever it uses."""
    found = dict(text.get("rope_parameters") or text.get("rope_scaling") or {})
    # Where layers differ (Gemma 3), the drafter attends to everything.
    found = dict(found.get("full_attention", found))
    kind = found.pop("type", None)
    found.setdefault("rope_type", kind or "default")
    found.setdefault("rope_theta", text.get("rope_theta", 10000.0))
    # The drafter rotates whole heads: SGLang's class and transformers look for the part in different places.
    found.pop("partial_rotary_factor", None)
    if "mrope_section" in found:
        # Text positions are equal in all sections, which is plain RoPE.
        return {"rope_type": "default", "rope_theta": found["rope_theta"]}
    return found
