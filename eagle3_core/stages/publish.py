"""Point the release at a drafter that passed; one that did not leaves the release as it is."""

from __future__ import annotations

import json
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.context import StageContext
from eagle3_core.errors import StoreUnreachableError
from eagle3_core.storage import ObjectStore

SCHEMA = "eagle3/release/1"
KEPT = 20
_TRIES = 10


def run(context: StageContext) -> Ref:
    """Write `releases/<name>.json`, atomically, if the report says so; a refusal is a result, not an error."""
    name = context.run.name
    content = {"name": name}
    if done := context.done(content):
        return done
    drafter, report = context.inputs["drafter"], context.inputs["eval_report"]
    verdict = context.input("eval_report").json("report.json")["verdict"]
    entry = {
        "drafter": drafter.key,
        "drafter_manifest_sha256": drafter.manifest_sha256,
        "report": report.key,
        "report_manifest_sha256": report.manifest_sha256,
        "summary": verdict["summary"],
    }
    if verdict["passed"]:
        point(context.store, name, entry)
    else:
        context.progress.phase(f"{name} stays as it is: {verdict['summary']}")
    staged = context.staged()
    values = {"name": name, "published": verdict["passed"], **entry}
    (staged / "release.json").write_text(json.dumps(values, indent=1), encoding="utf-8")
    shown = {"published": verdict["passed"], "release": pointer_key(name) if verdict["passed"] else None}
    return context.commit(staged, content=content, ref_facts=shown)


def pointer_key(name: str) -> str:
    """Return the key of a release's pointer."""
    return f"releases/{name}.json"


def point(store: ObjectStore, name: str, entry: dict[str, Any]) -> None:
    """Make `entry` the release `name`, and the release before it the first of its history.

    Doing so twice is doing so once, so a retry after a kill is harmless.

    Raises:
        StoreUnreachableError: it was changed under our hands again and again.
    """
    key = pointer_key(name)
    for _ in range(_TRIES):
        seen = store.read_bytes(key) if store.exists(key) else None
        history: list[dict[str, Any]] = []
        if seen is not None:
            before = json.loads(seen)
            if before["current"] == entry:
                return
            history = [before["current"], *before["history"]][:KEPT]
        values = {"schema_version": SCHEMA, "name": name, "current": entry, "history": history}
        # Another run may publish under this name at the same time: both become history, in some order.
        if store.swap(key, json.dumps(values, indent=1).encode(), seen):
            return
    raise StoreUnreachableError(f"{store.root}/{key}: others publish {name} all the time; try again")
