"""Which samples share a prefill is decided by their lengths alone."""

from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.engine.prefills import most_samples, prefills


@given(st.lists(st.integers(1, 400), max_size=60), st.sampled_from([64, 100, 256]), st.sampled_from([1, 16, 64]))
def test_every_sample_is_in_one_prefill_in_order_and_the_engine_can_take_it_whole(lengths, tokens, page):
    groups = prefills(lengths, tokens, page)
    assert [index for group in groups for index in group] == list(range(len(lengths)))
    for group in groups:
        pages = sum(-(-lengths[index] // page) * page for index in group)
        assert len(group) == 1 or (pages <= tokens and len(group) <= most_samples(tokens))


@given(st.lists(st.integers(1, 400), min_size=2, max_size=60))
def test_a_prefill_is_left_only_when_the_next_sample_does_not_fit(lengths):
    for one, following in zip(groups := prefills(lengths, 256), groups[1:], strict=False):
        assert sum(max(16, lengths[index]) for index in (*one, following.start)) > 256


def test_short_samples_share_a_prefill():
    assert prefills([70] * 10, 256) == [range(0, 3), range(3, 6), range(6, 9), range(9, 10)]
    assert prefills([], 256) == []
