import datetime
import json
import os
import stat
import struct
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest

CHECKOUT = Path(__file__).resolve().parents[2]
# Before the first import of airflow.
os.environ.update(
    {
        "AIRFLOW_HOME": os.environ.get("EAGLE3_TEST_AIRFLOW_HOME") or tempfile.mkdtemp(prefix="eagle3-airflow-"),
        "AIRFLOW__CORE__DAGS_FOLDER": str(CHECKOUT / "dags"),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__LOGGING__LOGGING_LEVEL": "WARNING",
        "EAGLE3_RETRY_DELAY_S": "0",
    }
)
os.environ["EAGLE3_TEST_AIRFLOW_HOME"] = os.environ["AIRFLOW_HOME"]


class FakeEngine:
    """Where the engine's stand-in is told what to do."""

    def __init__(self, directory, root):
        self.directory, self.root = directory, root

    def calls(self):
        file = self.directory / "calls"
        return file.read_text().splitlines() if file.exists() else []

    def fail_once(self, stage, kind, message):
        (self.directory / f"{stage}.fail").write_text(f'{{"type": "{kind}", "message": "{message}"}}')

    def says(self, stage, facts):
        """Let the stage's next reference hold these facts; None: its own again."""
        file = self.directory / f"{stage}.facts"
        file.unlink(missing_ok=True)
        if facts is not None:
            file.write_text(json.dumps(facts))

    def hold(self, stage):
        (self.directory / f"{stage}.wait").touch()

    def release(self, stage):
        (self.directory / f"{stage}.wait").unlink()


@pytest.fixture(scope="session")
def engine_in():
    """Set up an engine that commits tiny artifacts to a root below `directory`."""

    def make(directory, monkeypatch):
        python = directory / "python"
        python.write_text(f'#!/bin/sh\nexec {sys.executable} {Path(__file__).with_name("fake_engine.py")} "$@"\n')
        python.chmod(python.stat().st_mode | stat.S_IXUSR)
        told = directory / "told"
        told.mkdir()
        monkeypatch.setenv("EAGLE3_ENGINE_PYTHON", str(python))
        monkeypatch.setenv("FAKE_DIR", str(told))
        monkeypatch.setenv("EAGLE3_ROOT", str(directory / "root"))
        return FakeEngine(told, directory / "root")

    return make


@pytest.fixture
def engine(engine_in, tmp_path, monkeypatch):
    """An engine of one test; whatever it still runs at the end is ended."""
    yield engine_in(tmp_path, monkeypatch)
    from eagle3_core import jobs

    for directory in (tmp_path / "root" / "jobs").glob("*"):
        jobs.end_processes(directory, grace_s=0)


@pytest.fixture(scope="session")
def target(tmp_path_factory):
    """A directory that the checks take for a target, and a prompt file, as the form's fields."""
    directory = tmp_path_factory.mktemp("target")
    config = {"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 8, "num_hidden_layers": 8,
              "intermediate_size": 16, "vocab_size": 2048, "num_attention_heads": 2,
              "max_position_embeddings": 512}  # fmt: skip
    (directory / "config.json").write_text(json.dumps(config))
    (directory / "tokenizer.json").write_text("{}")
    (directory / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    header = json.dumps({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    (directory / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
    prompts = directory / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {i}"}) + "\n" for i in range(20)))
    return {"target.model": str(directory), "data.prompts": str(prompts)}


@pytest.fixture
def context():
    """What Airflow passes to execute, as much of it as the operators use."""
    ti = MagicMock()
    ti.id, ti.try_number = "ti-1", 1
    run = SimpleNamespace(run_after=datetime.datetime(2026, 11, 30, 2, tzinfo=datetime.UTC))
    return {"ti": ti, "dag_run": run, "params": {"recipe": "demo", "overrides": {}}}


def pytest_configure(config):
    """Airflow imports Starlette's test client, which warns; our own warnings stay errors."""
    config.addinivalue_line("filterwarnings", "ignore:Using `httpx` with `starlette.testclient`")
