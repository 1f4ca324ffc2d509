"""Look at the bytes of tensors without any library: non-finite numbers, and the two vocabulary maps."""

from __future__ import annotations

import array
import itertools
import sys
from collections.abc import Callable

from eagle3_core.errors import ExportError

CHUNK = 4 << 20
"""Bytes read at a time; a multiple of every element's size."""


def _table(matches: Callable[[int], bool]) -> bytes:
    return bytes(1 if matches(byte) else 0 for byte in range(256))


_EIGHT_ONES = _table(lambda byte: byte & 0x7F == 0x7F)  # sign and 7 bits of an exponent
_TOP_BIT = _table(lambda byte: byte >= 0x80)
_FIVE_ONES = _table(lambda byte: byte & 0x7C == 0x7C)
_NIBBLE = _table(lambda byte: byte >= 0xF0)
_NON_FINITE: dict[str, tuple[int, tuple[tuple[int, bytes], ...]]] = {
    "BF16": (2, ((1, _EIGHT_ONES), (0, _TOP_BIT))),
    "F32": (4, ((3, _EIGHT_ONES), (2, _TOP_BIT))),
    "F64": (8, ((7, _EIGHT_ONES), (6, _NIBBLE))),
    "F16": (2, ((1, _FIVE_ONES),)),
    "F8_E5M2": (1, ((0, _FIVE_ONES),)),
    "F8_E4M3": (1, ((0, _EIGHT_ONES),)),
}
"""Element size, and which bytes of an element (little-endian) say that its exponent is all ones."""
FLOATS = frozenset(_NON_FINITE)


def non_finite(dtype: str, data: bytes) -> bool:
    """Tell whether whole elements `data` of a floating dtype hold NaN or infinity."""
    size, tests = _NON_FINITE[dtype]
    marks = [data[offset::size].translate(table) for offset, table in tests]
    if any(1 not in mark for mark in marks):
        return False
    # Elements in which all tests hold: both marks are 0/1 bytes, so they can be and-ed as two large numbers.
    together = int.from_bytes(marks[0], "little")
    for mark in marks[1:]:
        together &= int.from_bytes(mark, "little")
    return together != 0


def int64s(data: bytes) -> array.array[int]:
    """Return little-endian int64 values."""
    values = array.array("q", data)
    if sys.byteorder == "big":
        values.byteswap()
    return values


def packed(values: list[int]) -> bytes:
    """Return int64 values as little-endian bytes."""
    data = array.array("q", values)
    if sys.byteorder == "big":
        data.byteswap()
    return data.tobytes()


def draft_targets(d2t: bytes, vocab_size: int, where: str, *, ours: bool) -> list[int]:
    """Return the target id of each draft id, given offsets and no t2d to compare them with.

    `ours` says that we wrote them and compared them then.

    Raises:
        ExportError: these are not offsets to rising target ids, or could as well be absolute ids.
    """
    offsets = list(int64s(d2t))
    targets = [draft + offset for draft, offset in enumerate(offsets)]
    if _rising(targets) and targets and targets[0] >= 0 and targets[-1] < vocab_size:
        # Offsets rise at every step only where no two neighbours of the target's vocabulary were chosen.
        if ours or len(offsets) < 2 or not _rising(offsets):
            return targets
        raise ExportError(f"{where}: d2t: expected offsets, found {_some(offsets)}, which could be absolute ids too; "
                          "add t2d, or subtract 0, 1, 2, ... if they are")  # fmt: skip
    raise ExportError(
        f"{where}: d2t: expected offsets, so that draft id + d2t gives rising target ids below {vocab_size}, found "
        f"{_some(offsets)}; {_advice(offsets)}"
    )


def check_maps(d2t: bytes, t2d: bytes, where: str) -> None:
    """Check that d2t (int64 [U]) and t2d (bool [V]) describe the same draft vocabulary.

    Raises:
        ExportError: draft ids plus offsets are not exactly the flagged target ids in order.
    """
    flagged = [target for target, flag in enumerate(t2d) if flag]
    offsets = list(int64s(d2t))
    if [draft + offset for draft, offset in enumerate(offsets)] != flagged:
        raise ExportError(
            f"{where}: d2t and t2d disagree: expected draft id + d2t to be the {len(flagged)} target ids flagged in "
            f"t2d, {_some(flagged)}, found d2t {_some(offsets)}; {_advice(offsets)}"
        )


def _rising(ids: list[int]) -> bool:
    return all(low < high for low, high in itertools.pairwise(ids))


def _advice(offsets: list[int]) -> str:
    if _rising(offsets) and offsets != list(range(len(offsets))):
        return "these look like absolute ids, and offsets are expected: subtract 0, 1, 2, ... from them"
    return "take both from the training's own vocabulary map"


def _some(ids: list[int]) -> str:
    return f"{ids[:4]}{'...' if len(ids) > 4 else ''}"
