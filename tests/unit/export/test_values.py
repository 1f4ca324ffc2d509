"""Non-finite numbers in bytes, judged against torch over every pattern of 16 bits and over random ones of more."""

import pytest
import torch

from eagle3_core.export.values import non_finite

HALVES = [(torch.bfloat16, "BF16"), (torch.float16, "F16")]
WIDE = [(torch.float32, torch.int32, "F32"), (torch.float64, torch.int64, "F64")]


@pytest.mark.parametrize(("dtype", "name"), HALVES)
def test_every_16_bit_number_is_judged_as_torch_does(dtype, name):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    finite = torch.isfinite(bits.view(dtype)).tolist()
    for pattern, good in zip(bits.tolist(), finite, strict=True):
        assert non_finite(name, pattern.to_bytes(2, "little", signed=True)) is not good


@pytest.mark.parametrize(("dtype", "name"), HALVES)
def test_the_finite_ones_together_are_finite(dtype, name):
    bits = torch.arange(-(2**15), 2**15).to(torch.int16)
    finite = bits[torch.isfinite(bits.view(dtype))]
    assert not non_finite(name, finite.numpy().tobytes())


@pytest.mark.parametrize(("dtype", "whole", "name"), WIDE)
def test_wide_numbers_are_judged_as_torch_does(dtype, whole, name):
    limits = torch.finfo(dtype)
    plain = torch.tensor([0.0, -0.0, limits.max, limits.min, limits.tiny, limits.smallest_normal / 8, 1.0], dtype=dtype)
    assert not non_finite(name, plain.numpy().tobytes())
    for bad in (float("nan"), float("inf"), -float("inf")):
        for place in range(len(plain) + 1):
            spoilt = torch.cat([plain[:place], torch.tensor([bad], dtype=dtype), plain[place:]])
            assert non_finite(name, spoilt.numpy().tobytes())
    least = torch.tensor([float("inf")], dtype=dtype).view(whole)
    assert not non_finite(name, (least - 1).numpy().tobytes())
    assert non_finite(name, (least + 1).numpy().tobytes())


@pytest.mark.parametrize(("dtype", "name"), [(torch.float8_e4m3fn, "F8_E4M3"), (torch.float8_e5m2, "F8_E5M2")])
def test_every_8_bit_number_is_judged_as_torch_does(dtype, name):
    bits = torch.arange(256).to(torch.uint8)
    finite = torch.isfinite(bits.view(dtype).float()).tolist()
    assert [not non_finite(name, bytes([pattern])) for pattern in range(256)] == finite
