"""Decide, from headers and config alone, which tensor goes where under which name; or refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from eagle3_core.errors import ExportError
from eagle3_core.export.configs import PROPOSAL, write_config
from eagle3_core.export.dialects import BLOCK, Dialect, Naming, understand
from eagle3_core.export.facts import DrafterFacts
from eagle3_core.export.kinds import check_kinds
from eagle3_core.export.names import EMBEDDING, FC_NORMS, HEAD, INPUT_NORM, MAPS
from eagle3_core.export.source import CONFIG, MODEL, OWN_FILES, Source, Tensor
from eagle3_core.export.values import check_maps, draft_targets, packed
from eagle3_core.model.architecture import CONFIG_FILE as OWN_CONFIG
from eagle3_core.storage.scan import FLOATS
from eagle3_core.storage.tensors import TORCH_NAMES


@dataclass(frozen=True)
class TargetFacts:
    """The target's own `config.json`; `sha256` fingerprints it, which may take a while."""

    config: Mapping[str, Any]
    where: str
    sha256: Callable[[], str]


@dataclass(frozen=True)
class Piece:
    """One tensor of the output: bytes of a file, or a few bytes made here."""

    key: str
    dtype: str
    shape: tuple[int, ...]
    content: Tensor | bytes

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return len(self.content) if isinstance(self.content, bytes) else self.content.size


@dataclass(frozen=True)
class Plan:
    """What will be written, and how it came about."""

    source: Naming
    to: Dialect
    facts: DrafterFacts
    files: Mapping[str, tuple[Piece, ...]]
    config_file: str
    config: Mapping[str, Any]
    sharded: bool
    renamed: Mapping[str, str]
    notes: tuple[str, ...]

    @property
    def parameters(self) -> int:
        """Return the number of weights, vocabulary maps left out."""
        pieces = [piece for pieces in self.files.values() for piece in pieces]
        return sum(math.prod(piece.shape) for piece in pieces if piece.key not in MAPS)


def make_plan(source: Source, to: Dialect, told: str | None, target: TargetFacts | None) -> Plan:
    """Understand the source, check it and lay out the output.

    Raises:
        ExportError: names the first thing that is wrong or cannot be served.
    """
    where = str(source.directory)
    check_kinds(source.config, f"{where}/{source.config_file}")
    naming = understand(list(source.tensors), source.config, where, told)
    facts = DrafterFacts.read(source.config, naming.dialect, f"{where}/{source.config_file}", mla=naming.mla)
    if target is not None:
        facts = with_target(facts, to, target, where)
    found = {canonical: source.tensors[key] for key, canonical in naming.canonical.items()}
    check_presence(set(found), naming.dialect, facts, where)
    check_shapes(found, facts, where)
    pieces, notes = _pieces(found, to, facts, where, ours=BLOCK in source.config)
    dtype = TORCH_NAMES[found["fc.weight"].header.dtype]
    config = write_config(facts, to, dtype, where)
    notes += [f"{name} is {value}: the config has none, and transformers takes this for llama"
              for name, value in facts.assumed.items()]  # fmt: skip
    if to.config == "nested" and not (config[PROPOSAL].get("verifier") or {}).get("name_or_path"):
        notes.append(f"{PROPOSAL}.verifier.name_or_path is none: speculators and vLLM look for the target there; give "
                     "--target")  # fmt: skip
    if to.config == "nested" and EMBEDDING not in found:
        notes.append(
            f"no {EMBEDDING}: vLLM takes the target's, the speculators library (0.9.0) leaves it uninitialised"
        )
    if facts.tied:
        notes.append("tie_word_embeddings is false now: the head is a tensor of its own")
    return Plan(
        naming, to, facts, _files(pieces, source, to), OWN_CONFIG if to.config == "own" else CONFIG, config,
        source.sharded and to.config != "own",
        {key: to.spell(name) for key, name in sorted(naming.canonical.items()) if key != to.spell(name)}, tuple(notes),
    )  # fmt: skip


_OF_TARGET = ("hidden_size", "vocab_size", "num_hidden_layers", "max_position_embeddings", "bos_token_id",
              "eos_token_id")  # fmt: skip


def with_target(facts: DrafterFacts, to: Dialect, target: TargetFacts, where: str) -> DrafterFacts:
    """Return the facts completed by the target the drafter is for.

    Raises:
        ExportError: the drafter is for another target, or that does not say how large it is.
    """
    text = target.config.get("text_config") or target.config
    read = {name: text.get(name) for name in _OF_TARGET} | {"architectures": target.config.get("architectures")}
    check_kinds(read, target.where)
    if missing := [name for name in ("hidden_size", "vocab_size") if read[name] is None]:
        raise ExportError(f"{target.where}: expected {' and '.join(missing)} in config.json, found none; is it the "
                          "target?")  # fmt: skip
    model_class, layers = (read["architectures"] or [None])[0], read["num_hidden_layers"]
    for name, ours, theirs in (
        ("hidden size", facts.target_hidden_size, read["hidden_size"]),
        ("vocabulary (padding included)", facts.vocab_size, read["vocab_size"]),
        ("model class", facts.target_class, model_class),
        ("layers", facts.target_layers, layers),
        ("fingerprint", facts.target_sha256, target.sha256() if facts.target_sha256 else None),
    ):
        if None not in (ours, theirs) and ours != theirs:
            raise ExportError(f"{where}: expected a drafter for the {name} {theirs} of {target.where}, found {ours}; "
                              "give the target it was trained for")  # fmt: skip
    sha256 = facts.target_sha256 or (target.sha256() if to.config == "own" else None)
    return facts.model_copy(update={
        "target_class": model_class or facts.target_class,
        "target_layers": layers or facts.target_layers,
        "target_sha256": sha256,
        "target_name": target.where,
        "max_position_embeddings": read["max_position_embeddings"] or facts.max_position_embeddings,
        "bos_token_id": text.get("bos_token_id", facts.bos_token_id),
        "eos_token_id": text.get("eos_token_id", facts.eos_token_id),
    })  # fmt: skip


def check_presence(names: set[str], dialect: Dialect, facts: DrafterFacts, where: str) -> None:
    """Check what beyond the layer must be there, by the config.

    Raises:
        ExportError: a tensor is missing, or is there and the config does not want it.
    """
    full = facts.draft_vocab_size == facts.vocab_size
    wanted = {INPUT_NORM, *FC_NORMS} & set(facts.shapes())
    if not full or names & set(MAPS):
        wanted |= set(MAPS if dialect.has_t2d else ("d2t",))
    if not (facts.tied and full and EMBEDDING in names):
        wanted.add(HEAD)
    if facts.target_hidden_size != facts.hidden_size:
        wanted.add(EMBEDDING)
    if missing := sorted(wanted - names):
        raise ExportError(
            f"{where}: expected {', '.join(map(dialect.spell, missing))}, found none, with draft_vocab_size "
            f"{facts.draft_vocab_size} of {facts.vocab_size} and norms {sorted(facts.extras) or 'of plain EAGLE-3'} in "
            "the config; save it again with them"
        )
    if idle := sorted((names & {INPUT_NORM, *FC_NORMS}) - wanted):
        raise ExportError(
            f"{where}: expected norm_before_fc or fc_norm true in the config for {dialect.spell(idle[0])}, found "
            "neither; engines would drop it, so set what it was trained with"
        )


def check_shapes(found: Mapping[str, Tensor], facts: DrafterFacts, where: str) -> None:
    """Check shapes and dtypes against the config.

    Raises:
        ExportError: names the first tensor that does not fit.
    """
    shapes = facts.shapes()
    for name, tensor in found.items():
        if tensor.header.shape != shapes[name]:
            raise ExportError(
                f"{where}: {name}: expected shape {shapes[name]} from the config, found {tensor.header.shape}; config "
                "and weights are of two drafters, or a vocabulary is padded in one of them"
            )
        dtypes = {"d2t": ("I64",), "t2d": ("BOOL",)}.get(name, tuple(sorted(FLOATS)))
        if tensor.header.dtype not in dtypes:
            raise ExportError(f"{where}: {name}: expected {' or '.join(dtypes)}, found {tensor.header.dtype}; cast it "
                              "where it was saved")  # fmt: skip


def _pieces(
    found: Mapping[str, Tensor], to: Dialect, facts: DrafterFacts, where: str, *, ours: bool
) -> tuple[dict[str, Piece], list[str]]:
    """Return the output's tensors by canonical name, and what was made or left out."""
    notes = []
    pieces = {name: Piece(to.spell(name), t.header.dtype, t.header.shape, t) for name, t in found.items()}
    targets: list[int] | None = None
    if "t2d" in found:
        check_maps(found["d2t"].read(), found["t2d"].read(), where)
    elif "d2t" in found:
        targets = draft_targets(found["d2t"].read(), facts.vocab_size, where, ours=ours)
    elif to.config == "own":
        targets = list(range(facts.vocab_size))
        pieces["d2t"] = Piece("d2t", "I64", (facts.vocab_size,), packed([0] * facts.vocab_size))
        notes.append("d2t made: the draft vocabulary is the target's")
    if targets is not None and to.has_t2d:
        flags = bytearray(facts.vocab_size)
        for target in targets:
            flags[target] = 1
        pieces["t2d"] = Piece("t2d", "BOOL", (facts.vocab_size,), bytes(flags))
        notes.append("t2d made from d2t")
    elif "t2d" in pieces and not to.has_t2d:
        del pieces["t2d"]
        notes.append(f"t2d left out: {to.name} files hold none, and d2t says the same")
    if HEAD not in found:
        tied = found[EMBEDDING]
        pieces[HEAD] = Piece(to.spell(HEAD), tied.header.dtype, tied.header.shape, tied)
        notes.append(f"{HEAD} made from {EMBEDDING}, to which the config ties it")
    return pieces, notes


def _files(pieces: Mapping[str, Piece], source: Source, to: Dialect) -> dict[str, tuple[Piece, ...]]:
    """Return the output's files: our own two, the source's shards, or one."""
    files: dict[str, list[Piece]] = {}
    for name, piece in pieces.items():
        if to.config == "own":
            file = OWN_FILES[name in MAPS]
        elif source.sharded:
            file = piece.content.file.name if isinstance(piece.content, Tensor) else source.files[-1]
        else:
            file = MODEL
        files.setdefault(file, []).append(piece)
    return {name: tuple(sorted(files[name], key=_place)) for name in sorted(files)}


def _place(piece: Piece) -> tuple[int, str]:
    """Return the order in a file: wide elements first, so that each tensor is aligned, then by name."""
    return -piece.size // max(1, math.prod(piece.shape)), piece.key
