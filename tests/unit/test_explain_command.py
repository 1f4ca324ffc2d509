"""`eagle3 train --explain` says what would be trained and runs nothing."""

from __future__ import annotations

import json
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


LATENT = {"q_lora_rank": 48, "kv_lora_rank": 32, "qk_nope_head_dim": 24, "qk_rope_head_dim": 8, "v_head_dim": 24}


def test_multi_latent_attention_is_explained_and_planned_and_wants_its_sizes(tmp_path: Path) -> None:
    told = [item for name, size in LATENT.items() for item in ("-s", f"drafter.{name}={size}")]
    mla = ["-s", "drafter.attention=mla"]
    done = CliRunner().invoke(app, ["train", "demo", "--explain", *mla, *told])
    assert done.exit_code == 0, done.output
    found = {line.split()[0]: line for line in done.output.splitlines()}
    assert "40 x 384" in found["layer.self_attn.kv_a_proj_with_mqa.weight"]
    assert found["layer.self_attn.q_a_layernorm.weight"].endswith("trained ones")
    plans = []
    for options in ([], [*mla, *told]):
        done = CliRunner().invoke(app, ["plan", "demo", "--json", "--root", str(tmp_path), *options])
        assert done.exit_code == 0, done.output
        plans.append(json.loads(done.stdout)["estimate"]["checkpoint_bytes"])
    attention = 192 * 2 * (48 + 40) + 48 * 6 * 32 + 32 * 6 * 48 + 48 + 32 + 6 * 24 * 192
    assert plans[0] - plans[1] == 12 * (7 * 192 * 192 - attention)
    refused = CliRunner().invoke(app, ["train", "demo", "--explain", *mla])
    assert refused.exit_code != 0
    said = " ".join(refused.output.split())
    assert "which has no MLA); set them under drafter, or attention: mha" in said
    assert said.count("q_lora_rank") == said.count("attention: mha") == 1
