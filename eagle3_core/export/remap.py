"""Rewrite a drafter for another engine: rename by copying bytes, derive the config, check everything on the way.

No tensor library is needed, and no file is held in memory whole. The output appears at once or not at all.
"""

from __future__ import annotations

import contextlib
import fcntl
import filecmp
import glob
import json
import os
import shutil
import struct
import uuid
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.errors import ExportError, StorageFullError
from eagle3_core.export.dialects import dialect_named
from eagle3_core.export.plan import Piece, Plan, TargetFacts, make_plan
from eagle3_core.export.source import INDEX, open_source
from eagle3_core.storage import full_disk_is_typed, to_disk
from eagle3_core.storage.scan import OnBytes, first_not_finite


@dataclass(frozen=True)
class Remapped:
    """What was done; `already` says that the output was there, byte for byte."""

    plan: Plan
    out: Path
    total_bytes: int
    already: bool

    def summary(self) -> dict[str, Any]:
        """Return it for scripts."""
        plan = self.plan
        return {
            "out": str(self.out),
            "from": plan.source.dialect.name,
            "readable_as": list(plan.source.readable_as),
            "to": plan.to.name,
            "already_there": self.already,
            "parameters": plan.parameters,
            "bytes": self.total_bytes,
            "files": [*plan.files, plan.config_file, *([INDEX] if plan.sharded else [])],
            "renamed": dict(plan.renamed),
            "kept": sorted(key for key in plan.source.canonical if key not in plan.renamed),
            "notes": list(plan.notes),
        }


def remap(
    source: Path,
    out: Path,
    to: str,
    *,
    told: str | None = None,
    target: TargetFacts | None = None,
    on_bytes: OnBytes | None = None,
) -> Remapped:
    """Write the drafter in `source` to the new directory `out`, in dialect `to`.

    Args:
        source: a directory; it is only read.
        out: must not exist, be empty, or already hold exactly what would be written.
        to: a name of `dialects.DIALECTS`.
        told: the source's dialect, where its files do not tell.
        target: the target the drafter is for, where sizes, layer ids or our own format need it.
        on_bytes: hears of every part of the tensors that is written.

    Raises:
        ExportError: one line about the first thing that is wrong; nothing is left at `out`.
    """
    dialect = dialect_named(to, "--to")
    out = out.resolve()
    if out.is_relative_to(source.resolve()):
        raise ExportError(f"{out}: expected a directory outside the source, which is only read, found one in "
                          f"{source.resolve()}; choose another")  # fmt: skip
    if out == Path.cwd():
        raise ExportError(f"{out}: expected another directory, found the one you are in, which a new one would replace "
                          "under you; choose a new one")  # fmt: skip
    plan = make_plan(open_source(source), dialect, told, target)
    total = sum(piece.size for pieces in plan.files.values() for piece in pieces)
    with full_disk_is_typed(out), _staging(out) as staged:
        _require_room(staged, total)
        _write(plan, staged, total, on_bytes or (lambda _count: None))
        already = _publish(staged, out)
    return Remapped(plan, out, total, already)


def _write(plan: Plan, staged: Path, total: int, on_bytes: OnBytes) -> None:
    weight_map: dict[str, str] = {}
    for name, pieces in plan.files.items():
        weight_map |= {piece.key: name for piece in pieces}
        with (staged / name).open("xb") as file:
            file.write(_header(pieces))
            for piece in pieces:
                for data in _checked(piece, staged.name):
                    file.write(data)
                    on_bytes(len(data))
        to_disk(staged / name)
    if plan.sharded:
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        _write_json(staged / INDEX, index)
    _write_json(staged / plan.config_file, plan.config)
    to_disk(staged)


def _header(pieces: tuple[Piece, ...]) -> bytes:
    """Return the head of a safetensors file: length, then JSON padded to eight bytes."""
    values: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    start = 0
    for piece in pieces:
        values[piece.key] = {
            "dtype": piece.dtype, "shape": list(piece.shape), "data_offsets": [start, start + piece.size],
        }  # fmt: skip
        start += piece.size
    text = json.dumps(values, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def _checked(piece: Piece, where: str) -> Iterator[bytes]:
    """Yield a piece's bytes after looking for numbers that are none.

    Raises:
        ExportError: names the tensor that holds NaN or infinity.
    """
    if isinstance(piece.content, bytes):
        yield piece.content
        return
    for data in piece.content.chunks():
        if first_not_finite(data, piece.dtype) is not None:
            raise ExportError(
                f"{piece.content.file}: {piece.key}: expected finite numbers, found NaN or infinite values; take an "
                "earlier checkpoint"
            )
        yield data


def _publish(staged: Path, out: Path) -> bool:
    """Give the finished directory its name; return whether an equal one had it already.

    Raises:
        ExportError: something else has that name.
    """
    try:
        staged.rename(out)
    except OSError:
        if not out.exists():
            raise
        if out.is_dir() and _equal(staged, out):
            return True
        raise ExportError(
            f"{out}: expected a new or empty directory, found other content; nothing is overwritten, choose another or "
            "remove it"
        ) from None
    to_disk(out.parent)
    return False


def _equal(left: Path, right: Path) -> bool:
    names = [sorted(path.name for path in directory.iterdir()) for directory in (left, right)]
    return names[0] == names[1] and all(filecmp.cmp(left / name, right / name, shallow=False) for name in names[0])


@contextlib.contextmanager
def _staging(out: Path) -> Iterator[Path]:
    """Yield a fresh directory beside `out`; it is gone afterwards, and so are those of runs that died."""
    out.parent.mkdir(parents=True, exist_ok=True)
    _sweep(out)
    staged, descriptor = _fresh(out)
    try:
        yield staged
    finally:
        if staged.exists():
            shutil.rmtree(staged)
        os.close(descriptor)


def _fresh(out: Path) -> tuple[Path, int]:
    """Make a directory and lock it; one that another run swept up before it was locked is made again."""
    while True:
        staged = out.parent / f".{out.name}.{uuid.uuid4().hex[:8]}.tmp"
        staged.mkdir()
        with contextlib.suppress(FileNotFoundError):
            descriptor = os.open(staged, os.O_RDONLY | os.O_DIRECTORY)
            # Held for as long as this process lives: tells other runs that this directory is not left over.
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            if staged.exists():
                return staged, descriptor
            os.close(descriptor)


def _sweep(out: Path) -> None:
    """Remove what dead runs left; what vanishes meanwhile is another run's, done or swept up by a third."""
    for path in out.parent.glob(f".{glob.escape(out.name)}.????????.tmp"):
        with contextlib.suppress(FileNotFoundError, BlockingIOError):
            descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(path)
            finally:
                os.close(descriptor)


def _require_room(staged: Path, total: int) -> None:
    free = shutil.disk_usage(staged).free
    if free < total:
        raise StorageFullError(f"{staged.parent}: expected {total:,} bytes free, found {free:,}; free space there")


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    to_disk(path)
