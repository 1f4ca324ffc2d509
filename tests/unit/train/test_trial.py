"""The preflight's training step: it runs for what can be trained, and names what cannot."""

from __future__ import annotations

import pytest
import torch

from eagle3_core.config import RunConfig
from eagle3_core.errors import TrainingError
from eagle3_core.train import trial


@pytest.fixture
def config():
    return RunConfig.parse({"target": {"model": "demo"}, "data": {"prompts": "demo"}}, "test")


def test_a_step_runs_with_the_drafters_own_heads(config, make_job):
    sizes = make_job().sizes.model_copy(update={"num_heads": 12, "num_kv_heads": 4, "head_dim": 40})
    assert "seconds" in trial.try_training(config, sizes, "cpu")


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_a_step_runs_with_multi_latent_attention(precision, config, make_job):
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 12}
    heads = {"num_heads": 4, "num_kv_heads": 4, "head_dim": 24, "mla": latent}
    sizes = type(make_job().sizes).parse({**make_job().sizes.model_dump(), **heads}, "test")
    run = config.model_copy(update={"training": config.training.model_copy(update={"precision": precision})})
    assert "seconds" in trial.try_training(run, sizes, "cpu")


@pytest.mark.parametrize("layers", [(2,), (0, 1, 2, 3, 4)])
def test_a_step_runs_with_as_many_aux_layers_as_are_fused(config, make_job, layers):
    sizes = make_job().sizes.model_copy(update={"aux_layers": layers})
    assert "seconds" in trial.try_training(config, sizes, "cpu")


def test_what_does_not_run_is_named_in_one_line(config, make_job, monkeypatch):
    def exhausted(*_args):
        raise RuntimeError("out of resource: shared memory, Required: 163840\nmore")

    monkeypatch.setattr(trial, "_step", exhausted)
    with pytest.raises(
        TrainingError, match=r"2 heads of 8 in bfloat16 does not run on cpu: RuntimeError: out of"
    ) as found:
        trial.try_training(config, make_job().sizes, "cpu")
    assert "\n" not in str(found.value)


def test_a_gradient_that_is_not_finite_is_refused(config, make_job, monkeypatch):
    real = torch.randn
    monkeypatch.setattr(trial.torch, "randn", lambda *size: real(*size) * float("nan"))
    with pytest.raises(TrainingError, match="norm nan"):
        trial.try_training(config, make_job().sizes, "cpu")
