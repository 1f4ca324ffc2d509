"""Drive one server, or two in turn, through the whole sweep: one event loop, a fixed number of requests in flight."""

from __future__ import annotations

import asyncio
import datetime
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.config.sweep import BenchPlan, Cell
from eagle3_core.engine.client import Sampling
from eagle3_core.errors import InputError, NotSpeculatingError
from eagle3_core.evaluate.bench.endpoint import Endpoint
from eagle3_core.evaluate.bench.plan import BenchPrompt, check_enough, told_apart
from eagle3_core.evaluate.bench.results import (
    BenchRun,
    CellResult,
    Passes,
    check_failures,
    counted_by_request,
    summarise_cell,
)
from eagle3_core.evaluate.bench.stream import RequestFailedError, StreamedAnswer, ask

WARM_UP_TOKENS = 16


@dataclass(frozen=True)
class Hooks:
    """What the caller wants to hear: text of a phase; each answer (or None for a failure); each finished point."""

    phase: Callable[[str], None] = lambda _text: None
    answer: Callable[[StreamedAnswer | None], None] = lambda _answer: None


@dataclass
class _Session:
    endpoint: Endpoint
    ids: list[list[int]]
    passes: dict[Cell, Passes]


def bench(
    urls: Sequence[str], prompts: Sequence[BenchPrompt], plan: BenchPlan, hooks: Hooks, tokenizer: Path | None = None
) -> list[BenchRun]:
    """Measure each server; with several, pass by pass in turn, so that a busier hour meets them all.

    Raises:
        InputError: no server there, too few prompts, or servers that render a prompt differently.
        EngineError: too many requests failed.
        NotSpeculatingError: a server says it speculates, and no counter says how well.
    """
    check_enough(plan, len(prompts))
    return asyncio.run(_bench(urls, prompts, plan, hooks, tokenizer))


async def _bench(
    urls: Sequence[str], prompts: Sequence[BenchPrompt], plan: BenchPlan, hooks: Hooks, tokenizer: Path | None
) -> list[BenchRun]:
    started, began = datetime.datetime.now(datetime.UTC), time.monotonic()
    async with AsyncExitStack() as stack:
        sessions = []
        for url in urls:
            endpoint = await stack.enter_async_context(Endpoint(url, max(plan.concurrency), tokenizer))
            hooks.phase(f"{endpoint.url}: {endpoint.facts.title}; chat template and warm-up")
            passes = {cell: Passes() for cell in plan.cells}
            sessions.append(_Session(endpoint, await _ids(endpoint, prompts), passes))
        if any(session.ids != sessions[0].ids for session in sessions):
            raise InputError("the servers render the same prompts to other tokens; they must serve the same target")
        for session in sessions:
            await _warm_up(session, prompts, plan)
        for repeat in range(plan.repeats):
            for at, cell in enumerate(plan.order(repeat)):
                for session in sessions if (repeat + at) % 2 == 0 else reversed(sessions):
                    where = f"{cell.concurrency} in flight{told_apart(cell, plan.cells)}"
                    hooks.phase(f"{session.endpoint.facts.title}, {where}, pass {repeat + 1}")
                    await _pass(session, prompts, cell, repeat, plan, hooks)
        return [_run(session, prompts, plan, started.isoformat(), time.monotonic() - began) for session in sessions]


async def _ids(endpoint: Endpoint, prompts: Sequence[BenchPrompt]) -> list[list[int]]:
    known = [list(prompt.input_ids) for prompt in prompts if prompt.input_ids]
    return known if len(known) == len(prompts) else await endpoint.render(prompts)


def _run(
    session: _Session, prompts: Sequence[BenchPrompt], plan: BenchPlan, started_at: str, seconds: float
) -> BenchRun:
    facts = session.endpoint.facts
    cells: list[CellResult] = [
        summarise_cell(cell, passes, facts.speculating) for cell, passes in session.passes.items()
    ]
    return BenchRun(
        server=facts, plan=plan, prompts={prompt.id: prompt.domain for prompt in prompts}, started_at=started_at,
        seconds=seconds, cells=tuple(cells),
        answers=tuple(answer for passes in session.passes.values() for answer in passes.answers),
    )  # fmt: skip


async def _warm_up(session: _Session, prompts: Sequence[BenchPrompt], plan: BenchPlan) -> None:
    """Ask as many at once as the sweep ever will; find out here, not at the end, that nothing is counted."""
    most = max(plan.concurrency)
    cell, passes = Cell(most, WARM_UP_TOKENS), Passes()
    warm = plan.model_copy(update={"flush": False})
    before = await session.endpoint.verify_calls()
    trial = _Session(session.endpoint, session.ids[:most], {cell: passes})
    await _pass(trial, prompts[:most], cell, 0, warm, Hooks())
    check_failures(passes, len(passes.answers) + len(passes.failures), f"{session.endpoint.url}, warm-up")
    if session.endpoint.facts.speculating and before is None and not counted_by_request(passes.answers):
        raise NotSpeculatingError(
            f"{session.endpoint.url}: it says it speculates ({session.endpoint.facts.title}), but counts no verify "
            "passes in its answers (meta_info.spec_verify_ct) and has no metrics; start it with --enable-metrics"
        )


async def _pass(
    session: _Session, prompts: Sequence[BenchPrompt], cell: Cell, repeat: int, plan: BenchPlan, hooks: Hooks
) -> None:
    """Ask every prompt once, `cell.concurrency` in flight; each repeat starts at another prompt."""
    endpoint, passes = session.endpoint, session.passes[cell]
    speculating = endpoint.facts.speculating
    sampling = Sampling(cell.max_new_tokens, cell.temperature, plan.ignore_eos)
    start = repeat * len(prompts) // max(1, plan.repeats)
    queue = iter([(at + start) % len(prompts) for at in range(len(prompts))])

    async def worker() -> None:
        for index in queue:
            try:
                found = await ask(endpoint.http, session.ids[index], sampling, speculating)
            except RequestFailedError as error:
                passes.failures.append(f"prompt {prompts[index].id}: {error}")
                hooks.answer(None)
                continue
            answer = StreamedAnswer(
                id=prompts[index].id, domain=prompts[index].domain, repeat=repeat, **cell._asdict(), **found
            )  # fmt: skip
            passes.answers.append(answer)
            hooks.answer(answer)

    if plan.flush:
        await endpoint.flush()
    before = await endpoint.verify_calls() if speculating else None
    began, busy = time.perf_counter(), time.process_time()
    await asyncio.gather(*(worker() for _ in range(min(cell.concurrency, len(prompts)))))
    wall = time.perf_counter() - began
    passes.wall_s.append(wall)
    passes.client_busy.append((time.process_time() - busy) / wall)
    if before is not None and (after := await endpoint.verify_calls()) is not None:
        passes.verify_calls = (passes.verify_calls or 0.0) + after - before
