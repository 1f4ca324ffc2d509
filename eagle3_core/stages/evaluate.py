"""Serve held-out prompts with one draft shape, or with none, and count."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.base import canonical_sha256
from eagle3_core.config.evaluation import DraftShape
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import read_prompt_set
from eagle3_core.engine.fingerprint import require_known_good
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.platform import check_sampling, resolve_device
from eagle3_core.identity import require_target, resolve_target
from eagle3_core.pipeline import SIMULATED, shape_names
from eagle3_core.storage import commit, find, load

if TYPE_CHECKING:
    from eagle3_core.evaluate.measurement import Measurement

SWEEP = "sweep.json"
MEASUREMENT = "measurement.json"
EFFECTIVE = ("attention_backend", "cuda_graph_bs", "disable_radix_cache", "dtype", "max_total_num_tokens",
             "mem_fraction_static", "speculative_algorithm", "speculative_eagle_topk", "speculative_num_draft_tokens",
             "speculative_num_steps", "tp_size", "version")  # fmt: skip


def run(context: StageContext) -> Ref:
    """Write `sweep.json` and `measurement.json` of the shape `context.index`; index 0 is no speculation.

    The sweep holds every answer at every point of the grid; the measurement is the first point of it, which decides.

    The baseline says nothing about the drafter, so it is also committed under a name of its own and found again there
    when another drafter meets the same prompts.

    Raises:
        ConfigError: drafts are to be verified by sampling where SGLang does not.
        NotSpeculatingError: the server does not use the drafter, or its counters contradict each other.
        EngineError: the server failed.
    """
    if done := context.done():
        return done
    assert context.index is not None
    name = shape_names(context.run)[context.index]
    staged = context.staged()
    if context.index == 0:
        baseline = _baseline_key(context)
        if find(context.store, baseline) is None:
            facts = _measure(context, name, staged)
            commit(context.store, baseline, staged, Kind.MEASUREMENT, ref_facts=facts,
                   inputs={"prompt_set": context.inputs["prompt_set"]})  # fmt: skip
        artifact, staged = load(context.store, baseline), context.staged()
        for file in (SWEEP, MEASUREMENT):
            shutil.copyfile(artifact.verified_path(file), staged / file)
        facts = {**artifact.ref.facts, "baseline": baseline}
    else:
        facts = _measure(context, name, staged)
    return context.commit(staged, ref_facts=facts)


def _baseline_key(context: StageContext) -> str:
    """Return where the baseline lives: named by all that can change it, and by no drafter."""
    evaluation = context.run.evaluation
    digest = canonical_sha256(
        {
            "version": context.stage.version,
            "config": context.run.slice(("target", "serving")),
            "evaluation": evaluation.model_dump(
                mode="json", include={"max_prompts", "max_new_tokens", "concurrency", "temperatures", "repeats"}
            ),
            "prompt_set": context.inputs["prompt_set"].manifest_sha256,
            "engine": require_known_good(),
            "device": resolve_device(context.run.serving.device),
        }
    )
    return f"baseline/{digest[:24]}"


def _measure(context: StageContext, name: str, staged: Path) -> dict[str, Any]:
    """Start a server, serve, write both files; return the facts for the reference."""
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.evaluate.measurement import BASELINE, check_counters, check_pretended, pool
    from eagle3_core.evaluate.serve import first_point, held_out, served

    run, prompt_set = context.run, context.input("prompt_set")
    require_target(run, prompt_set.manifest.facts["target"])
    prompts = held_out(read_prompt_set(prompt_set), run.evaluation.max_prompts)
    run.evaluation.require_prompts(len(prompts))
    shape, _, pretended = name.partition(SIMULATED)
    plan = _plan(context, shape, float(pretended) if pretended else None)
    assert context.index is not None
    asked = run.evaluation.plans[context.index]
    with SglangServer.of_stage(plan, context) as server, server.client() as client:
        found = served(server, prompts, asked, context.progress, shape)
        server_length = client.counters().avg_spec_accept_length
        circumstances: dict[str, Any] = {
            "device": plan.device, "startup_s": server.ready_s, "server_acceptance_length": server_length,
            "engine": {key: server.effective.get(key) for key in EFFECTIVE},
        }  # fmt: skip
    measurement = first_point(found, circumstances)
    if pretended:
        check_pretended(measurement.overall, float(pretended), name)
    elif shape != BASELINE:
        check_counters(pool(found.last_pass, speculating=True), server_length, name)
    (staged / SWEEP).write_text(found.model_dump_json(), encoding="utf-8")
    (staged / MEASUREMENT).write_text(measurement.model_dump_json(indent=1), encoding="utf-8")
    return _facts(measurement)


def _plan(context: StageContext, shape: str, pretended: float | None) -> LaunchPlan:
    from eagle3_core.evaluate.measurement import BASELINE
    from eagle3_core.export.directory import materialise

    run, target = context.run, resolve_target(context.run)
    if shape == BASELINE:
        return LaunchPlan.serve(target, run.target.dtype, run.serving)
    check_sampling(run.evaluation.temperatures, resolve_device(run.serving.device))
    drafter = materialise(context.input("drafter"), context.work / "drafter")
    plan = LaunchPlan.speculate(target, run.target.dtype, run.serving, drafter, DraftShape.from_name(shape))
    return replace(plan, pretended_length=pretended)


def _facts(measurement: Measurement) -> dict[str, Any]:
    facts: dict[str, Any] = {"shape": measurement.shape, "tokens_per_s": round(measurement.tokens_per_s, 2)}
    if measurement.overall.acceptance_length is not None:
        facts["acceptance_length"] = round(measurement.overall.acceptance_length, 4)
    return facts
