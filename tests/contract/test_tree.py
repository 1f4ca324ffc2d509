"""The tree says what it promises: one module a stage, small modules, small functions."""

import ast
from pathlib import Path

import pytest

from eagle3_core.pipeline import STAGES

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted(path for top in ("eagle3_core", "operators", "dags") for path in (ROOT / top).rglob("*.py"))
MODULE_LINES, FUNCTION_LINES = 300, 50
WIRING_LINES = 60
"""A DAG is one function by design; it may be a little longer."""


def oversized(source: str, function_lines: int = FUNCTION_LINES) -> list[str]:
    """Return what in a module is over its budget."""
    found = []
    if source.count("\n") > MODULE_LINES:
        found.append(f"module has {source.count(chr(10))} lines")
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.end_lineno is not None:
            lines = node.end_lineno - node.lineno + 1
            if lines > function_lines:
                found.append(f"{node.name} has {lines} lines")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_modules_and_functions_fit_on_a_screen(path):
    function_lines = WIRING_LINES if path.parent.name == "dags" else FUNCTION_LINES
    assert oversized(path.read_text(encoding="utf-8"), function_lines) == []


def test_the_budget_bites():
    long_function = "def f():\n" + "    pass\n" * FUNCTION_LINES
    assert oversized(long_function) == ["f has 51 lines"]
    assert oversized("x = 1\n" * (MODULE_LINES + 1)) == ["module has 301 lines"]


def test_every_stage_has_one_module_and_every_module_one_stage():
    modules = {path.stem for path in (ROOT / "eagle3_core" / "stages").glob("*.py")} - {"__init__"}
    assert modules == set(STAGES)


def test_stages_read_only_what_earlier_stages_write():
    written = set()
    for stage in STAGES.values():
        assert {kind for _, kind in stage.inputs} <= written, stage.name
        assert all(name == kind for name, kind in stage.inputs), stage.name
        written.add(stage.produces)
