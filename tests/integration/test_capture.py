"""Prompts to feature set with real SGLang on the target that ships; the capture is killed on its way."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

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
from eagle3_core.repair import inspect
from eagle3_core.runner import freeze
from eagle3_core.storage import find, load, open_store

SMALL = {
    "data.max_prompts": 24, "data.held_out_fraction": 0.2, "data.max_new_tokens": 16, "data.chunk_prompts": 16,
    "data.max_sample_tokens": 256, "capture.shard_tokens": 256, "drafter.min_coverage": 0.05,
}  # fmt: skip


class Run:
    """Stages as jobs run them: one process each, with a job directory."""

    def __init__(self, root: Path) -> None:
        self.root, self.store = root, open_store(str(root))
        self.config = load_recipe("demo", SMALL)
        self.key, self.refs = freeze(self.store, self.config), {}

    def start(self, name: str, index: int | None = None) -> tuple[subprocess.Popen[bytes], Path]:
        stage, directory = STAGES[name], self.root / "jobs" / f"{name}-{index}"
        directory.mkdir(parents=True, exist_ok=True)
        inputs = {key: self.refs[kind].model_dump(mode="json") for key, kind in stage.inputs}
        command = [sys.executable, "-m", "eagle3_core", name, "--root", str(self.root), "--run", self.key]
        command += ["--inputs", json.dumps(inputs)] + ([] if index is None else ["--index", str(index)])
        environment = os.environ | {"EAGLE3_JOB_DIR": str(directory)}
        with (directory / "log").open("ab") as log:
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log), directory

    def run(self, name: str, index: int | None = None) -> Ref:
        process, directory = self.start(name, index)
        assert process.wait() == 0, (directory / "log").read_text()[-2000:]
        ref = Ref.parse(json.loads((directory / "result.json").read_text()), name)
        self.refs[STAGES[name].produces] = ref
        return ref


def processes_of(directory: Path) -> list[int]:
    """Return the living processes that a job has started, whoever their parent is now."""
    mark, found = f"EAGLE3_JOB_DIR={directory}".encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and mark in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
    return found


def wait_until(condition, seconds: float, what: str) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"waited {seconds} s for {what}"
        time.sleep(0.05)


@pytest.fixture(scope="module")
def planned(tmp_path_factory):
    run = Run(tmp_path_factory.mktemp("root"))
    for name in ("prepare", "regenerate", "build_vocab", "plan_capture"):
        run.run(name)
    return run


@dataclass(frozen=True)
class Killed:
    """A run whose capture was killed and then finished, and what was there when it was killed."""

    run: Run
    kept: set[str]
    written: dict[Path, int]


@pytest.fixture(scope="module")
def killed(planned):
    plan = planned.refs[Kind.SHARD_PLAN]
    first = read_plan(load(planned.store, plan)).shards[0].key
    process, directory = planned.start("capture", 0)
    begun = directory / "work" / "out" / "00001" / "features.safetensors"
    # In the middle of the second shard, which the engine goes on with.
    wait_until(
        lambda: (find(planned.store, first) is not None and begun.exists()) or process.poll() is not None,
        500, "the second shard",
    )  # fmt: skip
    process.send_signal(signal.SIGKILL)
    process.wait()
    wait_until(lambda: not processes_of(directory), 20, "the engine to die with its capture")
    kept = {finding.manifest_sha256 for finding in inspect(planned.store, plan) if finding.state == "ok"}
    written = {path: path.stat().st_mtime_ns for path in planned.root.glob("capture/*/*/manifest.json")}
    for index in range(plan.facts["num_shards"]):
        planned.run("capture", index)
    return Killed(planned, kept, written)


def test_what_a_killed_capture_had_committed_is_not_captured_again(killed):
    plan = killed.run.refs[Kind.SHARD_PLAN]
    assert plan.facts["num_shards"] >= 3
    assert killed.kept
    findings = inspect(killed.run.store, plan)
    assert [finding.state for finding in findings] == ["ok"] * plan.facts["num_shards"]
    assert killed.kept <= {finding.manifest_sha256 for finding in findings}
    assert all(path.stat().st_mtime_ns == at for path, at in killed.written.items())


def test_shards_captured_anew_in_another_order_are_the_same_to_the_last_bit(killed):
    plan, directory = killed.run.refs[Kind.SHARD_PLAN], killed.run.root / "capture"
    before = [finding.manifest_sha256 for finding in inspect(killed.run.store, plan)]
    directory.rename(killed.run.root / "captured-before")
    for index in reversed(range(len(before))):
        killed.run.run("capture", index)
    # A manifest holds the checksums of all files and tensors.
    assert [finding.manifest_sha256 for finding in inspect(killed.run.store, plan)] == before


def test_the_feature_set_holds_every_sample_once_with_the_states_transformers_computes(killed):
    from transformers import AutoModelForCausalLM

    planned = killed.run
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


def test_a_committed_shard_is_returned_without_importing_torch(killed):
    planned = killed.run
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
