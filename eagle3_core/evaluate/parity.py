"""Does the exported directory behave like the trained drafter? Figures, negative controls and the verdict on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch

from eagle3_core.config.base import Section
from eagle3_core.engine.layers import engine_layer_ids
from eagle3_core.errors import NotSpeculatingError, ParityError
from eagle3_core.evaluate.acceptance import Walk, chain_walk
from eagle3_core.evaluate.reference import LatentReference, Reference
from eagle3_core.identity import TargetShape
from eagle3_core.model.drafter import Eagle3Drafter
from eagle3_core.model.unroll import Chains, unroll

MAX_LOGIT_DIFFERENCE = 1e-3
MIN_ARGMAX_AGREEMENT = 0.999
MAX_TAU_DIFFERENCE = 0.01
MIN_CONTROL_LOSS = 0.10
"""A deliberate mistake must cost more than this share of what the drafter gains, tau - 1: the bonus token of a verify
pass cannot be lost. Else the gate could not see an accidental mistake."""
ORDER, CLEAR_MOVE = "aux layers out of order", 100 * MAX_LOGIT_DIFFERENCE
"""A small drafter may guess as well from layers in another order, by 9 % of its gain in one case: there it is enough
that some is lost and that the logits, of which `MAX_LOGIT_DIFFERENCE` is seen, move by this much."""
MIN_GAIN = 0.1
"""Below this gain there is nothing to lose."""


@dataclass(frozen=True, slots=True)
class HeldOut:
    """One held-out sample of T tokens; the answer is the tokens from `first` to the end."""

    id: str
    input_ids: torch.Tensor  # int64 [T]
    aux_hidden_states: torch.Tensor  # [T, A*D]
    greedy: torch.Tensor  # int64 [T], the target's arg-max after each token, over the full vocab
    first: int

    @property
    def rows(self) -> torch.Tensor:
        """Return the R slots where a verify pass can start: the last known token is any answer token but the last."""
        return torch.arange(self.first - 1, self.input_ids.numel() - 2)

    def labels(self, steps: int) -> torch.Tensor:
        """Return int64 [steps, R], what is right at step k of each row; -1 past the end."""
        padded = torch.cat([self.greedy[:-1], self.greedy.new_full((steps,), -1)])
        return torch.stack([padded[self.rows + 1 + step] for step in range(steps)])


Logits = Callable[[HeldOut, int], torch.Tensor]
"""What yields teacher-forced logits [steps, R, U] of one sample."""


def trained_logits(network: Eagle3Drafter) -> Logits:
    """Return the trained network's own logits, through the unroll it was trained with."""

    def logits(sample: HeldOut, steps: int) -> torch.Tensor:
        length = sample.input_ids.numel()
        chains = Chains.build(torch.arange(length) >= sample.first, [length])
        with torch.no_grad():
            carried = unroll(network, sample.input_ids, sample.aux_hidden_states, chains, steps)
            return torch.stack([network.logits(states) for states in carried])

    return logits


class Parity(Section):
    """The figures; `losses` is the share of the gain, tau - 1, that each negative control cost.

    `moved` is how far the logits move by mistakes that may leave a short answer's tau alone; the comparison of logits
    must see those.
    """

    depth: int
    samples: int
    positions: int
    max_logit_difference: float
    argmax_agreement: float
    tau_export: float
    tau_trainer: float
    losses: dict[str, float]
    moved: dict[str, float]


def compare(
    reference: Reference, trained: Logits, samples: Sequence[HeldOut], depth: int, max_tokens: int | None = None
) -> Parity:
    """Measure everything, with chains of `depth` over at most `max_tokens` tokens of each answer; judge nothing.

    Raises:
        ParityError: there is no sample to compare on.
    """
    if not samples:
        raise ParityError("no held-out sample with an answer of two tokens or more; raise data.held_out_fraction")
    equal, compared = 0, 0
    differences = []
    trained_walks, export_walks = [], []
    for sample in samples:
        right = sample.labels(depth)
        theirs = trained(sample, depth)
        ours = reference.unroll(sample.input_ids, sample.aux_hidden_states, depth, rows=sample.rows)
        known = right >= 0
        differences.append((ours - theirs)[known].abs().max())
        equal += int((ours.argmax(-1) == theirs.argmax(-1))[known].sum())
        compared += int(known.sum())
        trained_walks.append(_walk(reference.proposals(theirs), right, max_tokens))
        export_walks.append(_drafted(reference, sample, depth, max_tokens))
    tau = _tau(export_walks)
    gain = max(tau - 1, torch.finfo(torch.float32).tiny)
    losses: dict[str, float] = {}
    first = samples[0]
    moved = {name: _moved(reference, wrong, first, first, depth) for name, wrong in quiet_controls(reference)}
    for name, wrong, mistake in controls(reference):
        if name == ORDER:
            moved[name] = max(moved.get(name, 0.0), _moved(reference, wrong, first, mistake(first), depth))
        loss = (tau - _tau([_drafted(wrong, mistake(sample), depth, max_tokens) for sample in samples])) / gain
        losses[name] = max(loss, losses.get(name, loss))
    return Parity(
        depth=depth, samples=len(samples), positions=compared, max_logit_difference=_finite(differences),
        argmax_agreement=equal / compared, tau_export=tau, tau_trainer=_tau(trained_walks), losses=losses,
        moved=moved,
    )  # fmt: skip


def controls(reference: Reference) -> Iterator[tuple[str, Reference, Callable[[HeldOut], HeldOut]]]:
    """Yield the usual mistakes on purpose: name, a wrong reference, and what is done to each sample.

    Of several of one name the costliest counts: neighbouring layers resemble each other, so some wrong orders of the
    aux layers cost little.
    """
    head = {**reference.weights, "lm_head.weight": torch.zeros_like(reference.weights["lm_head.weight"])}
    drafts = torch.arange(reference.target_ids.numel())
    width = int(reference.config["hidden_size"])
    yield "lm_head zeroed", replace(reference, weights=head), _unchanged
    yield "d2t absolute", replace(reference, target_ids=reference.target_ids + drafts), _unchanged
    yield "ids shifted by one", reference, _shifted
    layers = int(reference.weights["model.fc.weight"].shape[1]) // width
    straight = tuple(range(layers))
    for order in sorted({straight[::-1], straight[1:] + straight[:1], straight[-1:] + straight[:-1]} - {straight}):
        yield ORDER, reference, partial(_reordered, order=order, width=width)


def quiet_controls(reference: Reference) -> Iterator[tuple[str, Reference]]:
    """Yield mistakes that need not cost acceptance at once: name, and a wrong reference."""
    yield "RoPE standing still", replace(reference, still=True)
    yield "missing norm", replace(reference, without_norm=f"{reference.layer}hidden_norm")
    if isinstance(reference, LatentReference):
        yield (
            "missing norm of the latent",
            replace(reference, without_norm=f"{reference.layer}self_attn.kv_a_layernorm"),
        )
        yield "kv_b read with values first", replace(reference, values_first=True)
        yield "RoPE pairing halves", replace(reference, halves=True)


def require(parity: Parity, validation_tau: float | None = None) -> None:
    """Raise unless the export behaves like the trained drafter and the gate has power.

    `validation_tau` is the trainer's own figure where it was taken on the same samples.

    Raises:
        ParityError: names the first figure out of bounds and the usual causes.
    """
    if not parity.max_logit_difference < MAX_LOGIT_DIFFERENCE:
        raise ParityError(
            f"logits of export and trained drafter differ by up to {parity.max_logit_difference:.3g}, expected below "
            f"{MAX_LOGIT_DIFFERENCE:g}: compare norms, RoPE settings and the order of concatenation"
        )
    if parity.argmax_agreement < MIN_ARGMAX_AGREEMENT:
        raise ParityError(f"export and trained drafter choose the same token at {parity.argmax_agreement:.3%} of "
                          f"{parity.positions} positions, expected {MIN_ARGMAX_AGREEMENT:.1%}")  # fmt: skip
    for name, tau in (("trained drafter", parity.tau_trainer), ("validation of the checkpoint", validation_tau)):
        if tau is not None and abs(parity.tau_export - tau) > MAX_TAU_DIFFERENCE * tau:
            raise ParityError(f"tau at depth {parity.depth}: {parity.tau_export:.4f} from the export, {tau:.4f} from "
                              f"the {name}, expected at most {MAX_TAU_DIFFERENCE:.0%} apart")  # fmt: skip
    for name, moved in parity.moved.items():
        if not moved > MAX_LOGIT_DIFFERENCE:
            raise ParityError(
                f"the gate has no power: with {name} the logits move by {moved:.3g}, expected more than the "
                f"{MAX_LOGIT_DIFFERENCE:g} it looks for; a drafter without use for it is hardly trained, train longer"
            )
    gain = parity.tau_export - 1
    for name, loss in parity.losses.items():
        seen = loss > MIN_CONTROL_LOSS or (name == ORDER and loss > 0 and parity.moved[name] > CLEAR_MOVE)
        if gain < MIN_GAIN or not seen:
            raise ParityError(
                f"the gate has no power: with {name} tau {parity.tau_export:.3f} loses {loss:.1%} of its gain of "
                f"{gain:.3f}, expected more than {MIN_CONTROL_LOSS:.0%} of at least {MIN_GAIN:g}; a drafter this weak "
                "cannot be told from a broken one, train it longer"
            )


def _moved(reference: Reference, wrong: Reference, sample: HeldOut, seen: HeldOut, depth: int) -> float:
    """Return the largest difference a mistake makes to the logits of one sample, which the wrong one sees as `seen`."""
    first, second = (one.unroll(it.input_ids, it.aux_hidden_states, depth, rows=it.rows)
                     for one, it in ((reference, sample), (wrong, seen)))  # fmt: skip
    return float((first - second)[sample.labels(depth) >= 0].abs().max())


def require_layer_ids(reference: Reference, captured: Sequence[int], target: TargetShape) -> None:
    """Raise unless the exported config makes SGLang capture the layers whose states the drafter was trained on.

    Raises:
        ParityError: it would capture others; logits on captured states cannot show it.
    """
    found = reference.config["eagle_config"]["eagle_aux_hidden_state_layer_ids"]
    wanted = engine_layer_ids(captured, target.model_class, target.num_layers)
    if list(found) != list(wanted):
        raise ParityError(
            f"layer ids of the exported config: expected {list(wanted)}, by which SGLang means the captured outputs "
            f"{list(captured)} of {target.model_class}, found {list(found)}; export again"
        )


def _finite(differences: Sequence[torch.Tensor]) -> float:
    largest = float(torch.stack(list(differences)).max())
    if not math.isfinite(largest):
        raise ParityError("export or trained drafter yields NaN or infinite logits; look at the training curve")
    return largest


def _unchanged(sample: HeldOut) -> HeldOut:
    return sample


def _reordered(sample: HeldOut, order: Sequence[int], width: int) -> HeldOut:
    blocks = sample.aux_hidden_states.split(width, dim=1)
    return replace(sample, aux_hidden_states=torch.cat([blocks[layer] for layer in order], dim=1))


def _shifted(sample: HeldOut) -> HeldOut:
    return replace(sample, input_ids=torch.cat([sample.input_ids[:1], sample.input_ids[:-1]]))


def _drafted(reference: Reference, sample: HeldOut, depth: int, max_tokens: int | None) -> Walk:
    """Replay a server on one sample: draft from true states and own proposals, accept while they are right."""
    logits = reference.unroll(sample.input_ids, sample.aux_hidden_states, depth, rows=sample.rows, drafting=True)
    return _walk(reference.proposals(logits), sample.labels(depth), max_tokens)


def _walk(proposed: torch.Tensor, right: torch.Tensor, max_tokens: int | None) -> Walk:
    accepted = (proposed == right).long().cumprod(0).sum(0)
    return chain_walk([*accepted.tolist(), 0], len(right), max_tokens)


def _tau(walks: Sequence[Walk]) -> float:
    try:
        return Walk.pool(walks).accept_length
    except NotSpeculatingError:
        raise ParityError("every held-out answer has one token, nothing can be drafted; use longer answers") from None
