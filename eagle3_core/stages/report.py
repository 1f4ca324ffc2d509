"""Put all figures of one drafter together, draw the page, judge."""

from __future__ import annotations

import csv
import json
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.identity import require_target
from eagle3_core.pipeline import STAGES, output_key, shape_names, shard_key
from eagle3_core.storage import Artifact, load

if TYPE_CHECKING:
    from pathlib import Path

    from eagle3_core.evaluate.comparison import Served
    from eagle3_core.evaluate.report import Report


def run(context: StageContext) -> Ref:
    """Write `report.html`, `report.json` and `report.csv`.

    Raises:
        NotCommittedError: a draft shape has not been measured.
        NotSpeculatingError: a figure the gate needs is unknown.
    """
    if done := context.done():
        return done
    from eagle3_core.evaluate import page
    from eagle3_core.evaluate.against import CHALLENGE_FILE, TRAINED_ON_FILE, Challenge
    from eagle3_core.evaluate.report import build

    measurements = _measurements(context)
    baseline, *served = [_served(artifact) for artifact in measurements.values()]
    checkpoint = context.input("checkpoint")
    report = build(
        context.run.name,
        context.run.evaluation,
        context.run.gate,
        baseline,
        served,
        checkpoint.json("validation.json"),
        {
            "challenge": Challenge.parse(context.input("challenge").json(CHALLENGE_FILE), "challenge.json"),
            "differences": _differences(context, baseline, served[: len(context.run.evaluation.shapes)]),
            "parity": context.input("parity").json("parity.json"),
            "drafter": _facts(context.input("drafter")),
            "lineage": _lineage(context, measurements),
        },
    )
    metrics = checkpoint.verified_path("metrics.jsonl").read_text(encoding="utf-8").splitlines()
    staged = context.staged()
    (staged / "report.html").write_text(page.render(report, [json.loads(line) for line in metrics]), encoding="utf-8")
    (staged / "report.json").write_text(report.model_dump_json(indent=1), encoding="utf-8")
    _write_csv(staged / "report.csv", baseline, report)
    (staged / TRAINED_ON_FILE).write_text("".join(f"{name}\n" for name in sorted(_learnt(context))), encoding="utf-8")
    context.progress.phase(report.verdict.summary)
    return context.commit(staged, ref_facts=_ref_facts(report))


def _measurements(context: StageContext) -> dict[str, Artifact]:
    """Return the measurement of each shape, the baseline first."""
    stage = STAGES["evaluate"]
    base = output_key(stage, context.run, {name: context.inputs[name] for name, _ in stage.inputs})
    return {name: load(context.store, shard_key(base, index)) for index, name in enumerate(shape_names(context.run))}


def _served(artifact: Artifact) -> Served:
    from eagle3_core.evaluate.bench.results import BenchRun
    from eagle3_core.evaluate.comparison import Served
    from eagle3_core.evaluate.measurement import Measurement

    measurement = Measurement.parse(artifact.json("measurement.json"), f"{artifact.ref.key}/measurement.json")
    return Served(measurement, BenchRun.parse(artifact.json("sweep.json"), f"{artifact.ref.key}/sweep.json"))


def _differences(context: StageContext, baseline: Served, served: list[Served]) -> list[Any]:
    """Return the differing answers, with the target's own indecision where it can be had cheaply."""
    from eagle3_core.data.corpus import read_prompt_set
    from eagle3_core.evaluate.report import all_differences
    from eagle3_core.evaluate.ties import with_gaps

    found = all_differences(baseline, served)
    if not found:
        return []
    prompt_set = context.input("prompt_set")
    target = prompt_set.manifest.facts["target"]
    answers = baseline.first_pass()
    prompts = {prompt.id: prompt.input_ids for prompt in read_prompt_set(prompt_set) if prompt.id in answers}
    contexts = {name: [*prompts[name], *answer.output_ids] for name, answer in answers.items()}
    directory, primary = require_target(context.run, target), context.run.evaluation.primary
    return with_gaps(found, contexts, directory, target["parameters"], primary)


def _learnt(context: StageContext) -> set[str]:
    """Return the conversations that the drafter, and all it started from, were trained on."""
    from eagle3_core.data.corpus import read_prompt_set
    from eagle3_core.data.prompts import conversation
    from eagle3_core.evaluate.against import learnt

    prompts, champion = context.input("prompt_set"), context.run.champion
    found = {conversation(one.messages, one.later_turns) for one in read_prompt_set(prompts) if not one.held_out}
    if champion is None:
        return found
    same_target = champion.target_sha256 == prompts.manifest.facts["target"].get("sha256")
    started_from_it = context.run.start is not None and same_target
    if started_from_it or champion.drafter.manifest_sha256 == context.inputs["drafter"].manifest_sha256:
        found |= learnt(context.store, champion)
    return found


def _facts(artifact: Artifact) -> dict[str, Any]:
    return {name: value for name, value in artifact.manifest.facts.items() if name != "shown"}


def _lineage(context: StageContext, measurements: dict[str, Artifact]) -> list[dict[str, Any]]:
    artifacts = {name: context.input(name) for name in ("prompt_set", "checkpoint", "drafter", "parity", "challenge")}
    artifacts |= {f"measurement {name}": artifact for name, artifact in measurements.items()}
    return [
        {
            "artifact": name,
            "key": artifact.ref.key,
            "manifest_sha256": artifact.ref.manifest_sha256,
            "inputs": artifact.manifest.inputs,
        }
        for name, artifact in artifacts.items()
    ]


def _write_csv(path: Path, baseline: Served, report: Report) -> None:
    from eagle3_core.evaluate.comparison import csv_rows

    rows = csv_rows(baseline, report.rows)
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)))
        writer.writeheader()
        writer.writerows(rows)


def _ref_facts(report: Report) -> dict[str, Any]:
    primary = report.primary
    assert primary.acceptance_length is not None
    assert primary.trainer_tau is not None
    return {
        "passed": report.verdict.passed,
        "shape": primary.shape,
        "acceptance_length": round(primary.acceptance_length, 4),
        "trainer_tau": round(primary.trainer_tau, 4),
        "speedup": round(primary.speedup, 4),
        "tokens_per_s": round(primary.tokens_per_s, 2),
        "equal_answers": f"{primary.equal_answers}/{primary.compared_answers}",
        "summary": report.verdict.summary,
        "champion": report.challenge.said,
    }
