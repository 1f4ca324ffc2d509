"""Which prompts a benchmark asks, and how its points are told apart. Pure but for reading files."""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.config.sweep import BenchPlan, Cell
from eagle3_core.errors import InputError
from eagle3_core.prompts import read_prompts


def told_apart(cell: Cell, cells: Collection[Cell]) -> str:
    """Return the length and temperature of a point where others have another: ` (256 tokens, temperature 1)`."""
    parts = []
    if len({one.max_new_tokens for one in cells}) > 1:
        parts.append(f"{cell.max_new_tokens} tokens")
    if len({one.temperature for one in cells}) > 1:
        parts.append(f"temperature {cell.temperature:g}")
    return f" ({', '.join(parts)})" if parts else ""


class Point(Section):
    """Figures of one point of the sweep."""

    concurrency: int
    max_new_tokens: int
    temperature: float = Field(description="0 is greedy.")

    @property
    def cell(self) -> Cell:
        """Return the point of the sweep."""
        return Cell(self.concurrency, self.max_new_tokens, self.temperature)


@dataclass(frozen=True)
class BenchPrompt:
    """A conversation that ends with the user; its `id` is the same wherever it is asked, so benchmarks can be paired.

    With `input_ids` these are asked, and no chat template is applied.
    """

    id: str
    domain: str
    messages: tuple[Mapping[str, str], ...] = ()
    input_ids: tuple[int, ...] = ()


def load_prompts(paths: Sequence[Path], limit: int) -> list[BenchPrompt]:
    """Return up to `limit` different prompts of JSONL files (or directories of them), evenly over the domains.

    Of a conversation of several turns the first is asked: the later ones would depend on the answers.

    Raises:
        InputError: a file is missing or malformed, or there is no prompt.
    """
    files = [file for path in paths for file in (sorted(path.glob("*.jsonl")) if path.is_dir() else [path])]
    found: dict[str, BenchPrompt] = {}
    for file in files:
        for prompt in read_prompts(file, "--prompts"):
            text = json.dumps([dict(message) for message in prompt.messages], sort_keys=True)
            name = hashlib.sha256(text.encode()).hexdigest()[:16]
            found.setdefault(name, BenchPrompt(name, prompt.domain, prompt.messages))
    if not found:
        raise InputError(f"prompts {', '.join(map(str, paths))}: expected JSON lines, found none")
    domains: dict[str, list[BenchPrompt]] = {}
    for name in sorted(found):
        domains.setdefault(found[name].domain, []).append(found[name])
    in_turn = itertools.zip_longest(*(domains[domain] for domain in sorted(domains)))
    return [prompt for row in in_turn for prompt in row if prompt is not None][:limit]


def check_enough(plan: BenchPlan, prompts: int) -> None:
    """Refuse a concurrency that so few prompts cannot fill.

    Raises:
        InputError: fewer prompts than requests to be in flight.
    """
    if max(plan.concurrency) > prompts:
        raise InputError(
            f"concurrency {max(plan.concurrency)}: expected at least as many prompts, found {prompts}; give more "
            "prompts (--prompts may be given several times, see --max-prompts) or sweep less far"
        )
