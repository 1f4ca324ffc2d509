"""How captured states travel from SGLang's scheduler to our client: one safetensors file a prefill, in memory.

A prefill holds one group of requests, whole and alone. A request's id names its group and its place in it, so that the
scheduler's side can prove that; the file holds the ids the engine really ran, so that the client can prove that the
states belong to its samples.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle3_core.data.encoding import bytes_of
from eagle3_core.data.shards import WAITING_BYTES
from eagle3_core.engine import processes
from eagle3_core.errors import CaptureMismatchError
from eagle3_core.storage.tensors import KINDS, make_header, write_at

if TYPE_CHECKING:
    import torch

_PREFIX = "eagle3"
_POLL_S = 0.0005

CALLERS = 3
"""Who may capture at once."""
UNDER_WAY = 2 * CALLERS
"""Shards under way at once: as many are summed and committed while others are captured."""
AHEAD = 4
"""Prefills sent and not yet taken by each of them."""


@dataclass(frozen=True)
class CapturedSample:
    """Hidden states of one sample of T tokens; A aux layers, D target width.

    Attributes:
        index: position of the sample in what was asked for.
        input_ids: int64 [T].
        aux_hidden_states: [T, A * D], lowest layer first, in the target's dtype.
        last_hidden_state: [T, D], after the target's final norm.
    """

    index: int
    input_ids: torch.Tensor
    aux_hidden_states: torch.Tensor
    last_hidden_state: torch.Tensor


@dataclass(frozen=True)
class Member:
    """What a request's id says: it is `position` of `count` in `group`, and has `tokens`."""

    group: str
    position: int
    count: int
    tokens: int

    @property
    def rid(self) -> str:
        """Return the request's id."""
        return f"{_PREFIX}-{self.group}-{self.position}-{self.count}-{self.tokens}"

    @classmethod
    def parse(cls, rid: str) -> Member | None:
        """Read a request's id; None for requests that are not ours."""
        prefix, *parts = rid.split("-")
        if prefix != _PREFIX or len(parts) != 4 or not all(part.isdigit() for part in parts[1:]):
            return None
        return cls(parts[0], *(int(part) for part in parts[1:]))


def new_group(lengths: Sequence[int]) -> list[Member]:
    """Return a fresh group of samples of these lengths."""
    group = uuid.uuid4().hex
    return [Member(group, position, len(lengths), tokens) for position, tokens in enumerate(lengths)]


# ----------------------------------------------------------------------------------------------------- where it stands
def most_bytes(prefill_bytes: int) -> int:
    """Return the most that a spool holds of prefills of that size.

    A file goes when the last of its rows does: of each caller, beside the prefills that were sent ahead and what waits
    for its turn to be written to a shard, the one of the canary and the one that is written from.
    """
    return CALLERS * ((AHEAD + 2) * prefill_bytes + WAITING_BYTES)


def has_room(memory: Path, need_bytes: int) -> bool:
    """Whether a spool of that size can be in memory."""
    return memory.is_dir() and os.access(memory, os.W_OK) and shutil.disk_usage(memory).free > need_bytes


def make_spool(memory: Path, disk: Path, need_bytes: int) -> Path:
    """Return a fresh spool, in memory where there is room, else on disk; remove those of killed processes first."""
    disk.mkdir(parents=True, exist_ok=True)
    processes.remove_spools(memory)
    processes.remove_spools(disk)
    base = memory if has_room(memory, need_bytes) else disk
    return Path(tempfile.mkdtemp(prefix=f"{processes.SPOOL}{os.getpid()}-", dir=base))


# ------------------------------------------------------------------------------------------------ the scheduler's side
def admit(directory: Path, group: str) -> None:
    """Say that the engine has begun with a group: another one that is sent from now on cannot join it."""
    (directory / f"{group}.admitted").touch()


def write(directory: Path, group: str, parts: Sequence[Mapping[str, torch.Tensor]]) -> None:
    """Write one group's tensors, whose rows come in parts; the name appears when the file is complete.

    The library would copy each tensor first, and hold up the engine's own Python meanwhile.
    """
    sizes = {name: (sum(len(part[name]) for part in parts), *tensor.shape[1:]) for name, tensor in parts[0].items()}
    kinds = {name: KINDS[str(tensor.dtype).removeprefix("torch.")] for name, tensor in parts[0].items()}
    header, places, _ = make_header({name: (kinds[name], size) for name, size in sizes.items()})
    temp = directory / f".{group}.tmp"
    with temp.open("wb", buffering=0) as file:
        write_at(file.fileno(), header, 0)
        for part in parts:
            for name, tensor in part.items():
                data = bytes_of(tensor)
                write_at(file.fileno(), data, places[name])
                places[name] += data.nbytes
    temp.rename(directory / group)


def fail(directory: Path, group: str, reason: str) -> None:
    """Say that a group's states could not be written."""
    temp = directory / f".{group}.failed.tmp"
    # A full spool has no room for the reason either, but for the name: whoever waits must hear of it.
    with contextlib.suppress(OSError):
        temp.write_text(reason, encoding="utf-8")
    temp.rename(directory / f"{group}.failed")


# --------------------------------------------------------------------------------------------------- the client's side
def wait_admitted(directory: Path, group: str, or_until: Callable[[], bool]) -> None:
    """Return once the engine has begun with a group, or `or_until` says that it will not."""
    path = directory / f"{group}.admitted"
    while not path.exists() and not or_until():
        time.sleep(_POLL_S)


def take(
    directory: Path,
    group: str,
    samples: Sequence[Sequence[int]],
    first: int,
    raise_if_died: Callable[[], None] = lambda: None,
) -> Iterator[CapturedSample]:
    """Read, check and remove the states of a group whose requests have been answered.

    Args:
        directory: the spool.
        group: its name.
        samples: the ids that were sent, in the order of the group.
        first: the index of the first sample.
        raise_if_died: raises when nobody is left who could write; until then it is waited for.

    Raises:
        CaptureMismatchError: nothing was written, or ids or rows differ from what was asked for.
    """
    return _split(_load(directory, group, first, raise_if_died), samples, first)


def _load(directory: Path, group: str, first: int, raise_if_died: Callable[[], None]) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    path, admitted, failed = directory / group, directory / f"{group}.admitted", directory / f"{group}.failed"
    if not admitted.exists():
        raise CaptureMismatchError(
            f"sample {first}: expected its states in the spool, found none; the engine ran without the capture plugin"
        )
    # The engine answers while its states are still on their way.
    while not path.exists():
        if failed.exists():
            reason = failed.read_text("utf-8") or f"no room in {directory}, not even for the reason; free space there"
            raise CaptureMismatchError(f"sample {first}: its states were not written: {reason}")
        raise_if_died()
        time.sleep(_POLL_S)
    # Mapped, not read: the file goes when the last of its rows does.
    tensors: dict[str, torch.Tensor] = load_file(path)
    path.unlink()
    admitted.unlink()
    return tensors


def _split(
    tensors: Mapping[str, torch.Tensor], samples: Sequence[Sequence[int]], first: int
) -> Iterator[CapturedSample]:
    import torch

    ids = tensors["input_ids"].to(torch.int64)
    aux, last = tensors["aux_hidden_states"], tensors["last_hidden_state"]
    rows = sum(len(sample) for sample in samples)
    if (len(ids), len(aux), len(last)) != (rows, rows, rows):
        raise CaptureMismatchError(
            f"sample {first}: expected {rows} rows, found {len(ids)} ids, aux {tuple(aux.shape)}, last "
            f"{tuple(last.shape)}"
        )
    start = 0
    for index, sample in enumerate(samples, first):
        part = slice(start, start + len(sample))
        start = part.stop
        if ids[part].tolist() != list(sample):
            raise CaptureMismatchError(f"sample {index}: the captured token ids differ from those sent")
        yield CapturedSample(index, ids[part], aux[part], last[part])
