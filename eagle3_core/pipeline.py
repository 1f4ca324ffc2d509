"""The stages of a run, what each reads and writes, and how outputs get their names. The architecture in one table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.config.base import canonical_sha256
from eagle3_core.errors import ArtifactError

FanOut = Literal["shards", "shapes"]


@dataclass(frozen=True)
class Stage:
    """One stage: `sections` are the sections and fields of the RunConfig its output depends on beside its inputs."""

    name: str
    summary: str
    produces: Kind
    inputs: tuple[tuple[str, Kind], ...] = ()
    sections: tuple[str, ...] = ()
    fan_out: FanOut | None = None
    engine: bool = False
    always: bool = False
    """Looks at what changes by itself (the machine, the release): run again even where its output is committed."""
    version: int = 1

    def check_inputs(self, inputs: Mapping[str, Ref]) -> None:
        """Refuse missing, surplus or mis-wired inputs.

        Raises:
            ArtifactError: names what was expected and found.
        """
        wanted = dict(self.inputs)
        if set(wanted) != set(inputs):
            raise ArtifactError(f"{self.name}: expected inputs {sorted(wanted)}, found {sorted(inputs)}")
        for name, kind in wanted.items():
            inputs[name].expect(kind)


JUDGED = ("evaluation.shapes", "evaluation.primary", "evaluation.max_new_tokens[0]")
"""What training and parity look at of the evaluation; another sweep or more prompts train nothing anew."""

CHALLENGED = ("evaluation.primary", "evaluation.max_prompts", "evaluation.max_new_tokens[0]",
              "evaluation.concurrency[0]", "evaluation.repeats")  # fmt: skip
"""What both drafters are asked; other shapes and points beside those that decide leave the comparison as it is."""

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage("preflight", "Check everything that can be checked in seconds.", Kind.PREFLIGHT, engine=True,
              always=True),
        Stage("prepare", "Normalise, deduplicate and split the prompts; fingerprint the target.", Kind.PROMPT_SET,
              sections=("target", "data")),
        Stage("regenerate", "Let the target answer every prompt.", Kind.CORPUS,
              inputs=(("prompt_set", Kind.PROMPT_SET),), sections=("target", "data", "serving"), engine=True),
        Stage("build_vocab", "Count answer tokens and choose the draft vocabulary.", Kind.VOCAB_MAP,
              inputs=(("corpus", Kind.CORPUS),), sections=("drafter",)),
        Stage("plan_capture", "Cut the corpus into shards of bounded size.", Kind.SHARD_PLAN,
              inputs=(("corpus", Kind.CORPUS),), sections=("target", "capture"), version=2),
        Stage("capture", "Read the hidden states of one shard.", Kind.SHARD,
              inputs=(("shard_plan", Kind.SHARD_PLAN),), fan_out="shards", engine=True),
        Stage("seal", "Look at every shard and write the index.", Kind.FEATURE_SET,
              inputs=(("shard_plan", Kind.SHARD_PLAN),)),
        Stage("train", "Train the drafter under torchrun.", Kind.CHECKPOINT,
              inputs=(("feature_set", Kind.FEATURE_SET), ("vocab_map", Kind.VOCAB_MAP)),
              sections=("drafter", "training", *JUDGED, "start"), engine=True, version=2),
        Stage("export", "Write the directory SGLang loads.", Kind.DRAFTER, inputs=(("checkpoint", Kind.CHECKPOINT),)),
        Stage("parity", "Compare the export with the trained drafter, with negative controls.", Kind.PARITY,
              inputs=(("drafter", Kind.DRAFTER), ("checkpoint", Kind.CHECKPOINT), ("feature_set", Kind.FEATURE_SET)),
              sections=JUDGED, engine=True, version=2),
        Stage("evaluate", "Serve held-out prompts with one draft shape, or with none.", Kind.MEASUREMENT,
              inputs=(("prompt_set", Kind.PROMPT_SET), ("drafter", Kind.DRAFTER), ("parity", Kind.PARITY)),
              sections=("target", "data", "serving", "evaluation"), fan_out="shapes", engine=True, version=3),
        Stage("challenge", "Serve challenger and champion in turn on the same held-out prompts.", Kind.CHALLENGE,
              inputs=(("prompt_set", Kind.PROMPT_SET), ("drafter", Kind.DRAFTER), ("parity", Kind.PARITY)),
              sections=("target", "serving", *CHALLENGED, "champion"), engine=True, version=2),
        Stage("report", "Put all figures together, draw the report, judge the drafter.", Kind.EVAL_REPORT,
              inputs=(("prompt_set", Kind.PROMPT_SET), ("drafter", Kind.DRAFTER), ("checkpoint", Kind.CHECKPOINT),
                      ("parity", Kind.PARITY), ("challenge", Kind.CHALLENGE)),
              sections=("target", "data", "serving", "evaluation", "gate", "champion", "start"), version=4),
        Stage("publish", "Make a drafter that passed the champion, or keep the one there is.", Kind.RELEASE,
              inputs=(("drafter", Kind.DRAFTER), ("eval_report", Kind.EVAL_REPORT)), sections=("champion",),
              always=True, version=2),
    )
}  # fmt: skip
"""In the order of a run. `evaluate` with no drafter in use (index 0) is the baseline."""


def output_key(
    stage: Stage, run: RunConfig, inputs: Mapping[str, Ref], *, content: Mapping[str, str] | None = None
) -> str:
    """Return `<stage>/<digest>`: equal inputs give an equal name, so a retry or a second run finds the first's output.

    `content` adds digests of files outside the store that the stage reads (prompts, target weights).
    """
    stage.check_inputs(inputs)
    digest = canonical_sha256(
        {
            "stage": stage.name,
            "version": stage.version,
            "config": run.slice(stage.sections),
            "inputs": {name: ref.manifest_sha256 for name, ref in inputs.items()},
            "content": dict(content or {}),
        }
    )
    return f"{stage.name}/{digest[:24]}"


def shard_key(base: str, index: int) -> str:
    """Return the key of one element of a fanned-out stage."""
    return f"{base}/{index:05d}"


SIMULATED = " at length "
"""Between a draft shape and the acceptance length that the server pretends."""


def shape_names(run: RunConfig) -> list[str]:
    """Return what `evaluate` maps over: index 0 is `baseline`, then the draft shapes and the pretended lengths."""
    evaluation = run.evaluation
    pretended = [f"{evaluation.primary}{SIMULATED}{length:g}" for length in evaluation.simulated_lengths]
    return ["baseline", *(shape.name for shape in evaluation.shapes), *pretended]
