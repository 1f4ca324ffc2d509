"""How hidden states are stored: which rows a loss can read, and what 8 bits lose."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from eagle3_core.data.encoding import Encoding, dequantise, label_rows, num_label_rows, quantise
from eagle3_core.estimate import feature_bytes_per_token
from eagle3_core.model.unroll import Chains


@settings(deadline=None)
@given(st.lists(st.booleans(), min_size=2, max_size=24), st.integers(1, 8))
def test_label_rows_are_exactly_those_a_teacher_is_asked_about(mask, steps):
    loss_mask = torch.tensor(mask)
    chains = Chains.build(loss_mask, [len(mask)])
    read = {int(row) + 1 + step for step in range(steps) for row in chains.rows[chains.supervised(step)]}
    assert label_rows(loss_mask).tolist() == sorted(read | {int(row) + 1 for row in chains.rows})


def test_d1_of_5_prompt_and_3_answer_tokens_the_first_chain_starts_at_the_last_prompt_token_and_none_at_the_edge():
    mask = torch.tensor([False] * 5 + [True] * 3)
    chains = Chains.build(mask, [8])
    # A chain at slot t reads token t + 1 and is taught token t + 2, by what the target says at slot t + 1.
    assert chains.rows[chains.supervised(0)].tolist() == [4, 5]
    assert label_rows(mask).tolist() == [5, 6]
    assert mask[[row + 2 for row in (4, 5)]].all()


@given(st.integers(2, 40), st.data())
def test_their_number_follows_from_the_length_of_the_answer(length, data):
    supervised = data.draw(st.integers(1, length))
    mask = torch.arange(length) >= length - supervised
    assert num_label_rows(length, supervised) == len(label_rows(mask))


@given(st.integers(1, 5), st.integers(1, 3), st.floats(-12, 12), st.integers(0, 10**6))
def test_8_bits_keep_every_value_to_a_sixteenth_or_to_a_millionth_of_its_row_and_layer(rows, layers, exponent, seed):
    values = torch.randn(rows, layers * 32, generator=torch.Generator().manual_seed(seed)) * 10**exponent
    values[:, 0] *= 1000
    values[0, :32] = 0
    stored, scales = quantise(values, layers)
    assert (stored.dtype, scales.dtype, scales.shape) == (torch.float8_e4m3fn, torch.float32, (rows, layers))
    largest = values.unflatten(1, (layers, -1)).abs().amax(-1, keepdim=True).expand(-1, -1, 32).flatten(1)
    error = (dequantise(stored, scales) - values).abs()
    assert bool((error <= torch.maximum(values.abs() / 16, largest * 2**-10 / 448 * 1.001)).all())


def test_rows_of_zeros_and_of_the_least_floats_come_back():
    values = torch.tensor([[0.0, 0.0], [8e-43, -6e-43], [3e-35, 1e-35]])
    stored, scales = quantise(values, 1)
    assert bool((values.abs() <= 448 * scales).all())
    torch.testing.assert_close(dequantise(stored, scales), values, rtol=1 / 16, atol=1e-42)


def test_every_8_bit_value_comes_back_as_pytorch_reads_it():
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[torch.isfinite(codes.float())][:, None]
    assert len(codes) == 254
    assert torch.equal(dequantise(codes, torch.full((254, 1), 3.0)), codes.float() * 3)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
def test_8_bits_do_not_hide_a_value_that_is_not_finite(bad):
    values = torch.zeros(2, 8)
    values[1, 5] = bad
    _, scales = quantise(values, 2)
    assert torch.isfinite(scales).tolist() == [[True, True], [True, False]]


@pytest.mark.parametrize("fp8", ["none", "aux", "all"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_estimate_is_what_a_set_takes_whose_every_token_needs_its_last_state(dtype, fp8):
    encoding = Encoding(dtype=dtype, fp8=fp8, last_rows="all", num_aux=3, hidden_size=64)
    assert encoding.bytes(1000, 0) == 1000 * feature_bytes_per_token(64, 3, dtype, fp8)


def test_the_options_reach_52_percent_of_bfloat16_where_65_percent_are_supervised():
    size, supervised = 4096, 650
    taken = {
        fp8: Encoding(dtype="bfloat16", fp8=fp8, last_rows="labels", num_aux=3, hidden_size=size).bytes(
            1000, supervised
        )
        / (1000 * 8 * size)
        for fp8 in ("none", "aux", "all")
    }
    assert {name: round(share, 3) for name, share in taken.items()} == {"none": 0.913, "aux": 0.538, "all": 0.457}
