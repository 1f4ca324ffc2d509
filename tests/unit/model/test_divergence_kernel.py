"""The GPU's loss kernel, run by Triton's interpreter, against the plain reading and autograd."""

from __future__ import annotations

import importlib
import sys

import pytest
import torch

from eagle3_core.model.loss import divergence

ROWS, WIDTH = 5, 37


@pytest.fixture
def kernel(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.delitem(sys.modules, "eagle3_core.model.divergence_kernel", raising=False)
    module = importlib.import_module("eagle3_core.model.divergence_kernel")
    monkeypatch.setattr(module, "BLOCK", 16)
    yield module
    sys.modules.pop("eagle3_core.model.divergence_kernel")


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numpy on rows and lanes that do not count
@pytest.mark.parametrize("kind", ["kl", "lk"])
def test_loss_gradient_and_greedy_token_are_those_of_the_plain_reading(kernel, kind):
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
    kernel.diverge(logits, teacher, entropy, counted, losses, best, kind)
    torch.testing.assert_close(losses, expected.detach(), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(logits, slope, atol=1e-6, rtol=1e-5)
    rows = counted > 0
    assert torch.equal(best[rows], leaf.argmax(-1)[rows])
