"""The draft vocabulary: its invariants hold for any counts, and offsets are never taken for ids."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from eagle3_core.errors import ConfigError, CorruptArtifactError
from eagle3_core.vocab import VocabMap, choose, sufficient_size

V = 64
COUNTS = st.dictionaries(st.integers(0, V - 1), st.integers(1, 1000), max_size=V)
REQUIRED = st.sets(st.integers(0, V - 1), max_size=8)
SIZES = st.integers(8, V)


@given(COUNTS, REQUIRED, SIZES)
def test_offsets_lead_to_distinct_rising_ids_that_the_mask_marks(counts, required, size):
    vocab = choose(counts, required, size, V)
    targets = [draft + offset for draft, offset in enumerate(vocab.d2t)]
    assert targets == sorted(set(targets)) == list(vocab.target_ids)
    assert len(vocab.d2t) == sum(vocab.t2d) == size
    assert all(vocab.t2d[target] for target in targets)
    assert len(vocab.t2d) == V
    assert required <= set(targets)


@given(COUNTS, REQUIRED, SIZES)
def test_stored_offsets_and_mask_give_the_same_map_back(counts, required, size):
    vocab = choose(counts, required, size, V)
    assert VocabMap.from_offsets(vocab.d2t, vocab.t2d) == vocab


@given(COUNTS, REQUIRED, SIZES)
def test_no_token_left_out_is_more_frequent_than_one_let_in(counts, required, size):
    vocab = choose(counts, required, size, V)
    chosen = set(vocab.target_ids)
    least = min((counts.get(token, 0) for token in chosen - required), default=None)
    if least is not None:
        assert all(counts.get(token, 0) <= least for token in set(range(V)) - chosen)


@given(COUNTS, REQUIRED, st.floats(0.01, 1))
def test_the_size_said_to_suffice_suffices_and_one_less_does_not(counts, required, share):
    held_out = {token: count for token, count in counts.items() if token % 2} or {1: 1}
    size = sufficient_size(counts, held_out, required, V, share)
    if size >= max(len(required), 1):
        assert choose(counts, required, size, V).coverage(held_out) >= share * (1 - 1e-12)
    if size > max(len(required), 1):
        assert choose(counts, required, size - 1, V).coverage(held_out) < share


def test_ties_go_to_the_lower_id_and_unseen_tokens_fill_up():
    assert choose({5: 2, 3: 2, 9: 7}, {60}, 3, V).target_ids == (3, 9, 60)
    assert choose({5: 2}, (), 4, V).target_ids == (0, 1, 2, 5)


def test_a_draft_vocabulary_larger_than_the_targets_is_refused():
    with pytest.raises(ConfigError, match=r"at most the target's 64 tokens, found 65"):
        choose({1: 1}, (), 65, V)


def test_specials_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="room for 5 special tokens, found 4"):
        choose({1: 1}, range(5), 4, V)


def test_special_ids_outside_the_target_are_refused():
    with pytest.raises(ConfigError, match="ids below 64, found 64"):
        choose({1: 1}, {64}, 4, V)


def test_absolute_ids_are_not_taken_for_offsets():
    vocab = choose({token: 1 for token in range(30, 60)}, (), 20, V)
    with pytest.raises(CorruptArtifactError, match="absolute ids are not offsets"):
        VocabMap.from_offsets(vocab.target_ids, vocab.t2d)


def test_a_mask_of_another_vocabulary_is_refused():
    vocab, other = choose({3: 1}, (), 20, V), choose({63: 1}, (), 20, V)
    with pytest.raises(CorruptArtifactError, match="t2d"):
        VocabMap.from_offsets(vocab.d2t, other.t2d)


def test_coverage_of_nothing_is_an_error_not_zero():
    with pytest.raises(ConfigError, match="expected counted tokens"):
        choose({1: 1}, (), 8, V).coverage({})
