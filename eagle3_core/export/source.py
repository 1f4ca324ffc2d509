"""Open a drafter's directory: one safetensors file, shards with an index, or a checkpoint of our own. Headers only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.errors import ExportError
from eagle3_core.model.architecture import CONFIG_FILE as OWN_CONFIG
from eagle3_core.storage.tensors import TensorHeader, read_header

CONFIG, MODEL, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
OWN_FILES = ("drafter.safetensors", "vocab.safetensors")
CHUNK = 1 << 20
"""Bytes read at a time; a multiple of every element's size."""
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")


@dataclass(frozen=True)
class Tensor:
    """One tensor as found: its file, and where in it its bytes lie."""

    file: Path
    header: TensorHeader

    @property
    def size(self) -> int:
        """Return the number of bytes."""
        return self.header.end - self.header.start

    def chunks(self) -> Iterator[bytes]:
        """Yield the bytes, in pieces of whole elements.

        Raises:
            ExportError: the file ends early.
        """
        left = self.size
        with self.file.open("rb") as file:
            file.seek(self.header.start)
            while left:
                data = file.read(min(CHUNK, left))
                if not data:
                    raise ExportError(f"{self.file}: expected {left} more bytes, found its end; copy it again")
                left -= len(data)
                yield data

    def read(self) -> bytes:
        """Return all bytes; for small tensors."""
        return b"".join(self.chunks())


@dataclass(frozen=True)
class Source:
    """A drafter on disk: its config, and every tensor by the name it has there."""

    directory: Path
    config_file: str
    config: Mapping[str, Any]
    tensors: Mapping[str, Tensor]
    files: tuple[str, ...]

    @property
    def sharded(self) -> bool:
        """Tell whether an index holds several files together."""
        return len(self.files) > 1 and self.config_file == CONFIG


def open_source(directory: Path) -> Source:
    """Read config and headers.

    Raises:
        ExportError: something is missing, stale, damaged, pickled or there twice; names it.
    """
    if not directory.is_dir():
        what = "a file; give its directory" if directory.is_file() else "nothing; give a drafter's directory"
        if directory.suffix in PICKLES and directory.is_file():
            what = f"a pickle; {_how_to_convert(directory.name)}"
        raise ExportError(f"{directory}: expected a directory with {CONFIG} and {MODEL}, found {what}")
    own = (directory / OWN_CONFIG).is_file()
    config_file = OWN_CONFIG if own else CONFIG
    files = _own_files(directory) if own else _model_files(directory)
    tensors = _tensors(directory, files)
    if not own and (directory / INDEX).is_file():
        _check_index(directory, tensors)
    return Source(directory, config_file, read_json(directory / config_file), tensors, files)


def read_json(path: Path) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        ExportError: there is none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=_once, parse_constant=_number)
    except FileNotFoundError:
        raise ExportError(f"{path}: expected the drafter's config, found none; copy it beside the weights") from None
    except (ValueError, RecursionError) as error:
        raise ExportError(f"{path}: expected JSON, found damage ({error}); copy it again") from None
    if not isinstance(values, dict):
        raise ExportError(f"{path}: expected a JSON object, found {type(values).__name__}; copy it again")
    return values


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object whose keys are each there once: of two, readers take the last without a word."""
    values = dict(pairs)
    if len(values) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"the key {next(name for name in names if names.count(name) > 1)} twice")
    return values


def _number(name: str) -> float:
    raise ValueError(f"{name}, which is no number")


def _own_files(directory: Path) -> tuple[str, ...]:
    for name in OWN_FILES:
        if not (directory / name).is_file():
            raise ExportError(f"{directory}: expected {' and '.join(OWN_FILES)} beside {OWN_CONFIG}, found no {name}; "
                              "give a whole checkpoint")  # fmt: skip
    return OWN_FILES


def _model_files(directory: Path) -> tuple[str, ...]:
    """Return the weight files, which must be exactly those the index names: engines load whatever lies there."""
    found = {path.name for path in directory.glob("*.safetensors")}
    if not found:
        pickles = sorted(path.name for path in directory.iterdir() if path.suffix in PICKLES)
        what = f"only the pickle {pickles[0]}; {_how_to_convert(pickles[0])}" if pickles else "none; is it the drafter?"
        raise ExportError(f"{directory}: expected *.safetensors, found {what}")
    if not (directory / INDEX).is_file():
        if len(found) > 1:
            raise ExportError(
                f"{directory}: expected one weight file or {INDEX}, found {', '.join(sorted(found))} and no index; "
                "remove what does not belong to it"
            )
        return tuple(found)
    named = set(_weight_map(directory).values())
    if missing := sorted(named - found):
        raise ExportError(f"{directory / INDEX}: expected the shard {missing[0]} it names, found none; copy it again")
    if stale := sorted(found - named):
        raise ExportError(
            f"{directory}: expected only the files {INDEX} names, found {stale[0]}, which engines would load too; "
            "remove it"
        )
    return tuple(sorted(named))


def _weight_map(directory: Path) -> dict[str, str]:
    values = read_json(directory / INDEX).get("weight_map")
    good = isinstance(values, dict) and all(
        isinstance(name, str) and Path(name).name == name for name in values.values()
    )
    if not isinstance(values, dict) or not good:
        raise ExportError(f"{directory / INDEX}: expected weight_map with a file name a key, found none; copy it again")
    return values


def _tensors(directory: Path, files: tuple[str, ...]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for name in files:
        path = directory / name
        try:
            headers = read_header(path)
        except ValueError as error:
            raise ExportError(f"{path}: {error}; copy it again") from None
        for key, header in headers.items():
            if key in tensors:
                raise ExportError(
                    f"{path}: expected {key} in one file, found it in {tensors[key].file.name} too; remove one"
                )
            tensors[key] = Tensor(path, header)
    return tensors


def _check_index(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    named = _weight_map(directory)
    for key in sorted(set(named) | set(tensors)):
        where = tensors[key].file.name if key in tensors else "no file"
        if named.get(key) != where:
            raise ExportError(
                f"{directory / INDEX}: expected {key} in {named.get(key, 'no file')}, found it in {where}; the index "
                "is not of these files, copy both again"
            )


def _how_to_convert(name: str) -> str:
    return (
        "loading a pickle can run any code, so none is read here; convert it where you trust it: "
        f"python -c \"import torch, safetensors.torch as s; d = torch.load('{name}', weights_only=True); "
        "s.save_file({k: v.clone().contiguous() for k, v in d.items()}, 'model.safetensors')\""
    )
