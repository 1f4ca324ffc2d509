"""Look at the bytes of the two vocabulary maps without any library."""

from __future__ import annotations

import array
import itertools
import sys

from eagle3_core.errors import ExportError


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
