"""Prompts to feature set with real SGLang on the target that ships; the capture is killed on its way."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any

import pytest
import torch

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.recipes import load_recipe
from eagle3_core.data.corpus import read_corpus
from eagle3_core.data.encoding import label_rows
from eagle3_core.data.features import FeatureSet
from eagle3_core.data.plan import read_plan
from eagle3_core.identity import resolve_target
from eagle3_core.pipeline import STAGES
from eagle3_core.runner import freeze
from eagle3_core.storage import load, open_store

SMALL = {
    "data.max_prompts": 24, "data.held_out_fraction": 0.2, "data.max_new_tokens": 16, "data.chunk_prompts": 16,
    "data.max_sample_tokens": 256, "capture.shard_tokens": 256, "drafter.min_coverage": 0.05,
}  # fmt: skip


def benchmark(name: str) -> ModuleType:
    """Return a program of the folder benchmarks."""
    path = Path(__file__).resolve().parents[2] / "benchmarks" / f"{name}.py"
    spec = importlib.util.spec_from_file_location(name, path)
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Run:
    """Stages as jobs run them: one process each, with a job directory."""

    def __init__(self, root: Path, overrides: Mapping[str, str] = MappingProxyType({})) -> None:
        self.root, self.store = root, open_store(str(root))
        self.config = load_recipe("demo", {**SMALL, **overrides})
        self.key, self.refs = freeze(self.store, self.config), {}

    def run(self, name: str, index: int | None = None) -> Ref:
        stage, directory = STAGES[name], self.root / "jobs" / name
        directory.mkdir(parents=True, exist_ok=True)
        inputs = {key: self.refs[kind].model_dump(mode="json") for key, kind in stage.inputs}
        command = [sys.executable, "-m", "eagle3_core", name, "--root", str(self.root), "--run", self.key]
        command += [] if index is None else ["--index", str(index)]
        environment = os.environ | {"EAGLE3_JOB_DIR": str(directory)}
        done = subprocess.run(
            [*command, "--inputs", json.dumps(inputs)], env=environment, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr[-2000:]
        ref = Ref.parse(json.loads((directory / "result.json").read_text()), name)
        self.refs[STAGES[name].produces] = ref
        return ref


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("root"))
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        run.run(name)
    return run


@dataclass(frozen=True)
class Captured:
    """A run whose shards are all there, and what became of a copy of it whose capture was killed twice."""

    run: Run
    killed: dict[str, Any]


@pytest.fixture(scope="module")
def captured(planned):
    ids = [answer.id for answer in read_corpus(load(planned.store, planned.refs[Kind.CORPUS]))]
    plan = planned.refs[Kind.SHARD_PLAN]
    return Captured(planned, benchmark("kill_capture").matrix(planned.root, planned.key, plan, ids, kills=2, seed=3))


def test_a_capture_that_is_killed_and_finished_has_every_sample_once_and_the_same_bits(captured):
    assert captured.killed["identical"]
    assert captured.killed["shards"] >= 4
    assert sum(captured.killed["kills"].values()) == 2
    shards = captured.killed["shards"]
    assert captured.killed["tasks"] == [shards, shards + 2]


def test_one_engine_serves_all_tasks_and_one_more_is_started_for_every_kill(captured):
    calm, killed = captured.killed["engine_starts"]
    assert calm == 1
    assert 2 <= killed <= 3


def test_the_feature_set_holds_every_sample_once_with_the_states_transformers_computes(captured):
    from transformers import AutoModelForCausalLM

    planned = captured.run
    features = FeatureSet.open(planned.store, planned.run("seal"))
    answers = {answer.id: answer for answer in read_corpus(load(planned.store, planned.refs[Kind.CORPUS]))}
    assert sorted(features.sample_ids) == sorted(answers)
    plan = read_plan(load(planned.store, planned.refs[Kind.SHARD_PLAN]))
    model = AutoModelForCausalLM.from_pretrained(resolve_target(planned.config), dtype=torch.float32).eval()
    for position in range(0, len(features), 5):
        answer, sample = answers[features.sample_ids[position]], features.read(position)
        assert sample.input_ids.tolist() == answer.input_ids + answer.output_ids
        assert sample.loss_mask.tolist() == [False] * len(answer.input_ids) + [True] * len(answer.output_ids)
        with torch.no_grad():
            out = model.model(sample.input_ids[None], output_hidden_states=True)
        aux = torch.cat([out.hidden_states[layer + 1][0] for layer in plan.aux_layers], dim=-1)
        assert torch.allclose(sample.aux_hidden_states, aux, rtol=1e-3, atol=1e-3)
        rows = label_rows(sample.loss_mask)
        assert torch.allclose(sample.last_hidden_state[rows], out.last_hidden_state[0][rows], rtol=1e-3, atol=1e-3)


def test_transformers_captures_the_same_shards_under_names_of_their_own(captured):
    planned, other = captured.run, Run(captured.run.root, {"capture.backend": "transformers"})
    other.refs |= {kind: planned.refs[kind] for kind in (Kind.CORPUS, Kind.PROMPT_SET, Kind.VOCAB_MAP)}
    by_sglang = FeatureSet.open(planned.store, planned.run("seal"))
    plan = other.run("plan_capture")
    assert plan.facts["captured_shards"] == 0
    for index in range(plan.facts["num_shards"]):
        other.run("capture", index)
    by_transformers = FeatureSet.open(other.store, other.run("seal"))
    assert by_transformers.sample_ids == by_sglang.sample_ids
    for position in range(len(by_sglang)):
        one, two = by_sglang.read(position), by_transformers.read(position)
        torch.testing.assert_close(one.aux_hidden_states, two.aux_hidden_states, rtol=1e-3, atol=1e-3)
        torch.testing.assert_close(one.last_hidden_state, two.last_hidden_state, rtol=1e-3, atol=1e-3, equal_nan=True)


def test_a_committed_shard_is_returned_without_importing_torch(captured):
    planned = captured.run
    inputs = json.dumps({"shard_plan": planned.refs[Kind.SHARD_PLAN].model_dump(mode="json")})
    code = (
        "import sys; from eagle3_core.__main__ import main\n"
        f"code = main(['capture', '--root', {str(planned.root)!r}, '--run', {planned.key!r}, '--index', '1',\n"
        f"             '--inputs', {inputs!r}])\n"
        "assert code == 0\n"
        "print(sorted({'torch', 'transformers', 'sglang', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "[]"
