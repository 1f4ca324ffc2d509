"""Serve held-out prompts on one running server, at each point of a grid, and put the figures together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from eagle3_core.config.sweep import BenchPlan
from eagle3_core.data.corpus import AskedPrompt
from eagle3_core.errors import EngineError, InputError, NotSpeculatingError
from eagle3_core.evaluate.bench.drive import Hooks, bench
from eagle3_core.evaluate.bench.plan import BenchPrompt, told_apart
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.measurement import BASELINE, Measurement, summarise
from eagle3_core.progress import Progress

if TYPE_CHECKING:
    from eagle3_core.engine.server import SglangServer


def held_out(prompts: Iterable[AskedPrompt], limit: int) -> list[AskedPrompt]:
    """Return up to `limit` held-out prompts, chosen and ordered by a hash of their id.

    Raises:
        InputError: none is held out.
    """
    found = [prompt for prompt in prompts if prompt.held_out]
    if not found:
        raise InputError("evaluate: expected held-out prompts, found none; raise data.held_out_fraction")
    return sorted(found, key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())[:limit]


def served(
    server: SglangServer, prompts: Sequence[AskedPrompt], plan: BenchPlan, progress: Progress, shape: str
) -> BenchRun:
    """Sweep over a server of our own, which should be of `shape`.

    Raises:
        NotSpeculatingError: it is of another shape, or speculates and no counter says how well.
        EngineError: it failed; the cause where it died.
    """
    hooks = telling(progress, len(prompts) * plan.passes)
    try:
        found = sweep(server.url, prompts, plan, hooks)
    except EngineError as error:
        raise server.cause_of_death() or error from None
    if (found.server.shape or BASELINE) != shape:
        raise NotSpeculatingError(
            f"{shape}: expected a server of this shape, found {found.server.title}; end others' servers on port "
            f"{server.url.rpartition(':')[2]}"
        )
    return found


def sweep(url: str, prompts: Sequence[AskedPrompt], plan: BenchPlan, hooks: Hooks) -> BenchRun:
    """Ask every prompt at each point, in as many passes as asked for, after a warm-up.

    Raises:
        NotSpeculatingError: the server says it speculates, and no counter says how well.
        EngineError: a request failed; then the shapes would be compared on other prompts.
    """
    asked = [BenchPrompt(prompt.id, prompt.domain or "other", input_ids=tuple(prompt.input_ids)) for prompt in prompts]
    (run,) = bench([url], asked, plan, hooks)
    for cell in run.cells:
        if cell.failed:
            where = f"{cell.concurrency} in flight{told_apart(cell.cell, plan.cells)}"
            raise EngineError(
                f"{where}: expected {cell.requests} answers, {cell.failed} failed: {'; '.join(cell.failures)}; look at "
                "the server's log"
            )
    return run


def first_point(run: BenchRun, circumstances: Mapping[str, Any]) -> Measurement:
    """Return the figures at the first point, which decides."""
    cell = run.cells[0]
    about = {
        "shape": run.server.shape or BASELINE, "prompts": len(run.prompts), "repeats": run.plan.repeats,
        **cell.cell._asdict(), **circumstances,
    }  # fmt: skip
    return summarise(run.answers_at(cell.cell), cell.wall_s, about, speculating=run.server.speculating)


def telling(progress: Progress, answers: int) -> Hooks:
    """Return what tells a job's progress of each answer."""
    done = tokens = 0
    started = time.monotonic()

    def answer(found: StreamedAnswer | None) -> None:
        nonlocal done, tokens
        done += 1
        tokens += 0 if found is None else found.completion_tokens
        seconds = time.monotonic() - started
        progress.update(done, answers, "answers", tokens_per_s=tokens / seconds if seconds > 1 else None)

    return Hooks(answer=answer)
