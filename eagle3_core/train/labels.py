"""The teacher of each batch; what needs the whole vocab is computed once per sample."""

from __future__ import annotations

import torch

from eagle3_core.model.loss import TargetHead, Teacher
from eagle3_core.train.loader import Batch


class Labels:
    """Remembers the target's greedy tokens, four bytes a supervised token, and computes the rest anew.

    Of samples that are measured it also remembers the mass of the draft vocab.
    """

    def __init__(self, head: TargetHead, dtype: torch.dtype) -> None:
        """Teach by `head`, with probabilities in `dtype`."""
        self._head, self._dtype = head, dtype
        self._known: dict[int, torch.Tensor] = {}
        self._masses: dict[int, torch.Tensor] = {}

    def teach(self, batch: Batch) -> Teacher:
        """Return the teacher of the batch's chains."""
        states, parts = _label_states(batch)
        for sample, part in zip(batch.samples, parts, strict=True):
            if sample not in self._known:
                self._known[sample] = self._head.greedy(part).to("cpu", torch.int32)
        token = torch.cat([self._known[sample] for sample in batch.samples])
        return self._head.teach(states, token.to(states.device, torch.int64), self._dtype)

    def draft_mass(self, batch: Batch) -> torch.Tensor:
        """Return the target's probability of the whole draft vocab at the label of each chain, float32 [R]."""
        states, parts = _label_states(batch)
        for sample, part in zip(batch.samples, parts, strict=True):
            if sample not in self._masses:
                self._masses[sample] = self._head.draft_mass(part).cpu()
        return torch.cat([self._masses[sample] for sample in batch.samples]).to(states.device)


def _label_states(batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
    """Return the target's states [R, D] that make the labels of all chains, and those of each sample."""
    states = batch.last_hidden_state.index_select(0, batch.chains.rows + 1)
    return states, states.split(batch.chains.documents.chains)
