"""A drafter with multi-latent attention goes through the loop and its checkpoints as any other."""

from __future__ import annotations

from dataclasses import replace

import pytest

from eagle3_core.model.architecture import DrafterArchitecture
from tests.unit.train.test_loop import Ask, run, saved

MLA = {"q_lora_rank": 16, "kv_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}


def latent(job):
    heads = {"num_kv_heads": 2, "head_dim": 12, "mla": MLA}
    return replace(job, sizes=DrafterArchitecture.parse({**job.sizes.model_dump(), **heads}, "test"))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_raises_held_out_tau(make_job, tmp_path, precision):
    state, _, _ = run(latent(make_job(epochs=40, precision=precision)), tmp_path)
    assert state.best is not None
    assert state.best.score > 1.5


def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit(make_job, tmp_path):
    whole, _, store = run(latent(make_job()), tmp_path / "whole")
    expected = saved(store)
    first, _, _ = run(latent(make_job()), tmp_path / "parts", Ask(3))
    assert first.step == 3 < whole.step
    state, _, store = run(latent(make_job()), tmp_path / "parts")
    assert state == whole
    assert saved(store) == expected
