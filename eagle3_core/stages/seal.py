"""Write the index of all shards: one feature set that opens, and is sealed, without touching the data.

Only what is small is read: manifests, indexes, sizes and headers. States are compared with their checksums by whoever
reads them, every time, and by `eagle3 features verify` and `repair_capture`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.config.base import canonical_sha256
from eagle3_core.context import StageContext
from eagle3_core.data.features import write_feature_set
from eagle3_core.data.plan import PlannedSample, ShardPlan, read_plan, read_samples
from eagle3_core.data.shards import ShardIndex
from eagle3_core.errors import CorruptArtifactError, NotCommittedError
from eagle3_core.repair import ShardFinding, quarantine_bad
from eagle3_core.storage import ObjectStore, find, load


def run(context: StageContext) -> Ref:
    """Write the feature set.

    Raises:
        CorruptArtifactError: shards are missing or were bad and are in quarantine; names the indexes to capture again.
    """
    plan_ref = context.inputs["shard_plan"]
    artifact = load(context.store, plan_ref)
    plan = read_plan(artifact)
    content = _content(context.store, plan)
    if content is not None and (done := context.done(content)):
        return done
    context.progress.phase(f"reading {len(plan.shards)} shards")
    findings = quarantine_bad(context.store, plan_ref, states=False)
    _refuse_bad(findings)
    samples = read_samples(artifact)
    _check_sets(plan, samples)
    content = {"shards": canonical_sha256([finding.manifest_sha256 for finding in findings])}
    staged = context.staged()
    indexes = [ShardIndex.of(load(context.store, shard.key)) for shard in plan.shards]
    # Stored as zeros, since their states are not finite.
    bad = frozenset(name for index in indexes for name in index.not_finite)
    _write(staged, plan, samples, indexes, bad, findings)
    tokens = sum(sample.length for sample in samples)
    supervised = sum(sample.supervised for sample in samples if sample.id not in bad)
    context.progress.update(len(findings), len(findings), "shards", not_finite=len(bad))
    return context.commit(
        staged,
        content=content,
        facts={"aux_layers": list(plan.aux_layers), "encoding": plan.encoding.model_dump(mode="json"),
               "target": plan.target, "engine": plan.engine, "not_finite_samples": sorted(bad)},
        ref_facts={"samples": len(samples), "held_out": sum(sample.held_out for sample in samples),
                   "tokens": tokens, "supervised": supervised, "shards": len(findings), "not_finite": len(bad)},
    )  # fmt: skip


def _content(store: ObjectStore, plan: ShardPlan) -> Mapping[str, str] | None:
    """Return what the name of the feature set depends on, from the manifests alone; None where one is missing."""
    refs = []
    for shard in plan.shards:
        try:
            ref = find(store, shard.key)
        except CorruptArtifactError:
            ref = None
        if ref is None:
            return None
        refs.append(ref.manifest_sha256)
    return {"shards": canonical_sha256(refs)}


def _refuse_bad(findings: Sequence[ShardFinding]) -> None:
    bad = [finding for finding in findings if finding.state != "ok"]
    if not bad:
        return
    indexes = ", ".join(str(finding.index) for finding in bad[:20]) + (", ..." if len(bad) > 20 else "")
    message = (
        f"seal: expected {len(findings)} good shards, found {len(bad)} missing or corrupt: {indexes} "
        f"(first: {bad[0].reason}); corrupt ones are in quarantine; capture these indexes again"
    )
    if all(finding.state == "missing" for finding in bad):
        raise NotCommittedError(message)
    raise CorruptArtifactError(message)


def _check_sets(plan: ShardPlan, samples: Sequence[PlannedSample]) -> None:
    ids = [sample.id for sample in samples]
    planned = [name for shard in plan.shards for name in shard.sample_ids]
    if ids != planned or len(set(ids)) != len(ids):
        raise CorruptArtifactError(
            f"seal: expected {len(planned)} distinct samples as planned, found {len(ids)}, {len(set(ids))} distinct; "
            "run plan_capture again"
        )


def _write(
    staged: Path,
    plan: ShardPlan,
    samples: Sequence[PlannedSample],
    indexes: Sequence[ShardIndex],
    bad: frozenset[str],
    findings: Sequence[ShardFinding],
) -> None:
    domains = sorted({sample.domain for sample in samples})
    columns: dict[str, Sequence[Any]] = {
        "length": [sample.length for sample in samples],
        "shard": [sample.shard for sample in samples],
        "supervised": [0 if sample.id in bad else sample.supervised for sample in samples],
        "label_rows": [rows for index in indexes for rows in index.label_rows],
        "held_out": [sample.held_out for sample in samples],
        "checksums": [
            [int(value, 16) for value in sums]
            for index in indexes
            for sums in zip(*(index.checksums[name] for name in sorted(index.checksums)), strict=True)
        ],
        "domain": [domains.index(sample.domain) for sample in samples],
    }
    values = {
        "aux_layers": list(plan.aux_layers),
        "target": plan.target,
        "engine": plan.engine,
        "domains": domains,
        "sample_ids": [sample.id for sample in samples],
        "shards": [
            {"key": plan.shards[finding.index].key, "manifest_sha256": finding.manifest_sha256} for finding in findings
        ],
    }
    write_feature_set(staged, plan.encoding, columns, values)
