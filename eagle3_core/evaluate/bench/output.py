"""The files of a benchmark: bench.json (which a later one can be compared with), bench.csv, bench.html."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from eagle3_core.config.base import Section
from eagle3_core.errors import InputError, UnknownSchemaError
from eagle3_core.evaluate.bench.page import render
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.bench.verdict import BenchVerdict
from eagle3_core.evaluate.bench.versus import CellComparison, Comparison

SCHEMA: Literal["eagle3/bench/2"] = "eagle3/bench/2"
NAMES = ("bench.json", "bench.csv", "bench.html")
_MILLI = ("ttft_p50_s", "ttft_p99_s", "itl_p50_s", "itl_p99_s", "gap_p99_s", "latency_p50_s", "latency_p99_s", "step_s")


class BenchFile(Section):
    """The content of bench.json."""

    schema_version: Literal["eagle3/bench/2"] = SCHEMA
    verdict: BenchVerdict
    measured: BenchRun
    against: BenchRun | None
    comparison: Comparison | None = Field(description="None: there was nothing to compare with.")


def read_bench(path: Path) -> BenchRun:
    """Return what a former benchmark measured.

    Raises:
        InputError: no such file, or not one of ours.
        UnknownSchemaError: written by another version.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise InputError(f"{path}: expected the bench.json of a former benchmark, found {error}") from error
    found = values.get("schema_version") if isinstance(values, dict) else None
    if found != SCHEMA:
        raise UnknownSchemaError(f"{path}: expected schema {SCHEMA}, found {found}; measure again with this version")
    return BenchFile.parse(values, str(path)).measured


def write_files(directory: Path, file: BenchFile) -> list[Path]:
    """Write all three; the directory is new or empty of them."""
    html = render(file.measured, file.against, file.comparison, file.verdict)
    directory.mkdir(parents=True, exist_ok=True)
    as_json, as_csv, page = (directory / name for name in NAMES)
    as_json.write_text(file.model_dump_json(), encoding="utf-8")
    rows = csv_rows(file.measured, file.comparison)
    with as_csv.open("w", newline="", encoding="utf-8") as handle:
        writer = csv.DictWriter(handle, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)
    page.write_text(html, encoding="utf-8")
    return [as_json, as_csv, page]


def csv_rows(run: BenchRun, comparison: Comparison | None) -> list[dict[str, Any]]:
    """Return one flat row per point and domain, `all` being every prompt; times in milliseconds."""
    compared = {row.cell: row for row in (comparison.cells if comparison else ())}
    rows: list[dict[str, Any]] = []
    for cell in run.cells:
        point = {"server": run.server.title, **cell.cell._asdict()}
        times = {name.replace("_s", "_ms"): _milli(getattr(cell, name)) for name in _MILLI}
        counts = {name: getattr(cell, name) for name in ("requests", "failed", "empty", "loops")}
        versus = compared.get(cell.cell)
        rows.append(
            {**point, "domain": "all", "acceptance_length": cell.acceptance_length,
             "tokens_per_s": round(cell.tokens_per_s, 3), **times, **counts, **_versus(versus)}
        )  # fmt: skip
        speeds = {domain.domain: domain.speedup for domain in versus.domains} if versus else {}
        for name, pool in cell.domains.items():
            row = {**point, "domain": name, "acceptance_length": pool.acceptance_length, "requests": pool.answers}
            if name in speeds:
                row |= {"speedup": speeds[name].ratio, "low": speeds[name].low, "high": speeds[name].high}
            rows.append(row)
    return rows


def _milli(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 3)


def _versus(row: CellComparison | None) -> dict[str, Any]:
    if row is None:
        return {}
    return {"speedup": row.speedup.ratio, "low": row.speedup.low, "high": row.speedup.high, "verdict": row.word,
            "break_even": row.break_even, "cost_ratio": row.cost_ratio, "equal": row.equal}  # fmt: skip
