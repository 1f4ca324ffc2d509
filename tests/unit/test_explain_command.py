"""`eagle3 train --explain` says what would be trained and runs nothing."""

from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from eagle3_core.cli.main import app


def test_explain_counts_every_tensor_and_writes_nothing(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "demo", "--explain", "--root", str(tmp_path / "store")])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "762,624 trained, 786,432 frozen"
    assert not (tmp_path / "store").exists()


def test_a_frozen_head_is_counted_as_frozen(tmp_path: Path) -> None:
    done = CliRunner().invoke(app, ["train", "demo", "--explain", "-s", "drafter.train_lm_head=false"])
    assert done.exit_code == 0, done.output
    assert done.output.splitlines()[-1] == "566,016 trained, 983,040 frozen"


def test_a_draft_vocabulary_larger_than_the_target_s_is_refused_in_one_line() -> None:
    done = CliRunner().invoke(app, ["train", "demo", "--explain", "-s", "drafter.draft_vocab_size=9999"])
    assert done.exit_code != 0
    assert "Traceback" not in done.output
