"""The target's directory: checked in milliseconds, named by content."""

from __future__ import annotations

import hashlib
import json
import math
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from pydantic import Field

import eagle3_core.demo
from eagle3_core.config import RunConfig
from eagle3_core.config.base import Section, canonical_sha256
from eagle3_core.demo import pin
from eagle3_core.errors import ConfigError, TargetError
from eagle3_core.storage.tensors import read_header

DEMO = "demo"
SMOLLM2 = "smollm2"

_PARTS = {
    "config": ("config.json", "generation_config.json", "*.py"),
    "chat_template": ("chat_template.*",),
    "weights": ("*.safetensors", "*.safetensors.index.json"),
    "tokenizer": ("tokenizer*.json", "*.model", "*.tiktoken", "vocab.json", "merges.txt", "special_tokens_map.json",
                  "added_tokens.json"),
}  # fmt: skip
_TOKENIZERS = ("tokenizer.json", "*.model", "*.tiktoken", "vocab.json")
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt")


class TargetShape(Section):
    """Sizes of the target, from config.json and the headers of its weights; `parameters` counts all experts."""

    model_class: str
    model_type: str
    hidden_size: int = Field(ge=1)
    intermediate_size: int = Field(ge=1)
    num_layers: int = Field(ge=1)
    num_heads: int = Field(ge=1)
    num_kv_heads: int = Field(ge=1)
    vocab_size: int = Field(ge=1)
    max_positions: int = Field(ge=1)
    parameters: int = Field(ge=1)


class TargetIdentity(TargetShape):
    """The target by content: any other byte in config, tokenizer, chat template or weights is another target."""

    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")
    parts: dict[str, str] = Field(description="Digest of each part: config, chat_template, weights, tokenizer.")

    def difference(self, other: Mapping[str, Any]) -> list[str]:
        """Return the parts in which `other` (a dumped identity) differs."""
        theirs = other.get("parts", {})
        return [name for name, digest in self.parts.items() if theirs.get(name) != digest]


def resolve_target(run: RunConfig) -> Path:
    """Return the directory of the run's target; see `named_target`."""
    return named_target(run.target.model)


def named_target(name: str) -> Path:
    """Return a target's directory: `demo` is the one that ships, `smollm2` one that the command line fetches.

    Raises:
        TargetError: SmolLM2 is not fetched yet.
    """
    if name == DEMO:
        return Path(eagle3_core.demo.__file__).parent / "target"
    if name == SMOLLM2:
        directory = smollm2_directory()
        if not pin.complete(directory):
            raise TargetError(f"{directory}: expected {pin.NAME}, found none; `eagle3 doctor smollm2` fetches it")
        return directory
    return Path(name).expanduser().resolve()


def smollm2_directory() -> Path:
    """Return where SmolLM2 lies once it is fetched."""
    return cache_directory() / "targets" / SMOLLM2


def target_shape(run: RunConfig) -> TargetShape:
    """Return the target's sizes; SmolLM2's are known before it is fetched.

    Raises:
        TargetError: see `read_target`.
    """
    return TargetShape(**pin.SHAPE) if run.target.model == SMOLLM2 else read_target(resolve_target(run))


def cache_directory() -> Path:
    """Return where this user's machine-local caches live; everything there can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "eagle3"


def read_target(directory: Path) -> TargetShape:
    """Return the target's sizes; reads config.json and the headers of the weights.

    Raises:
        TargetError: the directory, config.json, the weights or the tokenizer is missing or unusable.
    """
    config = read_config(directory)
    if not _matching(directory, _TOKENIZERS):
        raise TargetError(f"{directory}: expected a tokenizer (tokenizer.json), found none; copy the target's")
    sizes = config.get("text_config") or config
    heads = _size(directory, sizes, "num_attention_heads")
    return TargetShape(
        model_class=_model_class(directory, config),
        model_type=str(sizes.get("model_type", config.get("model_type", ""))),
        hidden_size=_size(directory, sizes, "hidden_size"),
        intermediate_size=_size(directory, sizes, "intermediate_size"),
        num_layers=_size(directory, sizes, "num_hidden_layers"),
        num_heads=heads,
        num_kv_heads=int(sizes.get("num_key_value_heads") or heads),
        vocab_size=_size(directory, sizes, "vocab_size"),
        max_positions=_size(directory, sizes, "max_position_embeddings"),
        parameters=sum(_parameters(path) for path in _weights(directory)),
    )


def read_config(directory: Path, told_by: str = "target.model") -> dict[str, Any]:
    """Return config.json of the target; `told_by` is the key or flag by which the user named the directory.

    Raises:
        TargetError: there is no directory, no config.json, or it is not a JSON object.
    """
    path = directory / "config.json"
    if not directory.is_dir():
        raise TargetError(f"target {directory}: expected a directory with config.json, found none; set {told_by}")
    if not path.is_file():
        raise TargetError(f"{path}: expected the target's config.json, found none; give a Hugging Face model directory")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise TargetError(f"{path}: not JSON ({error}); copy it again from the model's source") from None
    if not isinstance(values, dict):
        raise TargetError(f"{path}: expected a JSON object, found {type(values).__name__}")
    return values


def target_fingerprint(directory: Path) -> TargetIdentity:
    """Return the target's sizes and the sha256 of everything that decides what it answers.

    A file is hashed once per machine: digests are remembered by path, size, inode and change time.

    Raises:
        TargetError: see `read_target`.
    """
    shape = read_target(directory)
    files = {part: _matching(directory, patterns) for part, patterns in _PARTS.items()}
    paths = sorted({path for found in files.values() for path in found})
    with ThreadPoolExecutor(4) as pool:
        digests = dict(zip(paths, pool.map(cached_sha256, paths), strict=True))
    parts = {part: canonical_sha256({path.name: digests[path] for path in found}) for part, found in files.items()}
    return TargetIdentity(**shape.model_dump(), sha256=canonical_sha256(parts), parts=parts)


def require_target(run: RunConfig, expected: Mapping[str, Any]) -> Path:
    """Return the target's directory if it still holds what `expected` (a dumped identity) was taken from.

    Raises:
        TargetError: names the parts that have changed since.
    """
    directory = resolve_target(run)
    found = target_fingerprint(directory)
    if found.sha256 != expected.get("sha256"):
        raise TargetError(
            f"{directory}: expected the target this run began with, found another "
            f"{', '.join(found.difference(expected))}; put the files back, or start again with prepare"
        )
    return directory


def cached_sha256(path: Path) -> str:
    """Return the sha256 of a file, from the cache if the file has not changed since."""
    stat = path.stat()
    stamp = [stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns]
    name = hashlib.sha256(str(path.resolve()).encode()).hexdigest()
    entry = cache_directory() / "sha256" / f"{name}.json"
    try:
        known = json.loads(entry.read_text(encoding="utf-8"))
        if known["stamp"] == stamp:
            return str(known["sha256"])
    except (OSError, ValueError, KeyError, TypeError):
        pass  # absent or damaged: hash the file
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, "sha256").hexdigest()
    # A file written this very moment could change again without a new time stamp.
    if time.time_ns() - stat.st_ctime_ns > 2_000_000_000:
        remember(entry, {"stamp": stamp, "sha256": digest})
    return digest


def check_sizes(run: RunConfig, shape: TargetShape) -> None:
    """Check what spans the recipe and the target.

    Raises:
        ConfigError: samples longer than the target's positions.
    """
    if run.data.max_sample_tokens > shape.max_positions:
        raise ConfigError(
            f"data.max_sample_tokens: expected at most the target's {shape.max_positions} positions, "
            f"found {run.data.max_sample_tokens}; lower it"
        )


def _model_class(directory: Path, config: Mapping[str, Any]) -> str:
    classes = config.get("architectures")
    if not isinstance(classes, list) or not classes:
        raise TargetError(f"{directory}/config.json: expected architectures: [class name], found {classes!r}; add it")
    return str(classes[0])


def _size(directory: Path, sizes: Mapping[str, Any], name: str) -> int:
    value = sizes.get(name)
    if not isinstance(value, int) or value < 1:
        raise TargetError(f"{directory}/config.json: expected {name} as a positive number, found {value!r}; add it")
    return value


def _matching(directory: Path, patterns: tuple[str, ...]) -> list[Path]:
    names = sorted(path for path in directory.iterdir() if path.is_file())
    return [path for path in names if any(fnmatch(path.name, pattern) for pattern in patterns)]


def _weights(directory: Path) -> list[Path]:
    found = _matching(directory, ("*.safetensors",))
    if not found:
        pickles = [path.name for path in _matching(directory, _PICKLES)]
        what = f"only pickled weights {pickles[0]}; convert them, pickles are never loaded" if pickles else "none"
        raise TargetError(f"{directory}: expected *.safetensors weights, found {what}")
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        named = set(json.loads(index.read_text(encoding="utf-8")).get("weight_map", {}).values())
        if missing := sorted(named - {path.name for path in found}):
            raise TargetError(
                f"{index}: expected {len(named)} weight files, {missing[0]} is missing; download it again"
            )
    return found


def _parameters(path: Path) -> int:
    try:
        return sum(math.prod(tensor.shape) for tensor in read_header(path).values())
    except ValueError as error:
        raise TargetError(f"{path}: {error}; download it again") from None


def remember(entry: Path, values: Mapping[str, Any]) -> None:
    """Write a cache entry whole or not at all; where that cannot be, it costs time and nothing else."""
    try:
        entry.parent.mkdir(parents=True, exist_ok=True)
        temp = entry.with_name(f".{entry.name}.{os.getpid()}.tmp")
        temp.write_text(json.dumps(values), encoding="utf-8")
        temp.replace(entry)
    except OSError:
        pass  # a read-only home costs time, nothing else
