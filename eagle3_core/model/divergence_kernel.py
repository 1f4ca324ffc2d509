"""`loss.divergence`, its gradient and the arg-max, one row of logits per program, in place.

The logits, R rows of U, are replaced by the gradient of the counted loss with respect to them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from eagle3_core.model.loss import LK_SHARPNESS

BLOCK = 4096


def diverge(
    logits: torch.Tensor, teacher: torch.Tensor, entropy: torch.Tensor, counted: torch.Tensor, losses: torch.Tensor,
    best: torch.Tensor, kind: str,
) -> None:  # fmt: skip
    """Write each row's loss times `counted` and its arg-max, and turn `logits` into that loss's gradient.

    Args:
        logits: [R, U], contiguous rows; overwritten.
        teacher: [R, U], probabilities.
        entropy: float32 [R], theirs.
        counted: float32 [R], factor of each row's loss; a row with 0 may hold anything.
        losses: float32 [R], written.
        best: int64 [R], written.
        kind: "kl" or "lk".
    """
    rows, width = logits.shape
    if rows:
        _diverge[(rows,)](
            logits, teacher, entropy, counted, losses, best, width, logits.stride(0), teacher.stride(0),
            LK=kind == "lk", SHARPNESS=LK_SHARPNESS, BLOCK=min(BLOCK, triton.next_power_of_2(width)), num_warps=8,
        )  # fmt: skip


@triton.jit
def _load(logits, teacher, at, width):  # type: ignore[no-untyped-def] # noqa: ANN001, ANN202
    z = tl.load(logits + at, mask=at < width, other=float("-inf")).to(tl.float32)
    return z, tl.load(teacher + at, mask=at < width, other=0.0).to(tl.float32)


@triton.jit  # type: ignore[untyped-decorator]
def _diverge(  # type: ignore[no-untyped-def] # noqa: ANN202, PLR0913 - Triton reads this signature, and no annotation
    logits, teacher, entropy, counted, losses, best, width, logits_stride, teacher_stride,  # noqa: ANN001
    LK: tl.constexpr, SHARPNESS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    logits += row * logits_stride
    teacher += row * teacher_stride
    lanes = tl.arange(0, BLOCK)
    top = float("-inf")
    where = 0
    total = 0.0
    mass = 0.0
    cross = 0.0
    for start in range(0, width, BLOCK):
        at = start + lanes
        z, p = _load(logits, teacher, at, width)
        highest, index = tl.max(z, 0, return_indices=True)
        where = tl.where(highest > top, start + index, where)
        higher = tl.maximum(top, highest)
        total = total * tl.exp(top - higher) + tl.sum(tl.exp(z - higher), 0)
        top = higher
        mass += tl.sum(p, 0)
        cross += tl.sum(tl.where(p > 0, p * z, 0.0), 0)
    whole = top + tl.log(total)
    loss = mass * whole - cross - tl.load(entropy + row)
    imitate = 1.0
    below = 0.0
    if LK:
        overlap = 0.0
        for start in range(0, width, BLOCK):
            at = start + lanes
            z, p = _load(logits, teacher, at, width)
            q = tl.exp(z - whole)
            overlap += tl.sum(tl.minimum(p, q), 0)
            below += tl.sum(tl.where(q < p, q, 0.0), 0)
        imitate = tl.exp(-SHARPNESS * overlap)
        loss = imitate * loss + (1 - imitate) * (1 - overlap)
    weight = tl.load(counted + row)
    tl.store(losses + row, tl.where(weight > 0, weight * loss, 0.0))
    tl.store(best + row, where)
    for start in range(0, width, BLOCK):
        at = start + lanes
        z, p = _load(logits, teacher, at, width)
        q = tl.exp(z - whole)
        slope = mass * q - p
        if LK:
            slope = imitate * slope - (1 - imitate) * q * (tl.where(q < p, 1.0, 0.0) - below)
        slope = tl.where(weight > 0, weight * slope, 0.0)
        tl.store(logits + at, slope.to(logits.dtype.element_ty), mask=at < width)
