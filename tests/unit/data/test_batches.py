from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.data.batches import Packing, TrainOrder, pack, plan_epoch, share
from eagle3_core.data.order import epoch_order
from eagle3_core.errors import InputError

LENGTHS = st.lists(st.integers(1, 300), min_size=1, max_size=120)


@given(LENGTHS, st.integers(64, 256), st.integers(64, 1024), st.integers(0, 9), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_sample_is_in_exactly_one_row_of_one_step_of_an_epoch(lengths, row_tokens, batch_tokens, seed, epoch):
    steps = plan_epoch(lengths, range(len(lengths)), Packing(row_tokens, batch_tokens), seed, epoch)
    placed = [sample for step in steps for row in step for sample in row]
    assert sorted(placed) == list(range(len(lengths)))
    limit = min(row_tokens, batch_tokens)
    for step in steps:
        sizes = [sum(lengths[sample] for sample in row) for row in step]
        assert all(size <= limit or len(row) == 1 for size, row in zip(sizes, step, strict=True))
        assert sum(sizes) <= batch_tokens or len(step) == 1


@given(LENGTHS, st.integers(1, 5), st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_ranks_share_a_step_without_loss_or_doubles_whatever_their_number(lengths, world, seed):
    for step in plan_epoch(lengths, range(len(lengths)), Packing(256, 1024), seed, 0):
        shared = [row for rank in range(world) for row in share(step, lengths, rank, world)]
        assert sorted(shared) == sorted(step)


def test_the_order_depends_on_seed_and_epoch_alone():
    samples = list(range(50))
    assert epoch_order(samples, 1, 2) == epoch_order(samples, 1, 2)
    assert epoch_order(samples, 1, 2) != epoch_order(samples, 1, 3)
    assert epoch_order(samples, 1, 2) != epoch_order(samples, 2, 2)
    assert sorted(epoch_order(samples, 1, 2)) == samples


def test_lognormal_lengths_fill_rows_to_more_than_99_4_percent():
    lengths = np.clip(np.exp(np.random.default_rng(0).normal(7.4, 0.8, 4096)), 32, 8192).astype(int).tolist()
    rows = pack(lengths, range(len(lengths)), 8192)
    assert sum(lengths) / (len(rows) * 8192) > 0.994


def test_accounts_add_up_and_nothing_is_dropped():
    lengths, supervised = [100, 50, 700, 20], [60, 50, 0, 1]
    order = TrainOrder(lengths, [0, 1, 2, 3], Packing(128, 256), seed=0, epochs=1)
    accounts = order.accounts(0, supervised)
    assert (accounts.tokens_in, accounts.trained, accounts.masked, accounts.dropped) == (870, 111, 759, 0)


def test_fractions_of_epochs_and_positions():
    lengths = [100] * 10
    order = TrainOrder(lengths, range(10), Packing(100, 100), seed=0, epochs=2.5)
    assert order.total_steps == 25
    assert [order.position(step) for step in (0, 9, 10, 24)] == [(0, 0), (0, 9), (1, 0), (2, 4)]
    assert order.rows(24) == order.epoch(2)[4]
    assert TrainOrder(lengths, range(10), Packing(100, 100), seed=0, epochs=0.01).total_steps == 1


def test_nothing_to_train_on_is_one_clear_line():
    with pytest.raises(InputError, match="at least one training sample"):
        TrainOrder([], [], Packing(100, 100), seed=0, epochs=1)
