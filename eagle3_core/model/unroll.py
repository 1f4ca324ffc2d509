"""The TTT unroll: what the drafter sees at step k, for every k, over packed documents.

Letters: N token rows of all documents in a row, R chain rows (slots where a chain starts), K TTT steps, D width, U
draft vocab, H query heads, G key/value heads, d head width.

Slot t at step k reads token t+1+k and its own carried state, and predicts token t+2+k. It attends to the true history,
which are the step-0 keys of its document up to slot t, and to its own chain, the keys of steps 1..k at slot t: exactly
what a server has in its cache, because it rewrites the keys of accepted tokens from true hidden states.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eagle3_core.model.attention import Document, History, attend
from eagle3_core.model.drafter import Eagle3Drafter


@dataclass(frozen=True, slots=True)
class Chains:
    """Where chains start and how deep each may be trained.

    A chain at slot t is supervised at step k when tokens t+1 ... t+1+k are all answer tokens and token t+2+k is in the
    same document. That set shrinks with k, so a slot outside `rows` never has a loss: only its step-0 key and value
    are needed. For the same reason the inputs and labels of row r at step k are those of row r+k at step 0.
    """

    rows: torch.Tensor  # int64 [R], slots, rising
    depth: torch.Tensor  # int64 [R], supervised steps of the chain, at least 1
    positions: torch.Tensor  # int64 [N], from 0 in every document
    documents: tuple[Document, ...]

    @classmethod
    def build(cls, loss_mask: torch.Tensor, lengths: Sequence[int]) -> Chains:
        """Find the chains of documents of the given lengths, concatenated; `loss_mask` is bool [N]."""
        depths, documents, position, first = [], [], 0, 0
        for length in lengths:
            depth = _supervised_steps(loss_mask[position : position + length])
            slots = depth.nonzero().flatten()
            later = torch.arange(length, device=slots.device)[None, :] > slots[:, None]
            bias = torch.zeros(later.shape, device=slots.device).masked_fill_(later, -math.inf)
            documents.append(Document(position, position + length, first, first + len(slots), bias))
            depths.append(depth)
            position, first = position + length, first + len(slots)
        depth = torch.cat(depths)
        rows = depth.nonzero().flatten()
        starts = torch.cat([torch.arange(length, device=rows.device) for length in lengths])
        return cls(rows, depth[rows], starts, tuple(documents))

    def supervised(self, step: int) -> torch.Tensor:
        """Return bool [R]: the chains with a loss at `step`."""
        return self.depth > step


def _supervised_steps(loss_mask: torch.Tensor) -> torch.Tensor:
    """Return int64 [T]: for how many steps the chain at each slot of one document is supervised."""
    length = len(loss_mask)
    slots = torch.arange(length, device=loss_mask.device)
    # The first token at or after each one that is not an answer token.
    stops = torch.where(loss_mask, length, slots).flip(0).cummin(0).values.flip(0)
    runs = torch.cat((stops[1:], stops.new_full((1,), length))) - slots - 1
    return runs.minimum(length - 2 - slots).clamp(min=0)


def unroll(
    drafter: Eagle3Drafter, input_ids: torch.Tensor, aux_hidden_states: torch.Tensor, chains: Chains, steps: int
) -> Iterator[torch.Tensor]:
    """Yield draft logits [R, U] for steps 0 ... steps-1.

    Inputs are always the true tokens. Rows whose chain is not supervised at a step hold numbers without meaning.

    Args:
        drafter: The network.
        input_ids: int64 [N], target ids.
        aux_hidden_states: [N, A*D].
        chains: From `Chains.build` of the same documents.
        steps: K.
    """
    carried = drafter.fuse(aux_hidden_states)
    embedded = drafter.embed(input_ids).roll(-1, 0)  # slot t reads token t+1
    read = {name: drafter.embedding_part(name, embedded) for name in ("q", "k", "v")}
    rows, normed, rope = chains.rows, drafter.layer.hidden_norm(carried), drafter.rope(chains.positions)
    keys, values = drafter.keys(read["k"], normed, rope), drafter.values(read["v"], normed)
    history, carried = History(keys, values, chains.documents), carried[rows]
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    for step in range(steps):
        normed = drafter.layer.hidden_norm(carried)
        rope = drafter.rope(chains.positions[rows] + step)
        token = (rows + step).clamp(max=len(input_ids) - 1)
        queries = drafter.queries(read["q"][token], normed, rope)
        if step:
            own_keys.append(drafter.keys(read["k"][token], normed, rope))
            own_values.append(drafter.values(read["v"][token], normed))
        carried = drafter.finish(carried, attend(queries, history, own_keys, own_values))
        yield drafter.logits(carried)
