"""Make a drafter that passed the champion; one that did not leaves the release as it is."""

from __future__ import annotations

import json
from typing import Literal

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.releases import Entry, now, point, pointer_key, read_release, whoami

Outcome = Literal["published", "unchanged", "kept", "refused"]
"""It is the champion now; it was before; the one before it stays; there is none and this one must not be it."""


def run(context: StageContext) -> Ref:
    """Move `releases/<name>.json`, atomically, if the report says so; a refusal is a result, not an error.

    The pointer moves only from the champion that was challenged: one that came meanwhile has not been. It is looked at
    every time, so an output that is committed already says nothing; one is named by what it says.
    """
    name, champion = context.run.name, context.run.champion
    drafter, report = context.inputs["drafter"], context.inputs["eval_report"]
    verdict = context.input("eval_report").json("report.json")["verdict"]
    before = champion.drafter.manifest_sha256 if champion else None
    entry = Entry(
        drafter=drafter.key, drafter_manifest_sha256=drafter.manifest_sha256, report=report.key,
        report_manifest_sha256=report.manifest_sha256, summary=verdict["summary"], at=now(), by=whoami(),
        why=verdict["summary"],
    )  # fmt: skip
    outcome: Outcome
    reason = str(verdict["summary"])
    if drafter.manifest_sha256 == before:
        outcome = "unchanged"
        release = read_release(context.store, name)
        if release is None or release.current.drafter_manifest_sha256 != before:
            outcome, reason = "kept", "this drafter was the champion as the run began, and is not any more."
    elif not verdict["passed"]:
        outcome = "kept" if champion else "refused"
    elif (stale := point(context.store, name, entry, before)) is not None:
        outcome, reason = "kept", f"{reason} But {stale}."
    else:
        outcome = "published"
    said = f"{outcome_words(outcome, name)}: {reason}"
    context.progress.phase(said)
    staged = context.staged()
    shown = {"outcome": outcome, "published": outcome in ("published", "unchanged"), "said": said,
             "release": pointer_key(name) if outcome != "refused" else None}  # fmt: skip
    values = {"name": name, "drafter": drafter.key, "report": report.key, "challenged": before, **shown}
    (staged / "release.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    return context.commit(staged, content={"name": name, "said": said}, ref_facts=shown)


def outcome_words(outcome: Outcome, name: str) -> str:
    """Return what happened, in a few words for people."""
    return {
        "published": f"Published as {name}",
        "unchanged": f"Nothing new, the champion of {name} stays",
        "kept": f"Kept the champion of {name}",
        "refused": f"Not published as {name}",
    }[outcome]
