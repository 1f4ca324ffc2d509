"""How parameters of one and the same drafter are called by those who train and serve it. Dialects are data."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import TypeVar

from eagle3_core.errors import ExportError

T = TypeVar("T")

LAYER_PARAMETERS = (
    "input_layernorm.weight",
    "hidden_norm.weight",
    "self_attn.q_proj.weight",
    "self_attn.k_proj.weight",
    "self_attn.v_proj.weight",
    "self_attn.o_proj.weight",
    "post_attention_layernorm.weight",
    "mlp.gate_proj.weight",
    "mlp.up_proj.weight",
    "mlp.down_proj.weight",
)
"""Parameters of the one decoder layer; only their prefix differs between dialects."""

SHARED_PARAMETERS = ("fc.weight", "norm.weight", "lm_head.weight")
MAPS = ("d2t", "t2d")
OPTIONAL = ("embed_tokens.weight",)
"""Some files carry the target's embedding; every engine replaces it by the target's own."""


@dataclass(frozen=True)
class Dialect:
    """One way of naming; `layer` is the prefix of the decoder layer's parameters."""

    name: str
    layer: str

    @property
    def required(self) -> frozenset[str]:
        """Return every key a file of this dialect must hold."""
        return frozenset((*SHARED_PARAMETERS, *(self.layer + tail for tail in LAYER_PARAMETERS), *MAPS))

    def rename(self, key: str, to: Dialect) -> str:
        """Return what `to` calls a key of this dialect."""
        return to.layer + key.removeprefix(self.layer) if key.startswith(self.layer) else key


DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("own", "layer."),
        Dialect("sglang", "midlayer."),
        Dialect("vllm", "layers.0."),
    )
}
"""`sglang` is also SpecForge's and EAGLE's spelling, `vllm` also that of speculators."""


def check_keys(found: Collection[str], dialect: Dialect, where: str) -> None:
    """Compare a key set with a dialect's, both ways.

    Raises:
        ExportError: names the missing and the unknown keys.
    """
    missing = sorted(dialect.required - set(found))
    unknown = sorted(set(found) - dialect.required - set(OPTIONAL))
    if missing or unknown:
        parts = [f"missing {', '.join(missing)}"] if missing else []
        parts += [f"unknown {', '.join(unknown)}"] if unknown else []
        raise ExportError(
            f"{where}: not the keys of an EAGLE-3 drafter in the {dialect.name} dialect: {'; '.join(parts)}; "
            "an engine would drop or leave such parameters uninitialised without a word"
        )


def detect(found: Collection[str], where: str = "drafter") -> Dialect:
    """Return the one dialect whose keys these are.

    Raises:
        ExportError: keys of no dialect or of several, or a key set that is not whole.
    """
    seen = [dialect for dialect in DIALECTS.values() if any(key.startswith(dialect.layer) for key in found)]
    if len(seen) != 1:
        prefixes = ", ".join(f"{dialect.layer}* ({dialect.name})" for dialect in DIALECTS.values())
        what = f"keys of {' and '.join(d.name for d in seen)} mixed" if seen else f"{sorted(found)[:4]}"
        raise ExportError(f"{where}: expected layer parameters of exactly one dialect, {prefixes}; found {what}")
    check_keys(found, seen[0], where)
    return seen[0]


def remap(tensors: Mapping[str, T], to: str, where: str = "drafter") -> dict[str, T]:
    """Return the same tensors under the names of dialect `to`; values are passed on untouched.

    Raises:
        ExportError: `to` is unknown, or the source is not exactly one known dialect.
    """
    if to not in DIALECTS:
        raise ExportError(f"dialect {to!r}: unknown, known are {', '.join(DIALECTS)}")
    source = detect(tensors, where)
    return {source.rename(key, DIALECTS[to]): value for key, value in tensors.items()}
