"""Ranks: who this process is among those of one training run, and the two collectives it needs."""

from __future__ import annotations

import datetime
import os
from dataclasses import dataclass

import torch
from torch import distributed


@dataclass(frozen=True, slots=True)
class Ranks:
    """This process among `world` equals."""

    rank: int
    world: int
    device: torch.device

    @classmethod
    def alone(cls, device: str = "cpu") -> Ranks:
        """Return the only rank of a run without torchrun."""
        return cls(0, 1, torch.device(device))

    @classmethod
    def join(cls, device: str, timeout_s: float) -> Ranks:
        """Join the process group torchrun describes in the environment: gloo on CPUs, nccl on GPUs.

        Who waits `timeout_s` seconds for another rank gives up.
        """
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        place = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if device == "cuda" else torch.device("cpu")
        if place.type == "cuda":
            torch.cuda.set_device(place)
        if world > 1:
            distributed.init_process_group(
                "nccl" if place.type == "cuda" else "gloo", timeout=datetime.timedelta(seconds=timeout_s)
            )
        return cls(rank, world, place)

    @property
    def leads(self) -> bool:
        """Tell whether this is the rank that writes and reports."""
        return self.rank == 0

    def sum(self, values: torch.Tensor) -> None:
        """Add up `values` over all ranks, in place."""
        if self.world > 1:
            distributed.all_reduce(values)

    def broadcast(self, values: torch.Tensor) -> None:
        """Take over `values` from the leading rank, in place."""
        if self.world > 1:
            distributed.broadcast(values, src=0)

    def leave(self) -> None:
        """Close the process group."""
        if self.world > 1:
            distributed.destroy_process_group()
