"""The drafter's head and the loss in one: on a GPU no logits, and no gradient of them, outlive a chunk of rows.

R chain rows, D width, U draft vocab. `judge` is what training calls; its plain reading is `drafter.logits` followed by
`loss.judge_step`, and that is what runs on a CPU. `measure` is what validation calls.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.loss import StepJudgement, Teacher, divergence, judge_step
from eagle3_core.model.matrices import add_product

AT_ONCE = 2**28
"""Draft logits held at a time, 8,192 rows of 32,768."""


def judge(
    drafter: Eagle3Drafter, carried: torch.Tensor, teacher: Teacher, supervised: torch.Tensor, step: int,
    weight: float = 1.0, kind: str = "kl",
) -> StepJudgement:  # fmt: skip
    """Judge carried states [R, D] of one TTT step; the loss is `weight` times the sum over supervised rows.

    On a GPU the head's gradient is summed at once: the loss has to enter the total as it is, with no further factor.
    """
    if drafter.matrices is None or not carried.is_cuda:
        judged = judge_step(drafter.logits(carried), teacher, supervised, step, kind)
        return StepJudgement(weight * judged.loss, judged.correct)
    used = max(len(carried) - step, 0)
    label = teacher.token[step:]
    counted = (supervised[:used] & (label >= 0)).float() * weight
    matrices = drafter.matrices
    head = _Head(matrices.weight(["lm_head.weight"]), matrices.gradient("lm_head.weight"), kind)
    states = drafter.norm(carried)[:used]
    fused_head: Callable[..., tuple[torch.Tensor, torch.Tensor]] = _FusedHead.apply
    loss, best = fused_head(states, head, teacher.probabilities[step:], teacher.entropy[step:], counted)
    correct = torch.zeros_like(supervised)
    correct[:used] = supervised[:used] & (best == label)
    return StepJudgement(loss, correct)


@dataclass(frozen=True, slots=True)
class Measured:
    """One TTT step of chain rows [R] without gradients; rows that are not supervised have zeros."""

    divergence: torch.Tensor  # float32 [R], the forward KL; 0 where the draft vocab lacks the target's greedy token
    correct: torch.Tensor  # bool [R], the draft's greedy token is the target's
    likely: torch.Tensor  # float32 [R], the target's probability of the draft's greedy token, at temperature 1


@torch.no_grad()
def measure(
    drafter: Eagle3Drafter, carried: torch.Tensor, teacher: Teacher, mass: torch.Tensor, supervised: torch.Tensor,
    step: int,
) -> Measured:  # fmt: skip
    """Measure carried states [R, D] of one TTT step; `mass` [R] is the target's probability of the draft vocab."""
    used = max(len(carried) - step, 0)
    states, size = drafter.norm(carried[:used]), max(1, AT_ONCE // (4 * drafter.sizes.draft_vocab_size))
    found: list[tuple[torch.Tensor, ...]] = [(mass[:0], teacher.token[:0], mass[:0])]
    for start in range(0, used, size):
        here, labels = slice(start, min(start + size, used)), slice(start + step, min(start + size, used) + step)
        logits = drafter.multiply(states[here], ["lm_head.weight"]).float()
        wanted = teacher.probabilities[labels].float()
        diverged = divergence(logits, wanted, teacher.entropy[labels], "kl")
        best = logits.argmax(-1)
        likely = wanted.gather(-1, best[:, None]).squeeze(-1) * mass[labels]
        found.append((diverged, best, likely))
    diverged, best, likely = (torch.cat(parts) for parts in zip(*found, strict=True))
    counted, label = supervised[:used], teacher.token[step:]
    right = counted & (best == label)

    def every_row(values: torch.Tensor, where: torch.Tensor) -> torch.Tensor:
        # Rows without a label may hold anything, NaN included.
        return torch.cat((values.masked_fill(~where, 0), values.new_zeros(len(carried) - used)))

    return Measured(every_row(diverged, counted & (label >= 0)), every_row(right, counted), every_row(likely, counted))


@dataclass(frozen=True, slots=True)
class _Head:
    weight: torch.Tensor  # [U, D], compute copy
    gradient: torch.Tensor | None  # float32 [U, D]; None where the head is frozen
    kind: str


class _FusedHead(torch.autograd.Function):
    """Product, softmax, divergence, arg-max and all gradients, chunk by chunk, while the logits are at hand."""

    @staticmethod
    def forward(
        ctx: Any, states: torch.Tensor, head: _Head, teacher: torch.Tensor, entropy: torch.Tensor,
        counted: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # fmt: skip
        from eagle3_core.model.divergence_kernel import diverge

        losses, best = torch.empty_like(entropy), torch.empty(len(states), dtype=torch.int64, device=states.device)
        of_states = torch.empty_like(states)
        size = max(1, AT_ONCE // len(head.weight))
        for start in range(0, len(states), size):
            rows = slice(start, start + size)
            logits = states[rows] @ head.weight.T
            diverge(logits, teacher[rows], entropy[rows], counted[rows], losses[rows], best[rows], head.kind)
            torch.mm(logits, head.weight, out=of_states[rows])
            if head.gradient is not None:
                add_product(head.gradient, logits, states[rows])
        ctx.of_states = of_states
        ctx.mark_non_differentiable(best)
        return losses.sum(), best

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[Any, ...]:
        return ctx.of_states, None, None, None, None
