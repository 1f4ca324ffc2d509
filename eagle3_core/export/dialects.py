"""How parameters of one and the same drafter are called by those who train and serve it. Dialects are data.

A canonical name (`names.py`) is our own: `fc.weight`, `layer.self_attn.q_proj.weight`, `d2t`. Everything else is
spelling, plus the few habits that decide how a config is read: where the aux layer ids stand and what they count.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from eagle3_core.errors import ExportError
from eagle3_core.export.names import HEAD, LAYER, MAPS, OLDER, canonical, required
from eagle3_core.model.rope_kinds import NEEDED

WRAPPERS = frozenset({"_orig_mod", "module"})
"""Path elements that torch.compile and DistributedDataParallel put into names; no parameter has one of its own."""


class Numbering(StrEnum):
    """What an aux layer id counts: the layer whose output is meant, the one it enters, or SGLang's rule per class."""

    OUTPUTS = "outputs"
    ENTRIES = "entries"
    SGLANG = "sglang"


@dataclass(frozen=True)
class Served:
    """What whoever reads a dialect computes: under which class, in which deviations from plain EAGLE-3, which RoPE."""

    architecture: str
    extras: frozenset[str] = frozenset()
    rope_types: frozenset[str] = frozenset(NEEDED)


@dataclass(frozen=True)
class Dialect:
    """One way of naming and configuring.

    `layer` is the prefix of the decoder layer's parameters, `root` that of all others but head and vocabulary maps.
    `mla` is None where no reader of this dialect is known to compute multi-latent attention.
    """

    name: str
    layer: str
    root: str = ""
    has_t2d: bool = True
    config: Literal["own", "flat", "nested"] = "flat"
    numbering: Numbering = Numbering.SGLANG
    mha: Served = Served("LlamaForCausalLMEagle3")
    mla: Served | None = None
    reader: str = "SGLang"
    carries_normed: bool = True
    """`norm_output` says that the carried state is normed, as engines have it; SpecForge: that the head's input is."""
    targets_config: bool = False
    """The config is the target's with a few keys more, so that its layers and its window are the target's."""

    @property
    def keys(self) -> tuple[str, str]:
        """Return what tells key sets apart; dialects with equal `keys` differ in their config alone."""
        return self.layer, self.root

    def spell(self, name: str) -> str:
        """Return what this dialect calls a parameter, given its canonical name."""
        if name.startswith(LAYER):
            return self.layer + name.removeprefix(LAYER)
        return name if name in (HEAD, *MAPS) else self.root + name

    def served(self, *, mla: bool, where: str) -> Served:
        """Return what is computed of drafters with this attention.

        Raises:
            ExportError: nothing is known of MLA there.
        """
        if not mla:
            return self.mha
        if self.mla is None:
            raise ExportError(
                f"{where}: expected q_proj, k_proj and v_proj as in Llama for {self.name}, found kv_a_proj_with_mqa, "
                f"so an MLA drafter: nothing is known here of {self.reader} reading one in that dialect; choose one of "
                f"{', '.join(name for name, dialect in DIALECTS.items() if dialect.mla)}"
            )
        return self.mla


_FUSED = frozenset({"norm_output", "fc_norm", "target_hidden_size"})
_SGLANG = Served("LlamaForCausalLMEagle3", _FUSED | {"norm_before_fc"})
_VLLM_EXTRAS = _SGLANG.extras | {"norm_before_residual", "sliding_window"}
_LATENT_ROPE = frozenset({"default", "yarn"})
_LATENT = Served("Eagle3DeepseekV2ForCausalLM", _FUSED, _LATENT_ROPE)

DIALECTS: dict[str, Dialect] = {
    dialect.name: dialect
    for dialect in (
        Dialect("own", "layer.", config="own", numbering=Numbering.OUTPUTS, reader="our own network",
                mha=Served(""), mla=Served("", rope_types=_LATENT_ROPE)),
        Dialect("sglang", "midlayer.", mha=_SGLANG, mla=_LATENT),
        Dialect("specforge", "midlayer.", reader="SpecForge", carries_normed=False,
                mha=Served("LlamaForCausalLMEagle3", frozenset({"fc_norm", "target_hidden_size"}))),
        Dialect("eagle", "midlayer.", reader="EAGLE's own code",
                mha=Served("LlamaForCausalLMEagle3", frozenset({"target_hidden_size"}),
                           frozenset({"default", "linear"}))),
        Dialect("sglang-new", "layers.0.", mha=_SGLANG, mla=_LATENT),
        Dialect("vllm", "layers.0.", numbering=Numbering.ENTRIES, reader="vLLM",
                mha=Served("Eagle3LlamaForCausalLM", _VLLM_EXTRAS),
                mla=Served(_LATENT.architecture, _FUSED | {"norm_before_residual"}, _LATENT_ROPE)),
        Dialect("modelopt", "layers.0.", has_t2d=False, numbering=Numbering.OUTPUTS, mha=_SGLANG, mla=_LATENT),
        Dialect("speculators", "layers.0.", config="nested", numbering=Numbering.ENTRIES, reader="vLLM",
                mha=Served("Eagle3Speculator", _VLLM_EXTRAS)),
        Dialect("automodel", "model.layers.0.", "model.", mha=_SGLANG, targets_config=True),
    )
}  # fmt: skip
"""`sglang` is what every SGLang reads, old and new; `sglang-new` and `automodel` name parameters as 0.5.23 does."""
_CLASSES = frozenset(served.architecture for d in DIALECTS.values() for served in (d.mha, d.mla) if served)

NESTED_CONFIG = "transformer_layer_config"
IDS = "eagle_aux_hidden_state_layer_ids"
BLOCK = "eagle3"
"""Our own block in every config we write: the dialect, and the aux layers by their outputs."""


_LAYER_NUMBER = re.compile(r"(?:^|\.)layers\.(\d+)\.")
_SHOWN = 8
"""Keys named in one line; what is wrong with one is mostly wrong with all."""


@dataclass(frozen=True)
class Naming:
    """A key set, understood: `canonical` maps each key as found to its canonical name."""

    dialect: Dialect
    canonical: Mapping[str, str]
    readable_as: tuple[str, ...]
    mla: bool


def dialect_named(name: str, option: str) -> Dialect:
    """Return a dialect.

    Raises:
        ExportError: there is none of that name.
    """
    if name not in DIALECTS:
        raise ExportError(f"{option} {name}: expected one of {', '.join(DIALECTS)}")
    return DIALECTS[name]


def understand(keys: Sequence[str], config: Mapping[str, object], where: str, told: str | None = None) -> Naming:
    """Return the one dialect of a key set and config; `told` is what the user says it is.

    Raises:
        ExportError: names what is missing, unknown, twice there, contradictory or ambiguous.
    """
    stripped = _once({key: ".".join(part for part in key.split(".") if part not in WRAPPERS) for key in keys}, where)
    _refuse_others(stripped, where)
    mla = any(".kv_a_proj_with_mqa" in key for key in stripped)
    family = _family(list(stripped), where, mla=mla)
    spelled = _spellings(family, mla=mla)
    named = {found: spelled[plain] for plain, found in stripped.items()}
    _once(named, where)
    fitting = [dialect for dialect in DIALECTS.values() if dialect.keys == family.keys and (dialect.mla or not mla)]
    if not fitting:
        family.served(mla=mla, where=where)
    dialect, alike = _choose(fitting, set(named.values()), config, where, told, mla=mla)
    return Naming(dialect, named, alike, mla)


def _refuse_others(keys: Iterable[str], where: str) -> None:
    """Refuse in one line what is no drafter of ours as a whole, instead of naming its every parameter."""
    if normed := next((key for key in keys if key.endswith((".q_norm.weight", ".k_norm.weight"))), None):
        raise ExportError(
            f"{where}: expected queries and keys without norms of their own, found {normed}: a drafter that attends as "
            "Qwen3 does, which vLLM alone serves, as it is; for others train one as Llama's"
        )
    layers = {found[1] for key in keys if (found := _LAYER_NUMBER.search(key))}
    if len(layers) > 1 and not any(key.endswith("fc.weight") for key in keys):
        raise ExportError(
            f"{where}: expected an EAGLE-3 drafter, found a model of {len(layers)} layers and no fc.weight; give the "
            "drafter's directory, and a target's with --target"
        )


def _once(named: Mapping[str, str], where: str) -> dict[str, str]:
    """Return found keys by their names, of which each must be there once."""
    seen: dict[str, str] = {}
    for found, name in named.items():
        if name in seen:
            raise ExportError(f"{where}: expected each parameter once, found both {seen[name]} and {found}; drop one")
        seen[name] = found
    return seen


def _spellings(dialect: Dialect, *, mla: bool) -> dict[str, str]:
    names = {dialect.spell(name): name for name in canonical(mla=mla)}
    return names | {dialect.root + old: name for old, name in OLDER.items()}


def _family(keys: list[str], where: str, *, mla: bool) -> Dialect:
    """Return a dialect of the key set's spelling, once the set is known to be whole."""
    families = list({dialect.keys: dialect for dialect in reversed(DIALECTS.values())}.values())
    seen = [family for family in families if any(key.startswith(family.layer) for key in keys)]
    if len(seen) != 1:
        prefixes = ", ".join(f"{family.layer}*" for family in reversed(families))
        what = " and ".join(f"{family.layer}*" for family in seen) or f"{', '.join(sorted(keys)[:4]) or 'no key'}"
        raise ExportError(
            f"{where}: expected the layer of one EAGLE-3 drafter ({prefixes}), found {what}; "
            f"{'drop one of the copies' if seen else 'is this the drafter, and has it one layer?'}"
        )
    family = seen[0]
    missing = [family.spell(name) for name in required(mla=mla) if family.spell(name) not in keys]
    unknown = sorted(set(keys) - set(_spellings(family, mla=mla)))
    if missing or unknown:
        parts = [f"{what} {_named(names)}" for what, names in (("missing", missing), ("unknown", unknown)) if names]
        raise ExportError(
            f"{where}: expected the keys of one EAGLE-3 drafter with {family.layer}*{' and MLA' * mla}, found "
            f"{'; '.join(parts)}; an engine drops the unknown and leaves the missing uninitialised without a word, so "
            "save it again"
        )
    return family


def _choose(
    fitting: list[Dialect], names: set[str], config: Mapping[str, object], where: str, told: str | None, *, mla: bool
) -> tuple[Dialect, tuple[str, ...]]:
    """Return the dialect and the names of all that would read this file alike."""
    block = config.get(BLOCK)
    declared = block.get("dialect") if isinstance(block, dict) else None
    if None not in (told, declared) and told != declared:
        raise ExportError(f"{where}: --from is {told}: expected {declared}, as config.json {BLOCK}.dialect has it, "
                          "found another; leave --from out")  # fmt: skip
    for name, who in ((told, "--from"), (declared, f"config.json {BLOCK}.dialect")):
        if name is not None:
            chosen = dialect_named(str(name), who)
            if chosen not in fitting:
                raise ExportError(
                    f"{where}: {who} is {name}: expected its keys, found {fitting[0].layer}* as in {_listed(fitting)}; "
                    "correct it"
                )
            return chosen, (chosen.name,)
    left = [dialect for dialect in fitting if _fits(dialect, names, config, mla=mla)]
    if not left:
        raise ExportError(
            f"{where}: expected config.json, t2d and {IDS} as one of {_listed(fitting)} writes them, found a mixture "
            "(t2d missing, or layer ids where that dialect does not read them); say which it is with --from"
        )
    if "norm_output" in config and len({dialect.carries_normed for dialect in left}) > 1:
        raise ExportError(
            f"{where}: norm_output: expected to know which of {_listed(left)} wrote it, since SpecForge means the "
            "head's input by it and engines the carried state, found nothing that tells; say it with --from"
        )
    has_ids = bool(_ids(config, Numbering.ENTRIES) or _ids(config, Numbering.SGLANG))
    if has_ids and len({dialect.numbering for dialect in left}) > 1:
        raise ExportError(
            f"{where}: {IDS}: expected to know which of {_listed(left)} wrote them, since each counts differently, "
            "found nothing that tells; say it with --from"
        )
    return left[0], tuple(dialect.name for dialect in left)


def _fits(dialect: Dialect, names: set[str], config: Mapping[str, object], *, mla: bool) -> bool:
    """Tell whether a file of these names and this config can be of this dialect."""
    nested = NESTED_CONFIG in config or "speculators_model_type" in config
    if dialect.config == "own":
        return True
    if (dialect.config == "nested") != nested:
        return False
    if names & set(MAPS) and dialect.has_t2d != ("t2d" in names):
        return False
    other = Numbering.SGLANG if dialect.numbering is Numbering.ENTRIES else Numbering.ENTRIES
    if _ids(config, other) and not _ids(config, dialect.numbering):
        return False
    architectures = config.get("architectures")
    first = architectures[0] if isinstance(architectures, list) and architectures else ""
    served = dialect.mla if mla else dialect.mha
    return first not in _CLASSES or (served is not None and first == served.architecture)


def _ids(config: Mapping[str, object], numbering: Numbering) -> object:
    """Return the ids standing where a dialect of this numbering reads them."""
    if numbering is Numbering.ENTRIES:
        return config.get(IDS)
    nested = config.get("eagle_config")
    return nested.get(IDS) if isinstance(nested, dict) else None


def _named(keys: Sequence[str]) -> str:
    more = f" and {len(keys) - _SHOWN} more" if len(keys) > _SHOWN else ""
    return ", ".join(keys[:_SHOWN]) + more


def _listed(dialects: list[Dialect]) -> str:
    return ", ".join(dialect.name for dialect in dialects)
