from __future__ import annotations

import errno
import json
import math
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file

from eagle3_core.errors import NonFiniteError, StorageFullError
from eagle3_core.progress import Progress
from eagle3_core.storage import load, open_store
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.loop import train
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.rotation import checkpoint_key, checkpoint_steps, newest_checkpoint
from eagle3_core.train.trackers import Trackers


class Ask:
    """Asks to stop at the n-th question: one before every step, one before every row of a validation."""

    def __init__(self, at=math.inf):
        self.at, self.asked = at, 0

    def __call__(self):
        self.asked += 1
        return self.asked >= self.at


class Waiting(Checkpoints):
    """Has every checkpoint written before the next step."""

    def save(self, *args):
        super().save(*args)
        self.finish()


def run(job, root, stop=None, kind=Checkpoints, **trackers):
    torch.manual_seed(0)
    store = open_store(str(root))
    newest = newest_checkpoint(store, "train/x")
    checkpoints = kind(store, "train/x", root / "staging", job.training, newest)
    state = train(job, Ranks.alone(), checkpoints, Trackers(**trackers), stop or Ask())
    return state, checkpoints, store


def saved(store, step=None):
    """Return a checkpoint's reference: the digest of its parameters, moments, random state and counters."""
    return load(store, checkpoint_key("train/x", step or checkpoint_steps(store, "train/x")[-1])).ref


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_training_raises_held_out_tau(make_job, tmp_path, precision):
    state, _, _ = run(make_job(epochs=40, precision=precision), tmp_path)
    assert state.best is not None
    assert state.best.score > 1.5
    assert state.best.report["by_depth"][0]["tau"] <= state.best.report["by_depth"][4]["tau"]
    assert state.best.report["trainer_tau"] == state.best.report["shapes"]["5/1/6"]["tau_chain"]


@pytest.mark.parametrize("stop_at", [1, 4])
def test_a_run_stopped_and_resumed_equals_an_uninterrupted_one_bit_for_bit(make_job, tmp_path, stop_at):
    whole, _, store = run(make_job(), tmp_path / "whole")
    expected = saved(store)
    first, _, _ = run(make_job(), tmp_path / "parts", Ask(stop_at))
    assert first.step == stop_at < whole.step
    state, _, store = run(make_job(), tmp_path / "parts")
    assert state == whole
    assert saved(store) == expected


def test_a_run_stopped_in_the_midst_of_a_validation_makes_up_for_it(make_job, tmp_path):
    whole, _, store = run(make_job(), tmp_path / "whole")
    expected, first = saved(store), min(make_job().validation_steps)
    parts = tmp_path / "parts"
    for row in (1, 2):
        state, _, _ = run(make_job(), parts, Ask(first + row))
        assert (state.step, state.validated, state.best) == (first, 0, None), "asked before the first step after it"
        (parts / "train/x").rename(parts / f"stopped-{row}")
    (parts / "stopped-2").rename(parts / "train/x")
    state, _, store = run(make_job(), parts)
    assert state == whole
    assert saved(store) == expected


def test_a_damaged_checkpoint_is_set_aside_and_the_one_before_is_used(make_job, tmp_path):
    whole, _, store = run(make_job(), tmp_path / "whole")
    expected = saved(store)
    run(make_job(checkpoint_every_s=1e-9), tmp_path / "parts", Ask(9), kind=Waiting)
    store = open_store(str(tmp_path / "parts"))
    steps = checkpoint_steps(store, "train/x")
    assert len(steps) == 3, "the last two and the best"
    path = store.local_path(f"{checkpoint_key('train/x', steps[-1])}/optimizer.safetensors", "")
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    state, _, store = run(make_job(), tmp_path / "parts")
    assert state == whole
    assert store.list_keys("quarantine")
    assert saved(store) == expected


def test_the_last_two_checkpoints_and_the_best_are_kept(make_job, tmp_path):
    state, _, store = run(make_job(validations=1, checkpoint_every_s=1e-9), tmp_path, kind=Waiting)
    assert checkpoint_steps(store, "train/x") == [state.step - 1, state.step]
    assert state.validated == state.best.step == state.step, "the one validation is that of the end"


def test_what_a_killed_writer_left_of_a_checkpoint_goes_with_the_next(make_job, tmp_path):
    store = open_store(str(tmp_path))
    store.write_bytes(f"{checkpoint_key('train/x', 2)}/drafter.safetensors", b"half")
    run(make_job(), tmp_path)
    kept = {checkpoint_key("train/x", step) for step in checkpoint_steps(store, "train/x")}
    assert {key.rpartition("/")[0] for key in store.list_keys("train/x/checkpoints")} == kept


def test_a_step_with_infinite_gradients_is_skipped_and_counted(make_job, features, tmp_path, monkeypatch):
    monkeypatch.setattr("eagle3_core.train.trackers.LOG_EVERY_STEPS", 1)
    bad = next(index for index, kept in enumerate(features.held_out) if not kept)
    features.samples[bad].aux_hidden_states[5] = float("inf")
    lines = tmp_path / "metrics.jsonl"
    state, _, store = run(make_job(epochs=2), tmp_path, progress=Progress("train", tmp_path), live=lines)
    assert state.bad_steps == 2

    def refuse(constant):
        raise AssertionError(f"{constant} is not JSON")

    found = [json.loads(line, parse_constant=refuse) for line in lines.read_text().splitlines()]
    assert found == state.metrics
    assert [line["loss"] for line in found if "loss" in line].count(None) == 2
    json.loads((tmp_path / "progress.json").read_text(), parse_constant=refuse)
    kept = load_file(load(store, checkpoint_key("train/x", state.step)).path("optimizer.safetensors"))
    assert kept["updates"] == state.step - 2
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
    state, checkpoints, _ = run(job, tmp_path)
    found = checkpoints.parameters(state.step)["lm_head.weight"]
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


def test_a_full_disk_is_told_and_leaves_room_to_tell_it(make_job, tmp_path, monkeypatch):
    def full(tensors, path):
        path.write_bytes(b"half")
        raise OSError(errno.ENOSPC, "no space")

    monkeypatch.setattr("eagle3_core.train.checkpoint.save_file", full)
    with pytest.raises(StorageFullError, match="staging"):
        run(make_job(), tmp_path)
    assert not (tmp_path / "staging").exists()


def test_a_slow_disk_lets_training_go_on_and_gets_the_moment_it_was_given(make_job, tmp_path, monkeypatch):
    job = make_job(checkpoint_every_tokens=1)
    _, _, store = run(job, tmp_path / "one", Ask(1))
    expected = saved(store, 1)
    stop, go_on = Ask(4), threading.Event()

    def asked():
        if stop():
            go_on.set()
        return stop.asked >= stop.at

    def slow(tensors, path):
        go_on.wait(20)  # for three more steps
        save_file(tensors, path)

    monkeypatch.setattr("eagle3_core.train.checkpoint.save_file", slow)
    _, _, store = run(job, tmp_path / "slow", asked)
    assert checkpoint_steps(store, "train/x") == [1, 4], "those of steps 2 and 3 were due, and not waited for"
    assert saved(store, 1) == expected


def test_a_rank_that_writes_no_checkpoint_asks_for_none(make_job, tmp_path, monkeypatch):
    job, saved_at, real = make_job(checkpoint_every_tokens=1), [], Checkpoints.save

    def save(checkpoints, optimizer, state, ranks):
        saved_at.append(state.step)
        real(checkpoints, optimizer, state, ranks)

    monkeypatch.setattr(Checkpoints, "save", save)
    checkpoints = Checkpoints(open_store(str(tmp_path)), "train/x", tmp_path / "staging", job.training)
    state = train(job, Ranks(0, 1, torch.device("cpu"), False), checkpoints, Trackers(), Ask())
    assert set(saved_at) <= {*job.validation_steps, state.step}


def test_weight_decay_shrinks_matrices_and_leaves_norms(make_job):
    learner = Learner.of(make_job(weight_decay=0.5), Ranks.alone())
    before = {name: values.detach().clone() for name, values in learner.drafter.named_parameters()}
    learner.sums.clear()
    learner.update(0.1)
    for name, values in learner.drafter.named_parameters():
        torch.testing.assert_close(values.detach(), before[name] * (0.95 if values.ndim > 1 else 1.0))
