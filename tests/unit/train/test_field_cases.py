"""What others lost days to while training, as kinds: C1, C3, C4, C6, T5, T7, T8; T1, T2, T9 and C7 are nearby."""

from __future__ import annotations

import errno
from collections import Counter

import pytest
import torch
from safetensors.torch import save_file

from eagle3_core.data.batches import Packing, TrainOrder, share
from eagle3_core.data.features import FeatureSample
from eagle3_core.errors import StoreUnreachableError
from eagle3_core.storage import open_store
from eagle3_core.train import checkpoint
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.loop import train
from eagle3_core.train.rotation import checkpoint_key, checkpoint_steps, newest_checkpoint
from eagle3_core.train.trackers import Trackers
from tests.unit.train.conftest import D, V, tiny_job


class Seen(Trackers):
    """Keeps the learning rate of every step."""

    def __init__(self):
        super().__init__()
        self.rates = []

    def stepped(self, state, report):
        self.rates.append(report.learning_rate)


def run(job, root, stop_at=None):
    """Train until step `stop_at`; return what was reported."""
    seen, store = Seen(), open_store(str(root))
    checkpoints = Checkpoints(store, "train/x", root / "staging", job.training, newest_checkpoint(store, "train/x"))
    train(job, Ranks.alone(), checkpoints, seen, lambda: len(seen.rates) + 1 == stop_at)
    return seen


def test_c1_only_what_has_a_sound_manifest_is_a_checkpoint(make_job, tmp_path):
    job = make_job()
    run(job, tmp_path, 2)
    store = open_store(str(tmp_path))
    half = store.local_path(f"{checkpoint_key('train/x', 2)}/drafter.safetensors", "").read_bytes()
    for name in ("step-000003", "step-000004.tmp", "interrupted", "3", "step-x"):
        store.write_bytes(f"train/x/checkpoints/{name}/drafter.safetensors", half[: len(half) // 2])
    assert newest_checkpoint(store, "train/x").key == checkpoint_key("train/x", 2)
    assert len(run(job, tmp_path).rates) == job.order.total_steps - 2


@pytest.mark.parametrize("stop_at", [1, 3, 5])
def test_c3_the_learning_rate_goes_on_as_if_nothing_had_been(make_job, tmp_path, stop_at):
    job = make_job(warmup_fraction=0.5)
    whole = run(job, tmp_path / "whole").rates
    parts = [*run(job, tmp_path / "parts", stop_at).rates, *run(job, tmp_path / "parts").rates]
    assert parts == whole
    assert len(set(whole)) > 3


@pytest.mark.parametrize("worlds", [(1, 3), (4, 2)])
def test_c4_the_rest_of_an_epoch_is_seen_once_whatever_the_number_of_ranks(worlds):
    lengths = [1 + index % 37 for index in range(500)]
    order = TrainOrder(lengths, range(500), Packing(64, 256), seed=3, epochs=1)
    killed = round(0.6 * order.total_steps)
    seen = Counter()
    for world, steps in zip(worlds, (range(killed), range(killed, order.total_steps)), strict=True):
        for step in steps:
            for rank in range(world):
                seen.update(s for row in share(order.rows(step), lengths, rank, world) for s in row)
    assert seen == Counter(range(500))


@pytest.mark.parametrize("failures", [1, 2])
def test_c6_a_write_that_fails_once_ends_nothing(make_job, tmp_path, monkeypatch, failures):
    left = [failures]

    def faulty(tensors, path):
        if left[0]:
            left[0] -= 1
            raise OSError(errno.EIO, "Input/output error")
        save_file(tensors, path)

    monkeypatch.setattr(checkpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(checkpoint, "save_file", faulty)
    job = make_job()
    assert len(run(job, tmp_path).rates) == job.order.total_steps
    assert checkpoint_steps(open_store(str(tmp_path)), "train/x")[-1] == job.order.total_steps


def test_c6_a_disk_that_stays_broken_is_said_and_a_retry_helps(make_job, tmp_path, monkeypatch):
    def broken(_tensors, path):
        raise OSError(errno.EIO, "Input/output error", str(path))

    run(make_job(), tmp_path, 1)
    monkeypatch.setattr(checkpoint, "FIRST_PAUSE_S", 0.01)
    monkeypatch.setattr(checkpoint, "save_file", broken)
    with pytest.raises(StoreUnreachableError, match=r"not written in 3 attempts: \[Errno 5\] Input/output"):
        run(make_job(), tmp_path)
    assert newest_checkpoint(open_store(str(tmp_path)), "train/x") is not None


@pytest.mark.parametrize("world", [1, 4, 7])
def test_t5_all_ranks_have_all_steps_and_no_sample_is_dropped_or_doubled(world):
    """37,281 samples over 4 ranks: others gave them 1,166, 1,165, 1,165 and 1,165 batches, and hung."""
    lengths = [64 + 13 * (index % 300) for index in range(37_281)]
    order = TrainOrder(lengths, range(len(lengths)), Packing(8192, 65_536), seed=0, epochs=1)
    shares = [[share(order.rows(step), lengths, rank, world) for step in range(order.total_steps)]
              for rank in range(world)]  # fmt: skip
    assert {len(steps) for steps in shares} == {order.total_steps}
    assert Counter(s for steps in shares for rows in steps for row in rows for s in row) == Counter(range(len(lengths)))


def test_t7_eight_samples_that_others_cut_to_one_row_lose_nothing():
    order = TrainOrder([2353] * 8, range(8), Packing(8192, 8192), seed=0, epochs=1)
    accounts = order.accounts(0, [1500] * 8)
    assert (accounts.tokens_in, accounts.trained, accounts.dropped) == (8 * 2353, 8 * 1500, 0)
    assert order.total_steps == 3


class Long:
    """One sample far longer than a row, among short ones."""

    lengths = (150, 20, 20, 20, 20)
    supervised = (140, 10, 10, 10, 10)
    held_out = (False, False, False, False, True)
    sample_ids = ("long", "a", "b", "c", "held out")

    def __init__(self):
        generator = torch.Generator().manual_seed(0)
        self.states, self.head = (torch.randn(V, D, generator=generator) for _ in range(2))

    def read(self, index):
        length = self.lengths[index]
        states = torch.randn(length, 4 * D, generator=torch.Generator().manual_seed(index))
        mask = torch.arange(length) >= length - self.supervised[index]
        return FeatureSample(torch.arange(length) % V, mask, states[:, D:], states[:, :D])


def test_t8_a_sample_longer_than_a_row_is_trained_on_whole(tmp_path):
    job = tiny_job(Long(), row_tokens=64, batch_tokens=64, epochs=1, validations=1)
    assert (0,) in {row for step in range(job.order.total_steps) for row in job.order.rows(step)}
    accounts = job.order.accounts(0, job.supervised)
    assert (accounts.tokens_in, accounts.dropped) == (210, 0)
    assert len(run(job, tmp_path).rates) == job.order.total_steps
