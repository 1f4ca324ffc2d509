"""What a chain should have said, how wrong it was, and how often it was right.

Letters: R chain rows, D width, U draft vocab, V target vocab, K TTT steps. Labels of row r at step k are those of row
r+k at step 0 (see `unroll.Chains`), so the teacher is computed once per row and shifted by views.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.nn import functional

from eagle3_core.model.pointwise import fused

LK_SHARPNESS = 3.0
"""How fast the LK loss turns from imitation to acceptance as the overlap grows."""

AT_ONCE = 2**27
"""Target logits held at a time, half a GiB."""


@dataclass(frozen=True, slots=True)
class Teacher:
    """The target's view of each row's label at step 0."""

    probabilities: torch.Tensor  # [R, U], renormalised over the draft vocab, in the precision of training
    entropy: torch.Tensor  # float32 [R], of `probabilities`
    token: torch.Tensor  # int64 [R], draft id of the target's greedy token, or -1 where it is not in the draft vocab


@dataclass(frozen=True, slots=True)
class TargetHead:
    """The target's head [V, D], the rows of the draft vocab first and in its order."""

    rows: torch.Tensor
    draft_vocab_size: int

    @classmethod
    def of(cls, head: torch.Tensor, draft_to_target: torch.Tensor) -> TargetHead:
        """Put the rows of `draft_to_target`, int64 [U] absolute target ids, before the others."""
        others = torch.ones(len(head), dtype=torch.bool)
        others[draft_to_target] = False
        return cls(torch.cat((head[draft_to_target], head[others])), len(draft_to_target))

    def to(self, device: torch.device, dtype: torch.dtype) -> TargetHead:
        """Return the head on `device`; in `dtype` only if that rounds nothing, as float32 has no tensor cores."""
        lossless = torch.equal(self.rows.to(dtype).float(), self.rows)
        return TargetHead(self.rows.to(device, dtype if lossless else None), self.draft_vocab_size)

    @torch.no_grad()
    def greedy(self, states: torch.Tensor) -> torch.Tensor:
        """Return the draft id of the target's greedy token over the whole vocab, int64 [R], or -1.

        Where two tie, one in the draft vocab is taken. Given one sample at a time, a token does not depend on what
        else is in its row.
        """
        parts = [_product(part, self.rows).argmax(-1) for part in states.split(max(1, AT_ONCE // len(self.rows)))]
        found = torch.cat(parts)
        return torch.where(found < self.draft_vocab_size, found, -1)

    @torch.no_grad()
    def draft_mass(self, states: torch.Tensor) -> torch.Tensor:
        """Return the target's probability of the whole draft vocab at states [R, D], temperature 1, float32 [R]."""
        parts = []
        for part in states.split(max(1, AT_ONCE // len(self.rows))):
            logits = _product(part, self.rows)
            parts.append((logits[:, : self.draft_vocab_size].logsumexp(-1) - logits.logsumexp(-1)).exp())
        return torch.cat(parts)

    @torch.no_grad()
    def teach(self, states: torch.Tensor, token: torch.Tensor, dtype: torch.dtype = torch.float32) -> Teacher:
        """Judge states [R, D] at the labels' own positions, after the target's final norm.

        Args:
            states: The target's last hidden states.
            token: From `greedy`.
            dtype: Of the probabilities.
        """
        rows = self.rows[: self.draft_vocab_size]
        parts = [soften(_product(part, rows), dtype) for part in states.split(max(1, AT_ONCE // len(rows)))]
        probabilities, entropy = (torch.cat(part) for part in zip(*parts, strict=True))
        return Teacher(probabilities, entropy, token)


def _product(states: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """Return float32 logits; half-precision rows multiply states rounded like them, summed in float32."""
    if rows.dtype != torch.float32 and rows.is_cuda:
        return torch.mm(states.to(rows.dtype), rows.T, out_dtype=torch.float32)
    return functional.linear(states.float(), rows.float())


@fused(1)
def soften(logits: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Return probabilities [R, U], rounded to `dtype`, and their entropy."""
    probabilities = logits.softmax(-1).to(dtype)
    return probabilities, torch.special.entr(probabilities.float()).sum(-1)


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
    used = max(len(logits) - step, 0)
    logits, label = logits[:used].float(), teacher.token[step:]
    weight = (supervised[:used] & (label >= 0)).float()
    per_row = divergence(logits, teacher.probabilities[step:].float(), teacher.entropy[step:], kind)
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
