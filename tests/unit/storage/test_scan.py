"""One pass over a file finds its checksums and every value that is no number."""

import hashlib

import pytest
import torch
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

from eagle3_core.storage import scan as module
from eagle3_core.storage.scan import first_not_finite, scan

DTYPES = {"F64": torch.float64, "F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
EIGHT_BITS = {"F8_E5M2": torch.float8_e5m2, "F8_E4M3": torch.float8_e4m3fn}


def raw(tensor):
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.integers(0, 2**32), st.lists(st.tuples(st.integers(0, 99), st.sampled_from(["nan", "inf", "-inf"]))))
def test_the_first_value_that_is_not_finite_is_found_among_all_bit_patterns(dtype, seed, planted):
    bits = {"F64": torch.int64, "F32": torch.int32, "BF16": torch.int16, "F16": torch.int16}[dtype]
    limits = torch.iinfo(bits)
    some = torch.randint(limits.min, limits.max, (100,), dtype=bits, generator=torch.Generator().manual_seed(seed))
    values = some.view(DTYPES[dtype])
    for place, value in planted:
        values[place] = float(value)
    wrong = (~torch.isfinite(values)).nonzero().flatten().tolist()
    expected = wrong[0] * values.element_size() if wrong else None
    assert first_not_finite(raw(values), dtype) == expected


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_finite_values_are_no_fault(dtype):
    limits = torch.finfo(DTYPES[dtype])
    assert (
        first_not_finite(raw(torch.tensor([limits.max, limits.min, limits.tiny, 0.0], dtype=DTYPES[dtype])), dtype)
        is None
    )


@pytest.mark.parametrize("dtype", EIGHT_BITS)
def test_every_8_bit_number_is_judged_as_torch_does(dtype):
    bits = torch.arange(256, dtype=torch.uint8)
    finite = torch.isfinite(bits.view(EIGHT_BITS[dtype]).float())
    assert [first_not_finite(bytes([pattern]), dtype) is None for pattern in range(256)] == finite.tolist()
    assert first_not_finite(raw(bits[finite]), dtype) is None
    assert first_not_finite(raw(bits), dtype) == finite.tolist().index(False)


def test_integers_are_always_finite():
    assert first_not_finite(b"\xff" * 64, "I32") is None
    assert first_not_finite(b"", "F32") is None


def test_a_scan_has_the_checksum_of_the_file_and_of_every_part_of_every_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "_CHUNK", 64)
    tensors = {"a": torch.arange(300).float().reshape(100, 3), "b": torch.arange(7, dtype=torch.uint8)}
    tensors["c"] = torch.zeros(50, 4, dtype=torch.bfloat16)
    tensors["c"][41, 2] = float("inf")
    path = tmp_path / "x.safetensors"
    save_file(tensors, path)
    seen = []
    found = scan(path, {"a": [0, 30, 70], "b": [5], "c": [999]}, seen.append)
    assert sum(seen) == path.stat().st_size
    assert found.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    a, b, c = tensors.values()
    parts = {"a": [a[:0], a[:30], a[30:]], "b": [b[:5], b[5:]], "c": [c]}
    assert found.checksums == {
        name: tuple(xxhash.xxh3_64_hexdigest(raw(part)) for part in those) for name, those in parts.items()
    }
    assert found.not_finite == {"c": 41}
