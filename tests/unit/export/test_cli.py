"""`eagle3 remap` as a user types it: one JSON object, one line of error, the exit code of its remedy."""

import json

import pytest
from typer.testing import CliRunner

from eagle3_core.cli.main import app
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
