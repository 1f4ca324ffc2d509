from __future__ import annotations

import math
import time

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.errors import NonFiniteError, StorageFullError
from eagle3_core.storage import open_store
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.loop import train
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.rotation import checkpoint_key, checkpoint_steps
from eagle3_core.train.trackers import Trackers


class Ask:
    """Asks to stop at the n-th question."""

    def __init__(self, at=math.inf):
        self.at, self.asked = at, 0

    def __call__(self):
        self.asked += 1
        return self.asked >= self.at


def run(job, root, stop=None, progress=None):
    store = open_store(str(root))
    checkpoints = Checkpoints(store, "train/x", root / "staging", job.training)
    state = train(job, Ranks.alone(), checkpoints, Trackers(progress), stop or Ask())
    return state, checkpoints, store


def newest(checkpoints, store):
    return checkpoints.parameters(checkpoint_steps(store, "train/x")[-1])


def test_training_raises_held_out_tau(make_job, tmp_path):
    state, _, _ = run(make_job(epochs=40), tmp_path)
    assert state.best is not None
    assert state.best.score > 1.5
    assert state.best.report["by_depth"][0]["tau"] <= state.best.report["by_depth"][4]["tau"]
    assert state.best.report["trainer_tau"] == state.best.report["shapes"]["5/1/6"]["tau_chain"]


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit(make_job, tmp_path, stop_at):
    whole, checkpoints, store = run(make_job(), tmp_path / "whole")
    expected = newest(checkpoints, store)
    first, _, _ = run(make_job(), tmp_path / "parts", Ask(stop_at))
    assert first.step == stop_at < whole.step
    state, checkpoints, store = run(make_job(), tmp_path / "parts")
    assert state == whole
    for name, tensor in newest(checkpoints, store).items():
        assert torch.equal(tensor, expected[name]), name


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(make_job, tmp_path):
    whole, checkpoints, store = run(make_job(), tmp_path / "whole")
    expected = newest(checkpoints, store)
    run(make_job(checkpoint_every_s=1e-9), tmp_path / "parts", Ask(6))
    store = open_store(str(tmp_path / "parts"))
    steps = checkpoint_steps(store, "train/x")
    assert len(steps) == 3, "the last two and the best"
    path = store.local_path(f"{checkpoint_key('train/x', steps[-1])}/optimizer.safetensors", "")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    state, checkpoints, store = run(make_job(), tmp_path / "parts")
    assert state == whole
    assert store.list_keys("quarantine")
    assert all(torch.equal(tensor, expected[name]) for name, tensor in newest(checkpoints, store).items())


def test_the_last_two_checkpoints_and_the_best_are_kept(make_job, tmp_path):
    state, _, store = run(make_job(validations=1, checkpoint_every_s=1e-9), tmp_path)
    assert checkpoint_steps(store, "train/x") == [state.step - 1, state.step]


def test_a_step_with_infinite_gradients_is_skipped_and_counted(make_job, features, tmp_path):
    bad = next(index for index, kept in enumerate(features.held_out) if not kept)
    features.samples[bad].aux_hidden_states[5] = float("inf")
    state, _, _ = run(make_job(epochs=2), tmp_path)
    assert state.bad_steps == 2
    assert state.step == make_job(epochs=2).order.total_steps
    assert state.best is not None
    assert math.isfinite(state.best.report["by_depth"][0]["loss"])


def test_too_many_bad_steps_end_the_training(make_job, features, tmp_path):
    for sample in features.samples:
        sample.aux_hidden_states[5] = float("nan")
    with pytest.raises(NonFiniteError, match="at most 3"):
        run(make_job(max_bad_steps=3), tmp_path)


def test_a_frozen_head_stays_what_the_target_gave(make_job, tmp_path, features):
    job = make_job()
    job = type(job)(job.training, job.evaluation, job.sizes, features, job.target, job.draft_to_target, False)
    _, checkpoints, store = run(job, tmp_path)
    found = newest(checkpoints, store)["lm_head.weight"]
    assert torch.equal(found, features.head[torch.tensor(job.draft_to_target)])


def test_the_learning_rate_warms_up_then_falls_to_zero(make_job):
    training = make_job(learning_rate=1e-3, warmup_fraction=0.1).training
    rates = [learning_rate(step, 100, training) for step in range(100)]
    assert rates[0] == pytest.approx(1e-4)
    assert max(rates) == rates[9] == pytest.approx(1e-3)
    assert rates[-1] < 1e-5


def test_training_ends_when_tau_has_not_risen_for_so_many_validations(make_job, tmp_path):
    job = make_job(epochs=40, validations=20, patience=2, learning_rate=1e-12)
    state, _, _ = run(job, tmp_path)
    first, *_ = sorted(job.validation_steps)
    assert state.best.step == first, "nothing is learned at this rate"
    assert state.step == sorted(job.validation_steps)[2] < job.order.total_steps
    again, _, _ = run(job, tmp_path)
    assert again == state, "a second run has nothing left to do"


def test_a_checkpoint_that_cannot_be_written_fails_the_training(make_job, tmp_path, monkeypatch):
    def full(*_args, **_kwargs):
        raise StorageFullError("no space")

    monkeypatch.setattr("eagle3_core.train.checkpoint.commit", full)
    with pytest.raises(StorageFullError):
        run(make_job(), tmp_path)


def test_a_checkpoint_is_of_its_moment_however_long_the_disk_takes(make_job, tmp_path, monkeypatch):
    _, checkpoints, _ = run(make_job(), tmp_path / "two", Ask(2))
    expected = checkpoints.parameters(2)

    def slow(tensors, path):
        time.sleep(0.7)  # the next step is over by then
        save_file(tensors, path)

    monkeypatch.setattr("eagle3_core.train.checkpoint.save_file", slow)
    _, checkpoints, _ = run(make_job(checkpoint_every_tokens=1), tmp_path / "slow", Ask(3))
    assert all(torch.equal(tensor, expected[name]) for name, tensor in checkpoints.parameters(2).items())
