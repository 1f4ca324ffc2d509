"""Whatever is typed, a person gets one line; whatever is asked for goes to stdout."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from eagle3_core.cli.main import app
from eagle3_core.storage import open_store


def refused(*arguments: str) -> str:
    done = CliRunner().invoke(app, list(arguments))
    assert done.exit_code == 65, done.output
    assert isinstance(done.exception, SystemExit), done.exception
    (line,) = [line for line in done.stderr.splitlines() if line]
    return line


@pytest.mark.parametrize("value", ["{a: b", "@you", ": a: b", '"oops'])
def test_a_value_that_is_no_yaml_is_named(value: str) -> None:
    assert "expected a YAML value" in refused("plan", "demo", "-s", f"data.system_prompt={value}")


def test_a_recipe_that_is_no_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_bytes(b"\xff\xfe")
    assert "expected UTF-8 text" in refused("plan", str(tmp_path / "r.yaml"))


def test_a_path_that_cannot_be_read_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recipe = tmp_path / "r.yaml"
    recipe.write_text("name: x\n")

    def denied(*_: object, **__: object) -> str:
        raise PermissionError(13, "Permission denied", str(recipe))

    # Tests may run as root, whom no permission stops.
    monkeypatch.setattr(Path, "read_text", denied)
    assert refused("plan", str(recipe)) == f"error: {recipe}: Permission denied; give another path"


@pytest.mark.parametrize("command", [["status"], ["features", "ls"], ["features", "verify"], ["features", "gc"]])
def test_looking_at_a_root_that_is_not_there_makes_none(command: list[str], tmp_path: Path) -> None:
    assert "expected an existing directory" in refused(*command, "--root", str(tmp_path / "typo"))
    assert not (tmp_path / "typo").exists()


def test_results_go_to_stdout(tmp_path: Path) -> None:
    open_store(str(tmp_path))
    for command in (["status"], ["features", "ls"]):
        done = CliRunner().invoke(app, [*command, "--root", str(tmp_path)])
        assert done.exit_code == 0, done.output
        assert done.stdout.startswith("no ")
        assert not done.stderr


def test_what_safetensors_wrote_is_as_readable_as_any_file(tmp_path: Path) -> None:
    import torch
    from safetensors.torch import save_file

    (tmp_path / "plain").touch()
    save_file({"x": torch.zeros(1)}, tmp_path / "made.safetensors")
    (tmp_path / "made.safetensors").chmod(0o600)
    open_store(str(tmp_path / "root")).put_file(tmp_path / "made.safetensors", "a/made.safetensors", "")
    assert (tmp_path / "root/a/made.safetensors").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_a_plan_reads_the_prompts_as_the_run_will(tmp_path: Path) -> None:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"prompt": "Why?"}\n{"prompt": 5}\n')
    assert f"{prompts}:2" in refused("plan", "demo", "-s", f"data.prompts={prompts}")


def test_the_readme_shows_all_that_a_plan_says(tmp_path: Path) -> None:
    done = CliRunner().invoke(
        app, ["plan", "--samples", "37312", "--tokens", "2353", "--hidden-size", "7168", "--root", str(tmp_path)]
    )
    readme = (Path(__file__).parents[2] / "README.md").read_text(encoding="utf-8")
    rows = [line for line in done.stdout.splitlines() if "│" in line and "free at the root" not in line]
    assert len(rows) == 6
    for row in rows:
        assert row.rstrip() in readme


def test_a_plan_says_that_its_tokens_are_an_estimate_and_never_zero_hours(tmp_path: Path) -> None:
    said = CliRunner().invoke(app, ["plan", "demo", "--root", str(tmp_path)]).stdout
    assert "half of data.max_new_tokens" in said
    assert "under 0.01 GPU-hours" in said
    assert "passes over" in said
    assert "about" not in CliRunner().invoke(app, ["plan", "demo", "--tokens", "100", "--root", str(tmp_path)]).stdout
