# ruff: noqa: T201, TID253 - a program, and a heavy one
"""Served against predicted acceptance: `python benchmarks/sampling.py ROOT evaluate/<digest>/00001 --target DIRECTORY`.

Takes the answers of one committed measurement of a run, and says along each of them how many verify passes SGLang was
to need, by the target's own probabilities (transformers) and the drafter's proposals (the parity gate's reference).
Greedy, a draft token is accepted where it is the target's; sampling, with the target's probability of it, whatever the
drafter's. Prints one JSON line for each point of the sweep: tokens a verify pass as served, as predicted by the rule of
its temperature, their ratio, and what either rule says, that of sampling at temperature 1 for greedy answers.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

import torch

from eagle3_core.artifacts import Kind
from eagle3_core.config import DraftShape
from eagle3_core.data.corpus import read_prompt_set
from eagle3_core.engine.hf import TransformersCapture
from eagle3_core.engine.layers import PART_OF_THE_OUTPUT
from eagle3_core.errors import ArtifactError, Eagle3Error, TargetError
from eagle3_core.evaluate.acceptance import Floats, Walk, expected_passes
from eagle3_core.evaluate.bench.results import BenchRun
from eagle3_core.evaluate.bench.stream import StreamedAnswer
from eagle3_core.evaluate.reference import Reference, TargetEnds
from eagle3_core.export.directory import materialise
from eagle3_core.identity import read_target, target_fingerprint
from eagle3_core.storage import Artifact, ObjectStore, committed_keys, load, open_store

# R rows, each a place where a verify pass can start; K draft steps; V target vocab; D width.


def likely(logits: torch.Tensor, proposed: torch.Tensor, temperature: float) -> Floats:
    """Return [R + 1, K], how likely more than k draft tokens are accepted; nothing is drafted after the last token.

    Args:
        logits: [R, V] of the target after each token of the answer but the last.
        proposed: int64 [K, R], step k's draft token of a pass that starts with that token as the last known one.
        temperature: 0 is greedy.
    """
    steps, rows = proposed.shape
    judge = torch.arange(rows) + torch.arange(steps)[:, None]
    known = judge < rows
    judge = judge.clamp(max=rows - 1)
    if temperature == 0:
        chance = (logits.argmax(-1)[judge] == proposed).double()
    else:
        chance = (logits.double() / temperature).softmax(-1)[judge, proposed]
    accepted = (chance * known).cumprod(0).T
    return torch.cat([accepted, accepted.new_zeros(1, steps)]).numpy()


class Predictor:
    """Target and drafter, and what they say about a served answer."""

    def __init__(self, target: Path, drafter: Artifact, num_steps: int, dtype: str, device: str) -> None:
        """Load both.

        Raises:
            TargetError: it is not the one the drafter was trained for, or its states cannot be had this way.
        """
        found, wanted = target_fingerprint(target).sha256, drafter.manifest.facts["target_sha256"]
        if found != wanted:
            raise TargetError(f"{target}: expected the drafter's target {wanted:.12}, found {found:.12}")
        if (model_class := read_target(target).model_class) in PART_OF_THE_OUTPUT:
            raise TargetError(f"{target}: SGLang hands out other states of {model_class} than transformers")
        self._ends, self._num_steps = TargetEnds.load(target), num_steps
        self._capture = TransformersCapture(target, dtype, drafter.manifest.facts["aux_layers"], device)
        with tempfile.TemporaryDirectory() as directory:
            self._drafter = Reference.load(materialise(drafter, Path(directory) / "drafter"), self._ends)

    def walks(self, prompt: Sequence[int], answer: Sequence[int], temperatures: Sequence[float]) -> list[Walk]:
        """Return the verify passes to expect of an answer of two tokens or more, by the rule of each temperature."""
        (states,) = self._capture.capture([[*prompt, *answer]])
        logits = states.last_hidden_state[len(prompt) : -1].float() @ self._ends.head.T
        rows = torch.arange(len(prompt) - 1, len(prompt) + len(answer) - 2)  # slot t knows token t + 1
        drafts = self._drafter.unroll(states.input_ids, states.aux_hidden_states, self._num_steps, rows=rows)
        chances = (likely(logits, self._drafter.proposals(drafts), temperature) for temperature in temperatures)
        return [Walk(len(answer), expected_passes(chance)[-1]) for chance in chances]


def main() -> None:
    """Parse, predict, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("root", help="where the run's artifacts are")
    parser.add_argument("measurement", help="key of what the stage evaluate wrote for one shape")
    parser.add_argument("--target", type=Path, required=True, help="the target's directory")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16", "float16"))
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    try:
        for line in compare(arguments):
            print(json.dumps(line), flush=True)
    except Eagle3Error as error:
        sys.exit(str(error))


def compare(arguments: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Yield the figures of each point.

    Raises:
        ArtifactError: the measurement is of no chain, or of a server that pretended.
    """
    store = open_store(arguments.root)
    measurement = load(store, arguments.measurement)
    run = BenchRun.parse(measurement.json("sweep.json"), f"{arguments.measurement}/sweep.json")
    shape = None if run.server.shape is None else DraftShape.from_name(run.server.shape)
    if shape is None or shape.topk > 1 or run.plan.ignore_eos:
        raise ArtifactError(
            f"{arguments.measurement}: expected the measurement of a chain that drafts, found {run.server.title}"
            f"{', pretending' * run.plan.ignore_eos}; choose another index"
        )
    prompts = {prompt.id: prompt.input_ids for prompt in read_prompt_set(_input(store, measurement, Kind.PROMPT_SET))}
    drafter = _input(store, measurement, Kind.DRAFTER)
    predictor = Predictor(arguments.target, drafter, shape.num_steps, arguments.dtype, arguments.device)
    for cell in run.plan.cells:
        answers = [answer for answer in run.answers_at(cell) if answer.verify_passes]
        rules = (0.0, cell.temperature or 1.0)
        walks = zip(*(predictor.walks(prompts[one.id], one.output_ids, rules) for one in answers), strict=True)
        greedy, sampling = (Walk.pool(of_one_rule).accept_length for of_one_rule in walks)
        yield _line(cell._asdict(), answers, greedy, sampling)


def _line(
    point: dict[str, float], answers: Sequence[StreamedAnswer], greedy: float, sampling: float
) -> dict[str, float]:
    served = Walk.pool(Walk(one.completion_tokens, one.verify_passes or 0) for one in answers).accept_length
    predicted = sampling if point["temperature"] else greedy
    return {**point, "answers": len(answers), "served": served, "predicted": predicted, "ratio": served / predicted,
            "greedy_rule": greedy, "sampling_rule": sampling}  # fmt: skip


def _input(store: ObjectStore, measurement: Artifact, kind: Kind) -> Artifact:
    """Return what the measurement was made of; its manifest names that by content.

    Raises:
        ArtifactError: it is not in the root any more.
    """
    stage, digest = {Kind.PROMPT_SET: "prepare", Kind.DRAFTER: "export"}[kind], measurement.manifest.inputs[kind]
    for key in committed_keys(store, stage):
        if (found := load(store, key)).ref.manifest_sha256 == digest:
            return found
    raise ArtifactError(f"{store.root}/{stage}: expected the {kind} of manifest {digest:.12}, found none")


if __name__ == "__main__":
    main()
