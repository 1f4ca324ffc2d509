"""Compare every captured shard with its plan and manifest, byte by byte, and put bad ones aside. Light."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.data.features import SAMPLES
from eagle3_core.data.plan import PlannedShard, ShardPlan, read_plan, tokens_file
from eagle3_core.data.remote import RangedShard
from eagle3_core.data.shards import FEATURES, ShardIndex, check_values
from eagle3_core.errors import (
    EXIT_CODES,
    ConfigError,
    CorruptArtifactError,
    Eagle3Error,
    NotCommittedError,
    UnknownSchemaError,
)
from eagle3_core.storage import Artifact, ObjectStore, load, open_store, quarantine, verify
from eagle3_core.storage.scan import OnBytes
from eagle3_core.storage.tensors import read_header

State = Literal["ok", "missing", "corrupt"]

_READERS = 4


@dataclass(frozen=True)
class ShardFinding:
    """What was found at the place of one planned shard; `manifest_sha256` is set where it is ok."""

    index: int
    state: State
    reason: str = ""
    manifest_sha256: str = ""


Tell = Callable[[ShardFinding], None]


def _nobody(_finding: ShardFinding) -> None:
    """Tell nobody."""


def inspect(
    store: ObjectStore, plan_ref: Ref, deep: OnBytes | None = None, *, states: bool = True, tell: Tell = _nobody
) -> list[ShardFinding]:
    """Return one finding for each planned shard, in order; reads every byte of all of them.

    `deep` hears how much was read, and asks for more than the files' checksums: every tensor's, and finite values.
    Without `states` only what is small is read, however large a shard is: its manifest, index, size and header. `tell`
    hears of one finding after the other.

    Raises:
        ArtifactError: the plan itself is missing or damaged.
    """
    artifact = load(store, plan_ref)
    plan = read_plan(artifact)
    with ThreadPoolExecutor(_READERS) as pool:
        findings = []
        for finding in pool.map(lambda shard: _finding(artifact, plan, shard, deep, states), plan.shards):
            findings.append(finding)
            tell(finding)
        return findings


def quarantine_bad(
    store: ObjectStore,
    plan_ref: Ref,
    *,
    dry_run: bool = False,
    deep: OnBytes | None = None,
    states: bool = True,
    tell: Tell = _nobody,
) -> list[ShardFinding]:
    """Inspect, and move every corrupt shard to the quarantine with the reason; return all findings.

    What is not "ok" is then to be captured again. With `dry_run` nothing is moved. For the others see `inspect`.
    """
    findings = inspect(store, plan_ref, deep, states=states, tell=tell)
    if not dry_run and any(finding.state == "corrupt" for finding in findings):
        plan = read_plan(load(store, plan_ref))
        for finding in findings:
            if finding.state == "corrupt":
                quarantine(store, plan.shards[finding.index].key, finding.reason)
    return findings


def check_shard(
    plan_artifact: Artifact, plan: ShardPlan, shard: PlannedShard, deep: OnBytes | None, states: bool
) -> Ref:
    """Compare one shard with its manifest and with the plan: samples, shapes, every byte, token ids. See `inspect`.

    Raises:
        NotCommittedError: it is not there.
        CorruptArtifactError: names what differs.
    """
    artifact = load(plan_artifact.store, shard.key)
    where = f"{artifact.store.root}/{artifact.ref.key}"
    if artifact.ref.kind != Kind.SHARD:
        raise CorruptArtifactError(f"{where}: expected a shard, found {artifact.ref.kind}")
    for name in artifact.manifest.files:
        if name != FEATURES:
            artifact.verified_path(name)
    index = ShardIndex.of(artifact)
    if index.sample_ids != shard.sample_ids or index.digest != shard.digest:
        raise CorruptArtifactError(
            f"{where}: expected the {len(shard.sample_ids)} planned samples, found {len(index.sample_ids)}, "
            f"{len(set(index.sample_ids) ^ set(shard.sample_ids))} of them others"
        )
    artifact.check_size(FEATURES)
    if states:
        check_values(artifact, index, plan.encoding, deep)
    layout, found = plan.encoding.layout(shard.tokens, shard.label_rows), RangedShard(artifact, FEATURES).layout
    if found != layout or sum(index.lengths) != shard.tokens:
        raise CorruptArtifactError(f"{where}/{FEATURES}: expected {layout}, found {found}")
    tokens = tokens_file(shard.index)
    if states and _raw_tensor(artifact, FEATURES, "input_ids") != _raw_tensor(plan_artifact, tokens, "input_ids"):
        raise CorruptArtifactError(f"{where}/{FEATURES}: the token ids are not those of the plan")
    return artifact.ref


def check_set(sealed: Artifact, findings: Sequence[ShardFinding]) -> str | None:
    """Return what is wrong with a feature set beside its shards: its own files, shards that are not those sealed.

    `findings` are those of its plan's shards, in order.
    """
    try:
        entries = verify(sealed.store, sealed.ref).json(SAMPLES)["shards"]
    except CorruptArtifactError as error:
        return str(error)
    other = [
        str(finding.index)
        for entry, finding in zip(entries, findings, strict=True)
        if finding.state == "ok" and finding.manifest_sha256 != entry["manifest_sha256"]
    ]
    if not other:
        return None
    which = f"shard{'s' * (len(other) > 1)} {', '.join(other[:10])}{', ...' * (len(other) > 10)}"
    return (
        f"{sealed.ref.key} is outdated: {which} captured again since it was sealed; run `eagle3 seal RECIPE`, then "
        "`eagle3 train RECIPE` on the new feature set"
    )


def _finding(
    artifact: Artifact, plan: ShardPlan, shard: PlannedShard, deep: OnBytes | None, states: bool
) -> ShardFinding:
    try:
        ref = check_shard(artifact, plan, shard, deep, states)
    except NotCommittedError as error:
        return ShardFinding(shard.index, "missing", str(error))
    # The plan was read with this version's schema, so an unknown one in its shard is damage.
    except (ConfigError, CorruptArtifactError, UnknownSchemaError) as error:
        return ShardFinding(shard.index, "corrupt", str(error))
    return ShardFinding(shard.index, "ok", manifest_sha256=ref.manifest_sha256)


def _raw_tensor(artifact: Artifact, name: str, tensor: str) -> bytes:
    path = artifact.path(name)
    place = read_header(path)[tensor]
    with path.open("rb") as file:
        file.seek(place.start)
        return file.read(place.end - place.start)


def _counted() -> Tell:
    """Return what tells now and then how many shards were looked at: a job that is silent for long is ended."""
    seen, bad, told = 0, 0, 0.0

    def tell(finding: ShardFinding) -> None:
        nonlocal seen, bad, told
        seen, bad = seen + 1, bad + (finding.state != "ok")
        if time.monotonic() - told > 10.0:
            told = time.monotonic()
            sys.stderr.write(f"{seen} shards verified, {bad} bad or missing\n")
            sys.stderr.flush()

    return tell


def main(argv: Sequence[str] | None = None) -> int:
    """Quarantine what is bad and print the indexes to capture again as a JSON list."""
    parser = argparse.ArgumentParser(prog="python -m eagle3_core.repair", description=__doc__)
    parser.add_argument("--root", required=True, help="directory or s3:// URI of the artifacts")
    parser.add_argument("--plan", required=True, help="reference of the shard plan, as JSON")
    parser.add_argument("--check-only", action="store_true", help="report; move nothing")
    arguments = parser.parse_args(argv)
    try:
        plan = Ref.parse(json.loads(arguments.plan), "--plan")
        findings = quarantine_bad(open_store(arguments.root), plan, dry_run=arguments.check_only, tell=_counted())
    except Eagle3Error as error:
        sys.stderr.write(f"error: [{type(error).__name__}] {' '.join(str(error).split())}\n")
        return EXIT_CODES[error.remedy]
    for finding in findings:
        if finding.state != "ok":
            sys.stderr.write(f"shard {finding.index}: {finding.state}: {finding.reason}\n")
    sys.stdout.write(json.dumps([finding.index for finding in findings if finding.state != "ok"]) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
