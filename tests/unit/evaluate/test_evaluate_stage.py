"""The evaluate stage: what is measured once, what anew for each drafter."""

import json

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.errors import ConfigError
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


def test_the_baseline_is_measured_anew_for_other_prompts(bench):
    bench(0, "one")
    bench(0, "one", prompts="q")
    assert bench.measured == ["baseline"] * 2


@pytest.mark.parametrize(
    ("name", "value"),
    [("concurrency", (1, 4)), ("temperatures", (0.0, 1.0)), ("max_new_tokens", (256, 64)), ("repeats", 3)],
)
def test_the_baseline_is_measured_anew_at_other_points(bench, name, value):
    bench(0, "one")
    bench(0, "one", config=RUN.model_copy(update={"evaluation": RUN.evaluation.model_copy(update={name: value})}))
    assert bench.measured == ["baseline"] * 2


def test_drafts_are_not_measured_at_a_temperature_that_sglang_ignores(tmp_path, monkeypatch):
    """No server is started for it; without speculation a CPU samples like any other device."""
    config = RunConfig.parse(
        {**RUN.model_dump(mode="json"), "evaluation": {"temperatures": [0, 0.7]}, "serving": {"device": "cpu"}}, "test"
    )
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["LlamaForCausalLM"], "num_hidden_layers": 8}))
    monkeypatch.setattr(evaluate, "resolve_target", lambda _: tmp_path)
    context = StageContext(STAGES["evaluate"], config, LocalStore(tmp_path), {}, 0, tmp_path, Progress("x", None))
    with pytest.raises(ConfigError, match=r"expected 0 alone on cpu, .*, found 0\.7; leave them out"):
        evaluate._plan(context, "3/1/4", None)
    assert evaluate._plan(context, "baseline", None).mode == "serve"


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
