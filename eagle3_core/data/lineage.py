"""Who refers to which artifacts: releases, runs and jobs, followed through the inputs that manifests name. Light."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from eagle3_core import jobs
from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.errors import CorruptArtifactError, Eagle3Error, UnknownSchemaError
from eagle3_core.jobs.files import COMMAND, LOG, RESULT, TERMINATED, read_json
from eagle3_core.pipeline import STAGES, shape_names
from eagle3_core.releases import all_releases
from eagle3_core.storage import ObjectStore, committed_keys, load

DAY_S = 86400.0
Standing = Literal["current", "earlier", "running", "unfinished", "stopped", "abandoned", "finished"]
HOLDS: tuple[Standing, ...] = ("current", "earlier", "running", "unfinished", "stopped")
"""What keeps an artifact; a finished run keeps nothing, its release does. One that somebody has stopped may go on."""


@dataclass(frozen=True)
class Reference:
    """Somebody who refers to an artifact."""

    kind: Literal["release", "run", "job"]
    name: str
    standing: Standing

    def __str__(self) -> str:
        """Return for example `release demo (current)`."""
        return f"{self.kind} {self.name} ({self.standing})"


@dataclass
class Lineage:
    """Manifest digest to whoever refers to that artifact, directly or through others.

    `broken` says where the way down from a release (of that standing) to its features is interrupted, which manifests
    are damaged, and of which unfinished runs it cannot be told what they would find done; `planning` names jobs that
    are making a plan right now.
    """

    references: dict[str, set[Reference]] = field(default_factory=dict)
    broken: list[tuple[Standing | None, str]] = field(default_factory=list)
    planning: list[str] = field(default_factory=list)

    def of(self, *digests: str) -> list[Reference]:
        """Return who refers to any of these."""
        found = {reference for digest in digests for reference in self.references.get(digest, ())}
        return sorted(found, key=lambda item: (HOLDS.index(item.standing) if item.standing in HOLDS else 9, item.name))


@dataclass(frozen=True)
class JobRecord:
    """A job directory: whose run, in which state (`stopped`: by somebody), and the artifacts it reads or wrote."""

    name: str
    stage: str
    run_key: str
    state: str
    touched_at: float
    digests: tuple[str, ...]


def read_lineage(store: ObjectStore, *, abandoned_after_days: float | None = None) -> Lineage:
    """Return who refers to what in a root.

    An unfinished run, or a job that failed or was lost, in which nothing happened for `abandoned_after_days` counts as
    abandoned; None: never.
    """
    lineage = Lineage()
    inputs = _manifests(store, lineage.broken)
    for reference, drafter, report in _releases(store):
        for wanted in (drafter, report):
            _follow(lineage, inputs, reference, [wanted], strict=True)
    now, found = time.time(), list(job_records(store))
    patience = float("inf") if abandoned_after_days is None else abandoned_after_days * DAY_S
    for record in found:
        standing: Standing = "finished"
        if record.state == "running":
            standing = "running"
            if record.stage == "plan_capture":
                lineage.planning.append(record.name)
        elif record.state in ("failed", "lost", "stopped"):
            standing = _waiting(record, now - record.touched_at > patience)
        if standing != "finished":
            _follow(lineage, inputs, Reference("job", record.name, standing), record.digests)
    for key in store.list_keys("runs"):
        mine = [record for record in found if record.run_key == key]
        name, digests, finished, unclear = _run(store, key, mine)
        touched = max([store.modified_at(key), *(record.touched_at for record in mine)])
        newest = max(mine, key=lambda record: record.touched_at, default=None)
        standing = "finished" if finished else _waiting(newest, now - touched > patience)
        if unclear and standing in HOLDS:
            hint = "finish it, or give --abandoned-after"
            lineage.broken.append((standing, f"run {name} ({standing}): {unclear}; {hint}"))
        _follow(lineage, inputs, Reference("run", name, standing), digests)
    return lineage


def _waiting(last: JobRecord | None, long_ago: bool) -> Standing:
    """Return what somebody is who is not through, by the job that was touched last."""
    if long_ago:
        return "abandoned"
    return "stopped" if last is not None and last.state == "stopped" else "unfinished"


def job_records(store: ObjectStore) -> Iterator[JobRecord]:
    """Yield the jobs of a root that this machine knows of."""
    for directory in sorted(jobs.jobs_directory(store.root).glob("*")):
        command = read_json(directory / COMMAND)
        if command is None:
            continue
        argv = [str(word) for word in command["argv"]]
        state = jobs.directory_state(directory)
        name = "stopped" if state.code == TERMINATED else state.name
        touched = [path.stat().st_mtime for path in (directory / COMMAND, directory / LOG) if path.exists()]
        stage = next((word for word in argv if word in STAGES), "repair")
        digests = tuple(ref.manifest_sha256 for ref in _refs_of(directory, argv))
        yield JobRecord(directory.name, stage, _option(argv, "--run") or "", name, max(touched), digests)


def _refs_of(directory: Path, argv: list[str]) -> Iterator[Ref]:
    passed = json.loads(_option(argv, "--inputs") or "{}")
    values = [*passed.values(), json.loads(_option(argv, "--plan") or "null"), read_json(directory / RESULT)]
    for value in values:
        if value is not None:
            yield Ref.parse(value, str(directory))


def _option(argv: list[str], name: str) -> str | None:
    return argv[argv.index(name) + 1] if name in argv[:-1] else None


def _run(store: ObjectStore, key: str, mine: Sequence[JobRecord]) -> tuple[str, list[str], bool, str]:
    """Return a run's name, the artifacts it has made or would find, whether it is through, and why some are unknown."""
    digests = [digest for record in mine for digest in record.digests]
    published = [record.touched_at for record in mine if record.stage == "publish" and record.state == "succeeded"]
    # Every night's run may have the same configuration: a job later than the last release belongs to the next one.
    finished = bool(published) and all(record.touched_at <= max(published) for record in mine)
    short = Path(key).stem[:8]
    try:
        config = RunConfig.parse(json.loads(store.read_bytes(key)), key)
        # A run whose stages another run has done before has no jobs of its own.
        refs = _recall(store, key, config)
    except (Eagle3Error, OSError, ValueError) as error:
        return short, digests, finished, " ".join(str(error).split()) or type(error).__name__
    recalled = [ref.manifest_sha256 for ref in refs.values()]
    return f"{config.name} {short}", [*digests, *recalled], finished or Kind.RELEASE in refs, ""


def _recall(store: ObjectStore, run_key: str, config: RunConfig) -> dict[Kind, Ref]:
    """Return what the stages of a run would find done, as far as that goes; start nothing, write nothing."""
    refs: dict[Kind, Ref] = {}
    for stage in STAGES.values():
        if stage.fan_out == "shards" or not stage.sections + stage.inputs:
            continue
        if any(kind not in refs for _, kind in stage.inputs):
            continue
        inputs = {name: refs[kind] for name, kind in stage.inputs}
        for index in range(len(shape_names(config))) if stage.fan_out else [None]:
            ref = jobs.committed_result(jobs.stage_job(store.root, run_key, stage.name, inputs, index), store)
            if ref is None:
                refs.pop(stage.produces, None)
                break
            refs[stage.produces] = ref
    return refs


def _releases(store: ObjectStore) -> Iterator[tuple[Reference, str, str]]:
    for release in all_releases(store):
        for number, entry in enumerate([release.current, *release.history]):
            reference = Reference("release", release.name, "earlier" if number else "current")
            yield reference, entry.drafter_manifest_sha256, entry.report_manifest_sha256


def _manifests(store: ObjectStore, broken: list[tuple[Standing | None, str]]) -> dict[str, Mapping[str, str]]:
    """Return the inputs of every committed artifact that can lie between a release and its features.

    A damaged manifest goes to `broken`: nobody can say what it refers to.
    """
    found: dict[str, Mapping[str, str]] = {}
    for stage in ("plan_capture", "seal", "train", "export", "parity", "evaluate", "challenge", "report", "publish"):
        for key in committed_keys(store, stage):
            if "/checkpoints/" in key:
                continue
            try:
                artifact = load(store, key)
            except (CorruptArtifactError, UnknownSchemaError) as error:
                broken.append((None, str(error)))
                continue
            found[artifact.ref.manifest_sha256] = artifact.manifest.inputs
    return found


def _follow(
    lineage: Lineage,
    inputs: Mapping[str, Mapping[str, str]],
    reference: Reference,
    digests: Iterable[str],
    strict: bool = False,
) -> None:
    """Add `reference` to everything that can be reached; `strict` notes where the way down is interrupted."""
    waiting, seen = [("", digest) for digest in digests], set()
    while waiting:
        name, digest = waiting.pop()
        if digest in seen:
            continue
        seen.add(digest)
        lineage.references.setdefault(digest, set()).add(reference)
        if digest in inputs:
            waiting += inputs[digest].items()
        elif strict and name in ("", "drafter", "checkpoint"):
            text = f"{reference}: its {name or 'drafter or report'} {digest[:12]} is not there"
            lineage.broken.append((reference.standing, text))
