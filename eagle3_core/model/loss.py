"""What a chain should have said, how wrong it was, and how often it was right.

Letters: R chain rows, U draft vocab, V target vocab, K TTT steps. Labels of row r at step k are those of row r+k at
step 0 (see `unroll.Chains`), so the teacher is computed once per row and shifted by views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

LK_SHARPNESS = 3.0
"""How fast the LK loss turns from imitation to acceptance as the overlap grows."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's view of each row's label at step 0."""

    probabilities: torch.Tensor  # [R, U], renormalised over the draft vocab
    entropy: torch.Tensor  # [R], of `probabilities`
    token: torch.Tensor  # int64 [R], draft id of the target's greedy token, or -1 where it is not in the draft vocab

    @classmethod
    def judge(cls, last_hidden_state: torch.Tensor, head: torch.Tensor, draft_to_target: torch.Tensor) -> Teacher:
        """Ask the target's head.

        Args:
            last_hidden_state: [R, D] at the label's own position, after the target's final norm.
            head: [V, D], float32, or bfloat16 on a GPU, where the products are then summed in float32 by tensor cores.
            draft_to_target: int64 [U], absolute target ids, rising.
        """
        with torch.no_grad():
            logits = target_logits(last_hidden_state, head)
            greedy = logits.argmax(-1)
            slot = torch.searchsorted(draft_to_target, greedy).clamp(max=len(draft_to_target) - 1)
            token = torch.where(draft_to_target[slot] == greedy, slot, -1)
            log_probabilities = logits[:, draft_to_target].log_softmax(-1)
            probabilities = log_probabilities.exp()
        return cls(probabilities, -(probabilities * log_probabilities).sum(-1), token)


def target_logits(last_hidden_state: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    """Return float32 logits [R, V]; a bfloat16 head multiplies states rounded like it, and nothing else is rounded."""
    if head.dtype == torch.bfloat16 and head.is_cuda:
        return torch.mm(last_hidden_state.to(head.dtype), head.T, out_dtype=torch.float32)
    return functional.linear(last_hidden_state, head.to(last_hidden_state.dtype)).float()


@dataclass(frozen=True, slots=True)
class StepJudgement:
    """One TTT step of all rows that still have a label: the first R-k."""

    loss: torch.Tensor  # scalar: sum over supervised rows, not yet divided by anything
    correct: torch.Tensor  # bool [R], supervised and the draft's greedy token is the target's


def judge_step(
    logits: torch.Tensor, teacher: Teacher, supervised: torch.Tensor, step: int, kind: str = "kl"
) -> StepJudgement:
    """Compare one step's draft logits [R, U] with the teacher; `supervised` is bool [R].

    A row whose greedy token the draft vocab lacks carries no loss and is never correct.
    """
    used = len(logits) - step
    logits, label = logits[:used].float(), teacher.token[step:]
    weight = (supervised[:used] & (label >= 0)).float()
    per_row = divergence(logits, teacher.probabilities[step:], teacher.entropy[step:], kind)
    # Rows without a label may hold anything, NaN included, which a product with 0 would let through.
    loss = torch.where(weight > 0, per_row, 0.0).sum()
    correct = torch.zeros_like(supervised)
    correct[:used] = supervised[:used] & (logits.detach().argmax(-1) == label)
    return StepJudgement(loss, correct)


def divergence(logits: torch.Tensor, teacher: torch.Tensor, entropy: torch.Tensor, kind: str) -> torch.Tensor:
    """Return the loss of each row [R].

    "kl" is the forward KL; "lk" moves from there to 1 - sum(min(p, q)) as that overlap grows.
    """
    kl = functional.cross_entropy(logits, teacher, reduction="none") - entropy
    if kind == "kl":
        return kl
    overlap = torch.minimum(teacher, logits.softmax(-1)).sum(-1)
    imitate = (-LK_SHARPNESS * overlap.detach()).exp()
    return imitate * kl + (1 - imitate) * (1 - overlap)


def step_weights(steps: int, decay: float) -> list[float]:
    """Return decay**k normalised to sum 1, so that the learning rate does not depend on K."""
    raw = [decay**step for step in range(steps)]
    return [weight / sum(raw) for weight in raw]
