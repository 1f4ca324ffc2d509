"""Ranks: who this process is among those of one training run, and the few collectives it needs."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
from torch import distributed

from eagle3_core.errors import WorkerDiedError

BLOCK = 2**14
"""Values of a flat buffer that never part: a rank has whole blocks, so a block's sum is the same in any world."""

# The names of torch 2.13; before, the GPU lock's torch among them, they ended in _tensor.
_reduce_scatter = getattr(distributed, "reduce_scatter_single", None) or distributed.reduce_scatter_tensor
_all_gather = getattr(distributed, "all_gather_single", None) or distributed.all_gather_into_tensor


@dataclass(frozen=True, slots=True)
class Part:
    """The values `start` to `stop` of a flat buffer of `count` values, padded to `size`, that one rank keeps."""

    count: int
    start: int
    stop: int
    size: int

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a buffer of `size` values."""
        return whole[self.start : self.stop]

    @property
    def num_blocks(self) -> int:
        """Return the blocks of all parts."""
        return self.size // BLOCK

    def block_norms(self, whole: torch.Tensor, norms: torch.Tensor) -> None:
        """Write the norm of each block of this part of `whole` to its place in `norms` [num_blocks]."""
        own = norms[self.start // BLOCK : self.stop // BLOCK]
        torch.linalg.vector_norm(self.of(whole).view(-1, BLOCK), dim=1, out=own)

    def norm(self, norms: torch.Tensor) -> torch.Tensor:
        """Return the norm of all values from those of all blocks; how many blocks are padding makes no difference."""
        whole: torch.Tensor = torch.linalg.vector_norm(norms[: -(-self.count // BLOCK)])
        return whole


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `world` equals."""

    rank: int
    world: int
    device: torch.device
    leads: bool
    """Whether this is the rank that writes and reports; torchrun numbers machines as it likes."""

    @classmethod
    def alone(cls, device: str = "cpu") -> Ranks:
        """Return the only rank of a run without torchrun."""
        return cls(0, 1, torch.device(device), True)

    def part(self, count: int) -> Part:
        """Return this rank's part of a flat buffer with room for `count` values: equal parts, each of whole blocks."""
        each = -(-count // (BLOCK * self.world)) * BLOCK
        return Part(count, self.rank * each, (self.rank + 1) * each, self.world * each)

    @classmethod
    def join(cls, device: str, timeout_s: float, *, leads: bool = True) -> Ranks:
        """Join the process group torchrun describes in the environment: gloo on CPUs, nccl on GPUs.

        Who waits `timeout_s` seconds for another rank gives up; `leads` is true on the machine whose first rank leads.
        """
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world > 1:
            distributed.init_process_group(
                "nccl" if place.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
        return cls(rank, world, place, leads and os.environ["LOCAL_RANK"] == "0")

    def sum(self, values: torch.Tensor) -> None:
        """Add up `values` over all ranks, in place."""
        if self.world > 1:
            distributed.all_reduce(values)

    def sum_parts(self, whole: torch.Tensor, part: Part) -> None:
        """Add up a flat buffer over all ranks; only this rank's part holds the result, the rest is left undefined."""
        if self.device.type == "cpu":
            self.sum(whole)  # gloo scatters a sum at a third of the speed at which it gives all of it to all
        elif self.world > 1:
            _reduce_scatter(part.of(whole), whole)

    def join_parts(self, whole: torch.Tensor, own: torch.Tensor) -> None:
        """Fill a flat buffer with every rank's part, in its precision; `own` is this one's."""
        if self.world > 1:
            _all_gather(whole, own.to(whole.dtype))
        elif whole is not own:
            whole.copy_(own)

    def collect(self, own: torch.Tensor) -> torch.Tensor:
        """Return all ranks' parts in a row, copied to host memory, on the leading rank; elsewhere nothing, [0]."""
        found = []
        for rank in range(self.world):
            part = own if rank == self.rank else torch.empty_like(own)
            if self.world > 1:
                distributed.broadcast(part, src=rank)
            if self.leads:
                found.append(part.to("cpu", copy=True))
        return torch.cat(found) if len(found) > 1 else found[0] if found else torch.empty(0)

    def agree(self, value: int, what: str) -> None:
        """Refuse to go on where ranks see different values.

        Raises:
            WorkerDiedError: names all of them.
        """
        values = torch.zeros(self.world, dtype=torch.int64, device=self.device)
        values[self.rank] = value
        self.sum(values)
        if len(set(values.tolist())) > 1:
            raise WorkerDiedError(f"ranks disagree about {what}: {values.tolist()}; run again to resume")

    def leave(self) -> None:
        """Close the process group."""
        if self.world > 1:
            distributed.destroy_process_group()
