"""What one server is asked: at which concurrency, answer length and temperature, in which order. Pure."""

from __future__ import annotations

import itertools
from typing import Annotated, NamedTuple

from pydantic import Field

from eagle3_core.config.base import Section


class Cell(NamedTuple):
    """One point of the sweep."""

    concurrency: int
    max_new_tokens: int
    temperature: float = 0.0


class BenchPlan(Section):
    """How the prompts are asked: at every concurrency, length and temperature together; the first point decides."""

    concurrency: tuple[int, ...] = Field((1, 2, 4, 8), min_length=1)
    max_new_tokens: tuple[int, ...] = Field((256,), min_length=1)
    temperatures: tuple[Annotated[float, Field(ge=0, le=2)], ...] = Field((0.0,), min_length=1)
    repeats: int = Field(1, ge=1, le=100)
    ignore_eos: bool = False
    flush: bool = Field(True, description="Empty the server's prefix cache before every pass.")

    @property
    def cells(self) -> list[Cell]:
        """Return the points of the sweep."""
        return list(
            itertools.starmap(Cell, itertools.product(self.concurrency, self.max_new_tokens, self.temperatures))
        )

    @property
    def passes(self) -> int:
        """Return how often all prompts are asked."""
        return len(self.cells) * self.repeats

    @property
    def first(self) -> BenchPlan:
        """Return the plan of the first point alone."""
        names = ("concurrency", "max_new_tokens", "temperatures")
        return self.model_copy(update={name: getattr(self, name)[:1] for name in names})

    def order(self, repeat: int) -> list[Cell]:
        """Return the points in the order of one repeat: each repeat starts elsewhere, so that drift hits none alone."""
        cells = self.cells
        start = repeat * max(1, len(cells) // self.repeats) % len(cells)
        return cells[start:] + cells[:start]
