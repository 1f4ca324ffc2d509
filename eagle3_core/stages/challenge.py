"""Serve challenger and champion in turn, in one session, on the same held-out prompts, and compare."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.champion import Champion
from eagle3_core.context import StageContext
from eagle3_core.data.corpus import AskedPrompt, read_prompt_set
from eagle3_core.data.prompts import conversation
from eagle3_core.errors import InputError
from eagle3_core.identity import require_target, resolve_target
from eagle3_core.releases import opened
from eagle3_core.storage import load

if TYPE_CHECKING:
    from eagle3_core.evaluate.against import Challenge
    from eagle3_core.evaluate.bench.stream import StreamedAnswer

ANSWERS = "answers.json"
CHAMPION, CHALLENGER = "champion", "challenger"


def run(context: StageContext) -> Ref:
    """Write `challenge.json`, and the answers of both where there is a champion to compare with.

    The champion's server runs first and last and the challenger's between, each pass of one beside a pass of the
    other, so that a machine that grows busier meets both. Prompts that the champion was trained on are not asked.

    Raises:
        NotSpeculatingError: a server does not use its drafter.
        EngineError: a server failed.
        InputError: too few prompts are left.
    """
    if done := context.done():
        return done
    from eagle3_core.evaluate.against import CHALLENGE_FILE

    staged = context.staged()
    champion, prompt_set = context.run.champion, context.input("prompt_set")
    found = _nothing_to_compare(context, champion, str(prompt_set.manifest.facts["target"].get("sha256")))
    if found is None:
        assert champion is not None
        require_target(context.run, prompt_set.manifest.facts["target"])
        found, answers = _compared(context, champion, read_prompt_set(prompt_set))
        values = {side: [answer.model_dump(mode="json") for answer in given] for side, given in answers.items()}
        (staged / ANSWERS).write_text(json.dumps(values), encoding="utf-8")
    context.progress.phase(found.said)
    (staged / CHALLENGE_FILE).write_text(found.model_dump_json(indent=1), encoding="utf-8")
    shown: dict[str, Any] = {"state": found.state, "said": found.said}
    return context.commit(staged, ref_facts=shown)


def _nothing_to_compare(context: StageContext, champion: Champion | None, target_sha256: str) -> Challenge | None:
    """Return why no server needs to start; None: one does."""
    from eagle3_core.evaluate.against import Challenge

    name = context.run.name
    if champion is None:
        return Challenge(state="no champion", said=f"no champion: nothing was published as {name} yet")
    key = champion.drafter.key
    if champion.target_sha256 != target_sha256:
        return Challenge(state="other target", champion=key,
                         said=f"no champion for this target: {key} drafts for target {champion.target_sha256[:12]}, "
                         f"this one is {target_sha256[:12]}")  # fmt: skip
    if champion.drafter.manifest_sha256 == context.inputs["drafter"].manifest_sha256:
        return Challenge(
            state="same drafter", champion=key, said=f"nothing new: this drafter is the champion of {name}"
        )
    return None


def _compared(
    context: StageContext, champion: Champion, prompts: list[AskedPrompt]
) -> tuple[Challenge, dict[str, list[StreamedAnswer]]]:
    from eagle3_core.evaluate.against import Challenge
    from eagle3_core.evaluate.champion import compare_drafters

    evaluation = context.run.evaluation
    asked, left_out = _asked(context, champion, prompts)
    drafters = {CHAMPION: opened(Kind.DRAFTER, champion.drafter), CHALLENGER: context.inputs["drafter"]}
    passes = evaluation.repeats
    order = ((CHAMPION, passes), (CHALLENGER, 2 * passes), (CHAMPION, passes))
    answers: dict[str, list[StreamedAnswer]] = {CHALLENGER: [], CHAMPION: []}
    for side, count in order:
        given = _serve(context, side, drafters[side], asked, count)
        begun = 1 + max((answer.repeat for answer in answers[side]), default=-1)
        answers[side] += [answer.model_copy(update={"repeat": answer.repeat + begun}) for answer in given]
    against = compare_drafters(evaluation.primary, answers[CHALLENGER], answers[CHAMPION])
    said = (f"{against.word} than {champion.drafter.key}" if against.word != "no difference shown"
            else f"no difference from {champion.drafter.key} shown")  # fmt: skip
    told = tuple(f"{side}, {count} pass(es)" for side, count in order)
    return Challenge(state="compared", said=said, champion=champion.drafter.key, left_out=left_out, order=told,
                     against=against), answers  # fmt: skip


def _asked(context: StageContext, champion: Champion, prompts: list[AskedPrompt]) -> tuple[list[AskedPrompt], int]:
    """Return the prompts to ask, and how many were left out because the champion has learnt them.

    Raises:
        InputError: fewer than two are left, or than are to be in flight.
    """
    from eagle3_core.evaluate.against import learnt
    from eagle3_core.evaluate.champion import LEAST_PROMPTS
    from eagle3_core.evaluate.serve import held_out

    evaluation = context.run.evaluation
    known = learnt(context.store, champion)
    every = [prompt for prompt in prompts if prompt.held_out]
    unseen = [prompt for prompt in every if conversation(prompt.messages, prompt.later_turns) not in known]
    left_out = len(every) - len(unseen)
    least = max(LEAST_PROMPTS, evaluation.concurrency[0])
    if len(unseen) < least:
        raise InputError(
            f"challenge: expected at least {least} held-out prompts that {champion.drafter.key} was not trained on, "
            f"found {len(unseen)} of {len(every)}; keep data.held_out_fraction as it was then, or add prompts"
        )
    return held_out(unseen, evaluation.max_prompts), left_out


def _serve(
    context: StageContext, side: str, drafter: Ref, prompts: list[AskedPrompt], passes: int
) -> list[StreamedAnswer]:
    """Return the answers of one server."""
    from eagle3_core.engine.launch import LaunchPlan
    from eagle3_core.engine.server import SglangServer
    from eagle3_core.evaluate.serve import served
    from eagle3_core.export.directory import materialise

    run = context.run
    asked = run.evaluation.plan.first.model_copy(update={"repeats": passes})
    directory = materialise(load(context.store, drafter), context.work / side)
    shape = run.evaluation.primary_shape
    plan = LaunchPlan.speculate(resolve_target(run), run.target.dtype, run.serving, directory, shape)
    context.progress.phase(f"{side}: {drafter.key} at {shape.name}")
    with SglangServer.of_stage(plan, context) as server:
        return list(served(server, prompts, asked, context.progress, shape.name).answers)
