"""The one entry point of all jobs: whatever goes wrong in a stage leaves one typed line."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path

import pytest

from eagle3_core import __main__ as entry
from eagle3_core.config.recipes import load_recipe
from eagle3_core.errors import EXIT_CODES, Remedy
from eagle3_core.storage import open_store


def _broken(_context: object) -> None:
    from eagle3_core.storage import nothing_of_that_name  # type: ignore[attr-defined]  # noqa: F401


def _flaky(_context: object) -> None:
    raise ConnectionResetError("peer went away")


@pytest.fixture
def arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    root = tmp_path / "store"
    store = open_store(str(root))
    store.write_bytes("runs/r.json", load_recipe("demo", {}).model_dump_json().encode())
    monkeypatch.setenv("EAGLE3_JOB_DIR", str(tmp_path))
    return ["preflight", "--root", str(root), "--run", "runs/r.json"]


def _stage(monkeypatch: pytest.MonkeyPatch, run: object) -> None:
    module = types.ModuleType("eagle3_core.stages.preflight")
    module.__dict__["run"] = run
    monkeypatch.setitem(sys.modules, "eagle3_core.stages.preflight", module)


def test_an_import_that_fails_is_a_defect_that_no_retry_helps(arguments, tmp_path, monkeypatch) -> None:
    _stage(monkeypatch, _broken)
    assert entry.main(arguments) == EXIT_CODES[Remedy.FIX]
    error = json.loads((tmp_path / "error.json").read_text())
    assert error["type"] == "DefectError" and error["remedy"] == "fix"
    assert "nothing_of_that_name" in error["message"] and "test_entry_point.py:" in error["message"]


def test_a_surprise_of_the_machine_stays_one_that_is_retried(arguments, monkeypatch) -> None:
    _stage(monkeypatch, _flaky)
    with pytest.raises(ConnectionResetError):
        entry.main(arguments)


def test_every_stage_keeps_to_the_runs_bound_of_the_cache(arguments, monkeypatch) -> None:
    opened: list[int | None] = []

    def recording(root: str, cache_bytes: int | None = None) -> object:
        opened.append(cache_bytes)
        return open_store(root)

    monkeypatch.setattr(entry, "open_store", recording)
    _stage(monkeypatch, _flaky)
    with pytest.raises(ConnectionResetError):
        entry.main(arguments)
    assert opened[-1] == load_recipe("demo", {}).training.cache_bytes
