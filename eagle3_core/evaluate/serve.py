"""Serve held-out prompts on one running server, at each concurrency, and put the figures together."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from eagle3_core.config.evaluation import EvaluationConfig
from eagle3_core.data.corpus import AskedPrompt
from eagle3_core.errors import EngineError, InputError
from eagle3_core.evaluate.bench.drive import Hooks, bench
from eagle3_core.evaluate.bench.plan import BenchPlan, BenchPrompt
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.measurement import BASELINE, Measurement, summarise
from eagle3_core.progress import Progress


def held_out(prompts: Iterable[AskedPrompt], limit: int) -> list[AskedPrompt]:
    """Return up to `limit` held-out prompts, chosen and ordered by a hash of their id.

    Raises:
        InputError: none is held out.
    """
    found = [prompt for prompt in prompts if prompt.held_out]
    if not found:
        raise InputError("evaluate: expected held-out prompts, found none; raise data.held_out_fraction")
    return sorted(found, key=lambda prompt: hashlib.sha256(prompt.id.encode()).digest())[:limit]


def sweep(
    url: str, prompts: Sequence[AskedPrompt], evaluation: EvaluationConfig, hooks: Hooks, *, ignore_eos: bool = False
) -> BenchRun:
    """Ask every prompt greedily, at each concurrency, in as many passes as asked for, after a warm-up.

    Raises:
        NotSpeculatingError: the server says it speculates, and no counter says how well.
        EngineError: a request failed; then the shapes would be compared on other prompts.
    """
    plan = BenchPlan(
        concurrency=evaluation.concurrency, max_new_tokens=(evaluation.max_new_tokens,), repeats=evaluation.repeats,
        ignore_eos=ignore_eos,
    )  # fmt: skip
    asked = [BenchPrompt(prompt.id, prompt.domain or "other", input_ids=tuple(prompt.input_ids)) for prompt in prompts]
    (run,) = bench([url], asked, plan, hooks)
    for cell in run.cells:
        if cell.failed:
            raise EngineError(
                f"{cell.concurrency} in flight: expected {cell.requests} answers, {cell.failed} failed: "
                f"{'; '.join(cell.failures)}; look at the server's log"
            )
    return run


def first_point(run: BenchRun, circumstances: Mapping[str, Any]) -> Measurement:
    """Return the figures at the first concurrency, which decides."""
    cell = run.cells[0]
    shape = run.server.shape or BASELINE
    return summarise(
        run.answers_at(cell.cell), cell.wall_s, {"shape": shape, **circumstances}, speculating=run.server.speculating
    )


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
