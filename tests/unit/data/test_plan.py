"""Samples are cut into shards in order, within bounds, the same way every time."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.data.plan import cut

LENGTHS = st.lists(st.integers(2, 500), min_size=1, max_size=200)


@given(LENGTHS, st.integers(256, 2000), st.integers(1, 50))
def test_every_sample_is_in_one_shard_and_there_are_not_too_many(lengths, shard_tokens, most):
    shards = cut(lengths, shard_tokens, most)
    assert [position for shard in shards for position in shard] == list(range(len(lengths)))
    assert 1 <= len(shards) <= most
    assert all(len(shard) > 0 for shard in shards)
    assert cut(lengths, shard_tokens, most) == shards


@given(LENGTHS, st.integers(500, 2000))
def test_no_shard_is_larger_than_asked_where_the_number_allows(lengths, shard_tokens):
    shards = cut(lengths, shard_tokens, 1024)
    assert all(sum(lengths[position] for position in shard) <= shard_tokens for shard in shards)


def test_a_sample_longer_than_a_shard_has_one_of_its_own():
    assert cut([10, 300, 10], 256, 1024) == [range(0, 1), range(1, 2), range(2, 3)]


def test_five_terabytes_are_at_most_1024_tasks():
    assert len(cut([2353] * 37_312, 65_536, 1024)) <= 1024


@pytest.mark.parametrize("shards", [1500, 5000])
def test_a10_more_shards_than_airflow_maps_become_fewer_and_larger_ones_the_same_way_every_time(shards):
    lengths = [100 + 37 * number % 900 for number in range(shards * 3)]
    bound = sum(lengths) // shards
    assert len(cut(lengths, bound, 10**6)) >= shards
    found = cut(lengths, bound, 1024)
    assert len(found) <= 1024
    assert found == cut(lengths, bound, 1024)
    sizes = [sum(lengths[position] for position in shard) for shard in found]
    assert max(sizes) < 1.5 * sum(lengths) / 1024
