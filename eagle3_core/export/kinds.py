"""Refuse values of another kind than their key has: "false" in quotes is true to Python, and 0 or [] is no size."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eagle3_core.config.drafter import LATENT_SIZES
from eagle3_core.errors import ExportError
from eagle3_core.export.dialects import BLOCK, IDS, NESTED_CONFIG

Fits = Callable[[object], bool]


def _whole(value: object) -> bool:
    return type(value) is int


def _list_of(fits: Fits) -> Fits:
    return lambda value: isinstance(value, list) and all(map(fits, value))


def _text(value: object) -> bool:
    return isinstance(value, str)


_OBJECTS = ("rope_parameters", "rope_scaling", "eagle_config", "speculators_config", "verifier", NESTED_CONFIG, BLOCK)
_KINDS: dict[str, tuple[tuple[str, ...], Fits]] = {
    "a whole number from 1 on": (
        ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
         "head_dim", "vocab_size", "draft_vocab_size", "target_hidden_size", "num_aux_hidden_states", "sliding_window",
         "max_position_embeddings", "target_layers", *LATENT_SIZES),
        lambda value: type(value) is int and value >= 1,
    ),
    "a number": (("rms_norm_eps", "rope_theta", "partial_rotary_factor"), lambda value: type(value) in (int, float)),
    "true or false": (
        ("tie_word_embeddings", "norm_before_residual", "norm_output", "norm_before_fc", "fc_norm", "use_aux_norm",
         "use_aux_hidden_state", "use_sliding_window", "attention_bias", "mlp_bias", "bias", "rope_interleave",
         "parallel_drafting", "mla_use_nope", "mla_use_output_gate"),
        lambda value: isinstance(value, bool),
    ),
    "a list of whole numbers": ((IDS, "aux_layers"), _list_of(_whole)),
    "a list of names": (("architectures", "layer_types"), _list_of(_text)),
    "a token id or a list of them": (
        ("bos_token_id", "eos_token_id"), lambda value: _whole(value) or _list_of(_whole)(value),
    ),
    "a name": (
        ("model_type", "hidden_act", "rope_type", "type", "dialect", "target_class", "target_sha256", "name_or_path"),
        _text,
    ),
    "an object": (_OBJECTS, lambda value: isinstance(value, dict)),
}  # fmt: skip
_BY_NAME = {name: (what, fits) for what, (names, fits) in _KINDS.items() for name in names}


def check_kinds(config: Mapping[str, object], where: str) -> None:
    """Check every value that is read here, in the objects within, too; null is none.

    Raises:
        ExportError: names the first key whose value is of another kind.
    """
    for name, value in config.items():
        if value is None or name not in _BY_NAME:
            continue
        what, fits = _BY_NAME[name]
        if not fits(value):
            raise ExportError(f"{where}: {name}: expected {what}, found {value!r:.60}; correct it")
        if isinstance(value, dict):
            check_kinds(value, where)
