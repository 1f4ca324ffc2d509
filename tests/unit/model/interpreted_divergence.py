"""Compare the loss kernel with the plain loss and autograd; test_divergence_kernel runs it with TRITON_INTERPRET=1."""

from __future__ import annotations

import torch

from eagle3_core.model import divergence_kernel
from eagle3_core.model.loss import divergence

ROWS, WIDTH = 5, 37


def compare(kind: str) -> None:
    generator = torch.Generator().manual_seed(3)
    logits = 3 * torch.randn(ROWS, WIDTH, generator=generator)
    teacher = (4 * torch.randn(ROWS, WIDTH, generator=generator)).softmax(-1)
    teacher[3, 5:] = 0  # mass below one, as after rounding
    entropy = torch.special.entr(teacher).sum(-1)
    counted = torch.tensor([1.0, 0.25, 0.0, 0.5, 1.0])
    leaf = logits.clone().requires_grad_()
    expected = divergence(leaf, teacher, entropy, kind) * counted
    (slope,) = torch.autograd.grad(expected.sum(), leaf)
    logits[2] = float("nan")  # a row that does not count may hold anything
    losses, best = torch.empty(ROWS), torch.empty(ROWS, dtype=torch.int64)
    divergence_kernel.diverge(logits, teacher, entropy, counted, losses, best, kind)
    torch.testing.assert_close(losses, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, slope, atol=1e-6, rtol=1e-5)
    rows = counted > 0
    assert torch.equal(best[rows], leaf.argmax(-1)[rows])


if __name__ == "__main__":
    divergence_kernel.BLOCK = 16  # several blocks a row
    compare("kl")
    compare("lk")
    print("compared")
