"""`eagle3 bench`: measure any running SGLang server."""

from __future__ import annotations

import contextlib
import datetime
import importlib.util
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from eagle3_core.cli.common import AsJson, console, one_line_errors, print_json
from eagle3_core.errors import EXIT_CODES, DefectError, InputError, Remedy
from eagle3_core.jobs import engine_python

if TYPE_CHECKING:
    from eagle3_core.config.sweep import BenchPlan
    from eagle3_core.evaluate.bench.drive import Hooks
    from eagle3_core.evaluate.bench.output import BenchFile
    from eagle3_core.evaluate.bench.results import CellResult

_LINE_EVERY_S = 10.0


def bench(  # noqa: PLR0913
    url: Annotated[str, typer.Argument(metavar="URL", help="Address of the server, for example http://host:30000.")],
    prompts: Annotated[
        list[Path], typer.Option("--prompts", "-p", help="JSONL file, or a directory of them. Repeatable.")
    ],
    concurrency: Annotated[str, typer.Option(help="Requests in flight, one or several: 1,2,4,8.")] = "1,2,4,8",
    max_new_tokens: Annotated[str, typer.Option(help="Longest answer in tokens, one or several.")] = "256",
    temperature: Annotated[str, typer.Option(help="Sampling temperature, one or several; 0 is greedy.")] = "0",
    repeats: Annotated[int, typer.Option(help="Passes over the prompts at each point, in rotated order.")] = 3,
    max_prompts: Annotated[int, typer.Option(help="Use at most this many, evenly over the domains.")] = 80,
    baseline: Annotated[
        str | None, typer.Option(help="Address of the same target without speculation, measured in turn.")
    ] = None,
    against: Annotated[Path | None, typer.Option(help="bench.json of a former benchmark to compare with.")] = None,
    expect: Annotated[
        float | None, typer.Option(help="Acceptance length that training promised; another one is flagged.")
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(help="The target's directory, for servers that cannot apply their chat template.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Let every answer reach its longest.")] = False,
    keep_cache: Annotated[bool, typer.Option("--keep-cache", help="Leave the server's prefix cache alone.")] = False,
    out: Annotated[Path | None, typer.Option(help="New directory; default: bench-DATE-TIME.")] = None,
    as_json: AsJson = False,
) -> None:
    """Measure a running SGLang server: acceptance length, tokens/s, TTFT and time per token at each point.

    Prompts go through the server's own chat template. With `--baseline` (the same target without speculation, measured
    pass by pass in turn) or `--against` (a former run) it also says how much faster or slower, how certain that is, and
    which acceptance length would break even. A server that says it speculates and counts no verify pass is an error.
    Writes bench.json, bench.csv and bench.html. Exit code 65 where the drafter contributes nothing.
    """
    with one_line_errors():
        _in_engine()
        from eagle3_core.config.sweep import BenchPlan

        asked = {
            "concurrency": _numbers(concurrency, "--concurrency"), "repeats": repeats,
            "temperatures": _numbers(temperature, "--temperature", float),
            "max_new_tokens": _numbers(max_new_tokens, "--max-new-tokens"), "ignore_eos": ignore_eos,
            "flush": not keep_cache,
        }  # fmt: skip
        if baseline is not None and against is not None:
            raise InputError("--baseline and --against: expected one of them, found both")
        directory = _new(out)
        urls = [url] if baseline is None else [url, baseline]
        file = _measured(urls, prompts, BenchPlan.parse(asked, "bench"), max_prompts, against, expect, tokenizer)
        _finish(file, directory, as_json)


def _in_engine() -> None:
    """Go on in the engine environment, where the plots can be drawn, if this one cannot."""
    if importlib.util.find_spec("matplotlib") is not None:
        return
    python = engine_python()
    if python == Path(sys.executable):
        raise DefectError(f"{python}: expected matplotlib in the engine environment, found none; run make setup")
    program = "from eagle3_core.cli.main import app; app(prog_name='eagle3')"
    os.execv(python, [str(python), "-P", "-c", program, *sys.argv[1:]])


def _numbers(text: str, option: str, kind: type[float] = int) -> list[float]:
    least, example = (1, "whole numbers from 1 like 1,2,4") if kind is int else (0, "numbers from 0 like 0,0.7,1")
    try:
        found = sorted({kind(part) for part in text.split(",")})
    except ValueError:
        found = []
    if not found or not found[0] >= least:
        raise InputError(f"{option}: expected {example}, found {text}")
    return found


def _new(out: Path | None) -> Path:
    from eagle3_core.evaluate.bench.output import NAMES

    directory = out or Path(f"bench-{datetime.datetime.now():%Y%m%d-%H%M%S}")
    there = [name for name in NAMES if (directory / name).exists()]
    if there:
        raise InputError(f"{directory}: expected a directory without {there[0]}, found one; give another --out")
    return directory


def _measured(
    urls: list[str], paths: list[Path], plan: BenchPlan, limit: int, against: Path | None, expect: float | None,
    tokenizer: Path | None,
) -> BenchFile:  # fmt: skip
    from eagle3_core.evaluate.bench.drive import bench as measure
    from eagle3_core.evaluate.bench.output import BenchFile, read_bench
    from eagle3_core.evaluate.bench.plan import load_prompts
    from eagle3_core.evaluate.bench.verdict import verdict
    from eagle3_core.evaluate.bench.versus import compare

    former = read_bench(against) if against is not None else None
    prompts = load_prompts(paths, limit)
    total = len(prompts) * plan.passes * len(urls)
    with _bar(total) as hooks:
        run, *others = measure(urls, prompts, plan, hooks, tokenizer)
    other = others[0] if others else former
    comparison = compare(run, other) if other is not None else None
    judged = verdict(run, comparison, other, expect)
    return BenchFile(verdict=judged, measured=run, against=other, comparison=comparison)


@contextlib.contextmanager
def _bar(total: int) -> Iterator[Hooks]:
    """Draw a bar with rates and the time left on a terminal; say a line now and then elsewhere."""
    from eagle3_core.evaluate.bench.drive import Hooks

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=24), MofNCompleteColumn(),
               TextColumn("{task.fields[rate]}"), TextColumn("ETA"), TimeRemainingColumn())  # fmt: skip
    state = {"done": 0.0, "tokens": 0.0, "failed": 0.0, "said": time.monotonic(), "began": time.monotonic()}
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("bench", total=total, rate="")

        def phase(text: str) -> None:
            progress.update(task, description=text)
            if not console.is_terminal:
                console.print(text, soft_wrap=True)

        def answer(found: Any) -> None:
            state["done"] += 1
            state["tokens"] += 0 if found is None else found.completion_tokens
            state["failed"] += found is None
            seconds = time.monotonic() - state["began"]
            failed = f", {state['failed']:.0f} failed" if state["failed"] else ""
            rate = f"{state['tokens'] / seconds:,.0f} tokens/s{failed}"
            progress.update(task, completed=state["done"], rate=rate)
            if not console.is_terminal and time.monotonic() - state["said"] > _LINE_EVERY_S:
                state["said"] = time.monotonic()
                left = seconds / state["done"] * (total - state["done"])
                console.print(f"{state['done']:.0f}/{total} requests, {rate}, ETA {left:,.0f} s")

        yield Hooks(phase=phase, answer=answer)


def _finish(file: BenchFile, directory: Path, as_json: bool) -> None:
    from eagle3_core.evaluate.bench.output import csv_rows, write_files

    written = write_files(directory, file)
    if as_json:
        print_json(
            {"server": file.measured.server.model_dump(mode="json"), "verdict": file.verdict.model_dump(mode="json"),
             "rows": csv_rows(file.measured, file.comparison), "files": [str(path) for path in written]}
        )  # fmt: skip
    else:
        console.print(_table(file))
        for note in file.verdict.notes:
            console.print(f"[yellow]note[/] {note}", soft_wrap=True)
        console.print(file.verdict.summary, soft_wrap=True)
        console.print("  ".join(str(path) for path in written), soft_wrap=True)
    if file.verdict.dead:
        raise typer.Exit(EXIT_CODES[Remedy.FIX])


def _table(file: BenchFile) -> Table:
    table = Table(title=f"{file.measured.server.title} at {file.measured.server.url}", box=None, padding=(0, 1, 0, 0))
    for name in ("in\nflight", "new\ntokens", "tem-\nperature", "accept\nlength", "\ntokens/s", "TTFT ms\np50 p99",
                 "per token\np50 p99", "\nspeed", "\n95 %", "break-\neven"):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True, overflow="fold")
    compared = {row.cell: row for row in file.comparison.cells} if file.comparison else {}
    for cell in file.measured.cells:
        speed = interval = even = ""
        if row := compared.get(cell.cell):
            speed, even = f"{row.speedup.ratio:.2f}", _shown(row.break_even)
            interval = f"{_shown(row.speedup.low)}-{_shown(row.speedup.high)}"
        table.add_row(*_cell(cell), speed, interval, even)
    return table


def _cell(cell: CellResult) -> list[str]:
    times = (cell.ttft_p50_s, cell.ttft_p99_s, cell.itl_p50_s, cell.itl_p99_s)
    first, first_p99, token, token_p99 = (_shown(None if time_s is None else 1000 * time_s, 1) for time_s in times)
    return [str(cell.concurrency), str(cell.max_new_tokens), f"{cell.temperature:g}",
            _shown(cell.acceptance_length), f"{cell.tokens_per_s:,.1f}", f"{first} {first_p99}",
            f"{token} {token_p99}"]  # fmt: skip


def _shown(value: float | None, digits: int = 2) -> str:
    return "-" if value is None else f"{value:.{digits}f}"
