"""`eagle3 remap` as a user types it: one JSON object, one line of error, the exit code of its remedy."""

import json

import pytest
import torch
from typer.testing import CliRunner

from eagle3_core.cli.main import app
from eagle3_core.identity import named_target
from tests.unit.export import tiny


@pytest.fixture
def typed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "target").mkdir()
    (tmp_path / "target" / "config.json").write_text(json.dumps(tiny.TARGET))
    return lambda *words: CliRunner().invoke(app, ["remap", *words])


def test_json_says_what_was_renamed_and_a_second_run_that_it_was_there(tmp_path, typed):
    tiny.write(tmp_path / "in", "vllm")
    words = ("in", "out", "--to", "sglang", "--target", "target", "--json")
    first = json.loads(typed(*words).stdout)
    assert (first["from"], first["to"], first["already_there"]) == ("vllm", "sglang", False)
    assert first["renamed"]["layers.0.hidden_norm.weight"] == "midlayer.hidden_norm.weight"
    assert first["kept"] == ["d2t", "fc.weight", "lm_head.weight", "norm.weight", "t2d"]
    assert json.loads(typed(*words).stdout) == {**first, "already_there": True}


def test_people_are_told_the_same_in_words(tmp_path, typed):
    tiny.write(tmp_path / "in", "eagle")
    done = typed("in", "out", "--to", "vllm")
    assert done.exit_code == 0
    assert "10 keys renamed" in " ".join(done.stderr.split())


def test_a_refusal_is_one_line_and_exit_code_65(tmp_path, typed):
    tiny.write(tmp_path / "in", "speculators", norm_before_residual=True)
    done = typed("in", "out", "--to", "sglang", "--target", "target")
    assert done.exit_code == 65
    assert done.stderr.startswith("error: [ExportError] in: norm_before_residual: expected none for sglang")
    assert done.stderr.count("\n") == 1


def test_a_target_instead_of_a_drafter_is_said_in_a_few_words(tmp_path, typed):
    done = typed(str(named_target("demo")), "out", "--to", "vllm")
    assert done.exit_code == 65
    assert "found a model of 8 layers and no fc.weight" in done.stderr
    assert "--target" in done.stderr
    assert len(done.stderr) < 300


def test_a_file_of_strange_keys_is_said_in_one_line(tmp_path, typed):
    strange = {f"midlayer.adapters.{number}.weight": torch.zeros(1) for number in range(100)}
    tiny.write(tmp_path / "in", "sglang", {**tiny.tensors("sglang"), **strange})
    done = typed("in", "out", "--to", "vllm")
    assert "midlayer.adapters.0.weight" in done.stderr
    assert "and 92 more" in done.stderr
    assert len(done.stderr) < 700


def test_the_targets_that_a_recipe_can_name_can_be_named_here(tmp_path, typed):
    tiny.write(tmp_path / "in", "vllm")
    done = typed("in", "out", "--to", "sglang", "--target", "demo")
    assert "expected a drafter for the hidden size" in done.stderr


def test_a_target_that_is_not_there_is_told_by_its_flag(tmp_path, typed):
    tiny.write(tmp_path / "in", "vllm")
    done = typed("in", "out", "--to", "sglang", "--target", "nowhere")
    assert done.stderr.endswith("found none; set --target\n")
