"""What `make demo` asks the DAG for, on a CPU and on a GPU, and how long it says it will take."""

from __future__ import annotations

from typing import Any

import pytest

from eagle3_core.cli import demo, forecast
from eagle3_core.config.recipes import load_recipe


def test_a_gpu_serves_captures_and_trains_in_half_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: True)
    request = demo.request_for("demo", None)
    run = load_recipe(request.recipe, {key: value for key, value in request.conf.items() if key != "recipe"})
    assert (run.target.dtype, run.capture.dtype, run.training.precision) == ("bfloat16",) * 3
    assert run.gate.near_tie_gap > load_recipe("demo", {}).gate.near_tie_gap


def test_a_cpu_runs_the_recipe_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    assert demo.request_for("demo", None).conf == {"recipe": "demo"}


def test_a_directory_takes_the_recipe_for_targets_of_one_s_own(monkeypatch: pytest.MonkeyPatch, tmp_path) -> None:
    monkeypatch.setattr(demo, "has_gpu", lambda: False)
    request = demo.request_for(str(tmp_path), str(tmp_path / "p.jsonl"))
    assert request.recipe == demo.OWN
    assert request.conf["target.model"] == str(tmp_path)
    assert request.conf["data.prompts"] == str(tmp_path / "p.jsonl")


def test_the_forecast_grows_with_every_part_of_the_work(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forecast, "has_gpu", lambda: False)
    low, high = forecast.minutes(load_recipe("demo", {}))
    assert 0 < low < high
    more = {"training.epochs": 40, "data.max_new_tokens": 300, "evaluation.max_prompts": 2000, "evaluation.repeats": 2,
            "evaluation.concurrency": [1, 8], "evaluation.simulated_lengths": [2]}  # fmt: skip
    for key, value in more.items():
        assert forecast.minutes(load_recipe("demo", {key: value}))[1] > high
    assert forecast.minutes(load_recipe("demo", {"data.max_prompts": 400}))[1] < high


def test_only_a_run_of_the_very_same_request_is_followed() -> None:
    class Api:
        def get(self, path: str, **query: object) -> dict[str, object]:
            asked = {"recipe": "demo", "data.prompts": "/mine.jsonl"}
            return {"dag_runs": [{"dag_run_id": "mine", "conf": asked}, {"dag_run_id": "bare", "conf": None}]}

    api: Any = Api()
    assert demo._current_run(api, {"recipe": "demo", "data.prompts": "/mine.jsonl"}) == "mine"
    assert demo._current_run(api, {"recipe": "demo"}) is None
