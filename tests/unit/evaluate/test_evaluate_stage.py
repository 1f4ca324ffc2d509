"""The evaluate stage: what is measured once, what anew for each drafter."""

import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.stages import evaluate
from eagle3_core.storage import commit, load
from eagle3_core.storage.local import LocalStore

RUN = RunConfig.parse({"target": {"model": "nowhere"}, "data": {"prompts": "nowhere"}}, "test")


@pytest.fixture
def bench(tmp_path, monkeypatch):
    store = LocalStore(tmp_path / "root")
    measured = []

    def put(key, kind, text):
        staged = tmp_path / "staged"
        staged.mkdir(exist_ok=True)
        (staged / "file").write_text(text)
        return commit(store, key, staged, kind)

    def measure(context, name, staged):
        measured.append(name)
        (staged / "sweep.json").write_text("{}")
        (staged / "measurement.json").write_text(json.dumps({"shape": name}))
        return {"shape": name, "tokens_per_s": 1.0}

    monkeypatch.setattr(evaluate, "_measure", measure)
    monkeypatch.setattr(evaluate, "require_known_good", lambda: "sglang 0.5.23")

    def run(index, drafter, config=RUN, prompts="p"):
        inputs = {
            "prompt_set": put(f"prepare/{prompts}", Kind.PROMPT_SET, prompts),
            "drafter": put(f"export/{drafter}", Kind.DRAFTER, drafter),
            "parity": put(f"parity/{drafter}", Kind.PARITY, drafter),
        }
        work = tmp_path / "work"
        work.mkdir(exist_ok=True)
        context = StageContext(STAGES["evaluate"], config, store, inputs, index, work, Progress("evaluate", None))
        return evaluate.run(context)

    run.measured, run.store = measured, store
    return run


def test_the_baseline_is_measured_once_for_all_drafters_on_the_same_prompts(bench):
    first, second = bench(0, "one"), bench(0, "two")
    assert bench.measured == ["baseline"]
    assert first.key != second.key
    assert load(bench.store, first).json("measurement.json") == load(bench.store, second).json("measurement.json")
    assert first.facts["baseline"] == second.facts["baseline"]


def test_the_baseline_is_measured_anew_for_other_prompts_and_other_settings(bench):
    bench(0, "one")
    bench(0, "one", prompts="q")
    evaluation = RUN.evaluation.model_copy(update={"concurrency": (1, 4)})
    bench(0, "one", config=RUN.model_copy(update={"evaluation": evaluation}))
    assert bench.measured == ["baseline"] * 3


def test_which_shapes_are_measured_does_not_change_the_baseline(bench):
    bench(0, "one")
    fewer = RUN.evaluation.model_copy(update={"shapes": RUN.evaluation.shapes[:3]})
    bench(0, "one", config=RUN.model_copy(update={"evaluation": fewer}))
    assert bench.measured == ["baseline"]


def test_every_shape_is_measured_for_every_drafter_and_only_once(bench):
    assert bench(3, "one").facts["shape"] == "7/1/8"
    bench(3, "two")
    assert bench(3, "one").facts["shape"] == "7/1/8"
    assert bench.measured == ["7/1/8", "7/1/8"]
