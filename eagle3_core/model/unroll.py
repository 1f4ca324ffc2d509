"""The TTT unroll: what the drafter sees at step k, for every k, over packed documents.

Letters: N token rows of all documents in a row, R chain rows (slots where a chain starts), K TTT steps, D width, U
draft vocab, H query heads, G key/value heads, d head width.

Slot t at step k reads token t+1+k and its own carried state, and predicts token t+2+k. It attends to the true history,
which are the step-0 keys of its document up to slot t, and to its own chain, the keys of steps 1..k at slot t: exactly
what a server has in its cache, because it rewrites the keys of accepted tokens from true hidden states.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from eagle3_core.model.attention import Documents, History, attend
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.pointwise import pick


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
    documents: Documents

    @classmethod
    def build(cls, loss_mask: torch.Tensor, lengths: Sequence[int]) -> Chains:
        """Find the chains of documents of the given lengths, concatenated; `loss_mask` is bool [N], on the CPU."""
        parts = loss_mask.split(list(lengths))
        depths = [_supervised_steps(part) for part in parts]
        depth, counts = torch.cat(depths), tuple(int((part > 0).sum()) for part in depths)
        rows = depth.nonzero().flatten()
        starts = torch.cat([torch.arange(length, device=rows.device) for length in lengths])
        return cls(rows, depth[rows], starts, Documents.of(lengths, counts, rows))

    def to(self, device: torch.device) -> Chains:
        """Return the same on a device."""
        documents = self.documents.to(device)
        return Chains(documents.rows, self.depth.to(device), self.positions.to(device), documents)

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
    """Yield carried states [R, D] after steps 0 ... steps-1; `drafter.logits` reads them.

    Inputs are always the true tokens. Rows whose chain is not supervised at a step hold numbers without meaning.

    Args:
        drafter: The network.
        input_ids: int64 [N], target ids.
        aux_hidden_states: [N, A*D].
        chains: From `Chains.build` of the same documents.
        steps: K.
    """
    carried = drafter.fuse(aux_hidden_states)
    read = drafter.read(drafter.embed(input_ids.roll(-1)))  # slot t reads token t+1
    rows, normed, rope = chains.rows, drafter.layer.hidden_norm(carried), drafter.rope(chains.positions)
    shared = drafter.heads("kv", read, normed, rope)
    history, carried = History(shared["k"], shared["v"], chains.documents), pick(carried, rows)
    own_keys: list[torch.Tensor] = []
    own_values: list[torch.Tensor] = []
    for step in range(steps):
        normed = drafter.layer.hidden_norm(carried)
        rope = drafter.rope(chains.positions[rows] + step)
        token = (rows + step) % len(input_ids)  # past the end there is no label, and no two rows read the same
        wanted = "qkv" if step else "q"
        seen = {name: pick(read[name], token) for name in drafter.layer.self_attn.first(wanted)}
        heads = drafter.heads(wanted, seen, normed, rope)
        if step:
            own_keys.append(heads["k"])
            own_values.append(heads["v"])
        carried = drafter.finish(carried, attend(heads["q"], history, own_keys, own_values))
        yield carried
