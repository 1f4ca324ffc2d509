"""DrafterFacts: what a drafter's config says, whichever dialect it is written in."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Self

from pydantic import Field

from eagle3_core.config import Section
from eagle3_core.config.drafter import LATENT_SIZES
from eagle3_core.errors import ConfigError, ExportError
from eagle3_core.export.dialects import BLOCK, IDS, NESTED_CONFIG, Dialect, Numbering
from eagle3_core.export.names import ATTENTION, EMBEDDING, FC_NORMS, HEAD, INPUT_NORM, LAYER
from eagle3_core.export.numbering import Target, translate
from eagle3_core.export.rope import read_rope
from eagle3_core.model.architecture import DrafterArchitecture
from eagle3_core.model.latent_sizes import LatentSizes, attention_shapes, check_latent_rope
from eagle3_core.model.rope_kinds import check_rope

LLAMA_LIKE = ("llama", "mistral", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "phi3")
"""Model types under which plain RMS norms and SwiGLU are meant; the key set says the rest."""
DEEPSEEK_LIKE = ("deepseek_v2", "deepseek_v3", "kimi_k2")
"""The same for drafters with MLA."""
LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "rope_theta": 1e4}
"""What transformers takes where a config of type llama lacks the key, and so whoever trained or serves by it."""


class DrafterFacts(Section):
    """Sizes, constants and deviations of one drafter; `layer_ids` None means the default layers of EAGLE-3."""

    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    head_dim: int = Field(ge=2)
    mla: LatentSizes | None = None
    hidden_act: str = "silu"
    rms_norm_eps: float = Field(gt=0)
    rope_parameters: dict[str, Any]
    max_position_embeddings: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    draft_vocab_size: int = Field(ge=1)
    target_hidden_size: int = Field(ge=1)
    num_aux: int = Field(ge=1)
    layer_ids: tuple[int, ...] | None = None
    numbering: Numbering = Numbering.OUTPUTS
    tied: bool = False
    norm_before_residual: bool = False
    norm_output: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    sliding_window: int | None = None
    bos_token_id: int | list[int] | None = None
    eos_token_id: int | list[int] | None = None
    target_class: str | None = None
    target_layers: int | None = None
    target_sha256: str | None = None
    target_name: str | None = None
    speculators_config: dict[str, Any] | None = None
    assumed: dict[str, float] = Field(default_factory=dict, description="What the config lacks, by LLAMA_DEFAULTS.")

    @property
    def target(self) -> Target:
        """Return what is known of the target."""
        return Target(self.target_class, self.target_layers)

    @property
    def extras(self) -> frozenset[str]:
        """Return in what this drafter deviates from plain EAGLE-3."""
        names = ("norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "sliding_window")
        other = {"target_hidden_size"} if self.target_hidden_size != self.hidden_size else set()
        return frozenset({name for name in names if getattr(self, name)} | other)

    def shapes(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of every parameter this drafter can have, by canonical name."""
        D, F, V, U = self.hidden_size, self.intermediate_size, self.vocab_size, self.draft_vocab_size
        attention = attention_shapes(D, self.num_heads, self.num_kv_heads, self.head_dim, self.mla)
        wide = self.target_hidden_size
        norms = {"norm.weight": (D,)}
        norms |= {f"{LAYER}{n}.weight": (D,) for n in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
        if self.norm_before_fc:
            norms[INPUT_NORM] = (self.num_aux * wide,)
        if self.fc_norm:
            norms |= {name: (wide,) for name in FC_NORMS[: self.num_aux]}
        return {
            **norms,
            "fc.weight": (D, self.num_aux * wide),
            **{f"{ATTENTION}{name}.weight": shape for name, shape in attention.items()},
            f"{LAYER}mlp.gate_proj.weight": (F, D),
            f"{LAYER}mlp.up_proj.weight": (F, D),
            f"{LAYER}mlp.down_proj.weight": (D, F),
            HEAD: (U, D),
            EMBEDDING: (V, D),
            "d2t": (U,),
            "t2d": (V,),
        }

    @classmethod
    def of_architecture(cls, sizes: DrafterArchitecture) -> Self:
        """Return the facts of a drafter of our own."""
        names = {name: getattr(sizes, name) for name in type(sizes).model_fields if name in cls.model_fields}
        return cls(
            **names, target_hidden_size=sizes.hidden_size, num_aux=len(sizes.aux_layers), layer_ids=sizes.aux_layers
        )

    @classmethod
    def read(cls, config: Mapping[str, Any], dialect: Dialect, where: str, *, mla: bool = False) -> Self:
        """Read a config as whoever reads `dialect` does; `mla` says what attention the parameters are of.

        Raises:
            ExportError: a size is missing, two settings contradict each other, or the drafter is none we understand.
        """
        try:
            if dialect.config == "own":
                facts = cls.of_architecture(DrafterArchitecture.parse(config, where))
            else:
                facts = cls.parse(_values(config, dialect, where, mla=mla), where)
        except ConfigError as error:
            raise ExportError(f"{error}; correct {where}") from None
        if mla != (facts.mla is not None):
            raise ExportError(f"{where}: mla: expected {'sizes' if mla else 'none'}, as its parameters have it, found "
                              f"{facts.mla}; config and weights are of two drafters")  # fmt: skip
        try:
            if mla:
                check_latent_rope(facts.rope_parameters)
            check_rope(facts.rope_parameters)
        except ValueError as error:
            raise ExportError(f"{where}: {error}") from None
        return facts


def _missing(key: object, where: str) -> ExportError:
    return ExportError(f"{where}: expected the key {key}, found none; add it from the training config")


def _values(config: Mapping[str, Any], dialect: Dialect, where: str, *, mla: bool) -> dict[str, Any]:
    inner = config.get(NESTED_CONFIG) if dialect.config == "nested" else config
    if not isinstance(inner, dict):
        raise ExportError(f"{where}: expected {NESTED_CONFIG} as an object, found {inner!r:.60}; save it again")
    if dialect.targets_config:
        inner = {name: value for name, value in inner.items() if name not in _TARGETS}
    eagle = config.get("eagle_config") if isinstance(config.get("eagle_config"), dict) else {}
    merged = {**inner, **{name: config[name] for name in _OUTER if config.get(name) is not None}}
    _refuse(merged, eagle or {}, where, mla=mla)
    defaults = LLAMA_DEFAULTS if merged.get("model_type") == "llama" else {}
    given = merged.keys() | read_rope(merged, where).keys()
    assumed = {name: value for name, value in defaults.items() if name not in given}
    merged |= assumed
    try:
        sizes = _sizes(merged, mla=mla)
    except KeyError as missing:
        raise _missing(missing, where) from None
    block = config.get(BLOCK) or {}
    ids = config.get(IDS) if dialect.numbering is Numbering.ENTRIES else (eagle or {}).get(IDS)
    aux = merged.get("num_aux_hidden_states") or (len(ids) if ids else 3)
    values = {
        **sizes,
        "rope_parameters": read_rope(merged, where),
        "layer_ids": ids or None,
        "num_aux": aux,
        "numbering": dialect.numbering,
        "tied": bool(config.get("tie_word_embeddings", False)),
        "norm_before_residual": _norm_before_residual(config, dialect, where),
        "norm_output": _norm_output(config, dialect, where),
        "norm_before_fc": bool((eagle or {}).get("norm_before_fc", config.get("norm_before_fc", False))),
        "fc_norm": bool(config.get("fc_norm") or config.get("use_aux_norm", False)),
        "sliding_window": _window(inner),
        "target_class": block.get("target_class"),
        "target_layers": block.get("target_layers"),
        "target_sha256": block.get("target_sha256"),
        "speculators_config": config.get("speculators_config"),
        "assumed": assumed,
    }
    if ids and len(ids) != aux:
        raise ExportError(f"{where}: expected {aux} layer ids (num_aux_hidden_states), found {list(ids)}; correct one")
    _declared_layers(values, block, where)
    return values


_TARGETS = ("num_hidden_layers", "sliding_window")
_OUTER = ("draft_vocab_size", "target_hidden_size", "bos_token_id", "eos_token_id", "quantization_config",
          "parallel_drafting")  # fmt: skip
_OURS = {"dialect", "aux_layers", "target_class", "target_layers", "target_sha256"}


def _sizes(config: Mapping[str, Any], *, mla: bool) -> dict[str, Any]:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    plain = {
        "num_kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or hidden // heads,
    }
    if mla:
        latent = LatentSizes.parse({name: config[name] for name in LATENT_SIZES}, "drafter sizes")
        plain = {"num_kv_heads": heads, "head_dim": latent.head_dim, "mla": latent}
    return {
        "hidden_size": hidden,
        "intermediate_size": config["intermediate_size"],
        "num_heads": heads,
        **plain,
        "hidden_act": config.get("hidden_act", "silu"),
        "rms_norm_eps": config["rms_norm_eps"],
        "max_position_embeddings": config["max_position_embeddings"],
        "vocab_size": config["vocab_size"],
        "draft_vocab_size": config.get("draft_vocab_size") or config["vocab_size"],
        "target_hidden_size": config.get("target_hidden_size") or hidden,
        "bos_token_id": config.get("bos_token_id"),
        "eos_token_id": config.get("eos_token_id"),
    }


def _refuse(config: Mapping[str, Any], eagle: Mapping[str, Any], where: str, *, mla: bool) -> None:
    """Refuse what no reader of these parameters computes."""
    kinds = DEEPSEEK_LIKE if mla else LLAMA_LIKE
    wanted = (
        ("num_hidden_layers", config.get("num_hidden_layers", 1), (1,)),
        ("model_type", config.get("model_type", kinds[0]), kinds),
        ("rope_interleave", config.get("rope_interleave", mla) if mla else False, (mla,)),
        ("mla_use_nope", config.get("mla_use_nope") or False, (False,)),
        ("mla_use_output_gate", config.get("mla_use_output_gate") or False, (False,)),
        ("hidden_act", config.get("hidden_act", "silu"), ("silu", "swish")),
        ("attention_bias", config.get("attention_bias") or False, (False,)),
        ("mlp_bias", config.get("mlp_bias") or False, (False,)),
        ("bias", config.get("bias") or False, (False,)),
        ("parallel_drafting", config.get("parallel_drafting") or False, (False,)),
        ("quantization_config", config.get("quantization_config"), (None,)),
        ("eagle_config.use_aux_hidden_state", eagle.get("use_aux_hidden_state", True), (True,)),
    )
    for name, found, good in wanted:
        if found not in good:
            raise ExportError(
                f"{where}: {name}: expected {' or '.join(map(str, good))}, found {found!r:.60}: the file holds no "
                "parameters for it; correct the config, or this is a drafter of another kind"
            )


def _norm_before_residual(config: Mapping[str, Any], dialect: Dialect, where: str) -> bool:
    if dialect.config == "nested" and "norm_before_residual" not in config:
        raise ExportError(
            f"{where}: expected norm_before_residual, found none: vLLM then takes true, the speculators library false; "
            "add what it was trained with"
        )
    return bool(config.get("norm_before_residual", False))


def _norm_output(config: Mapping[str, Any], dialect: Dialect, where: str) -> bool:
    if dialect.carries_normed:
        return bool(config.get("norm_output", False))
    if config.get("norm_output", True) is False:
        raise ExportError(
            f"{where}: norm_output: expected true or none from {dialect.name}, found false: its head then reads states "
            "without the norm, which no engine does; train it with the norm"
        )
    return False


def _window(config: Mapping[str, Any]) -> int | None:
    """Return the sliding window that would be used, as transformers decides it."""
    window = config.get("sliding_window")
    if not window or config.get("use_sliding_window", True) is False:
        return None
    kinds = config.get("layer_types")
    return None if kinds and kinds[0] == "full_attention" else int(window)


def _declared_layers(values: dict[str, Any], block: Mapping[str, Any], where: str) -> None:
    """Check our own block's layers against the ids an engine reads; they were written together."""
    if strange := sorted(set(block) - _OURS):
        raise ExportError(f"{where}: {BLOCK}: expected {', '.join(sorted(_OURS))}, found {strange[0]}; it is of a "
                          "newer version, or edited: write it with this one")  # fmt: skip
    declared = block.get("aux_layers")
    if declared is None:
        return
    target = Target(block.get("target_class"), block.get("target_layers"))
    found = translate(values["layer_ids"] or (), values["numbering"], Numbering.OUTPUTS, target, where)
    if list(found) != list(declared):
        raise ExportError(
            f"{where}: expected {IDS} to mean {BLOCK}.aux_layers {list(declared)}, found outputs of {list(found)}; one "
            "of them was edited, correct it"
        )
