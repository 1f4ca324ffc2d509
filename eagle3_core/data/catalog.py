"""What feature sets a root holds, planned, half captured or sealed; reads manifests and plans, never a shard. Light."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Literal

from eagle3_core.artifacts import Kind
from eagle3_core.data.features import SAMPLES
from eagle3_core.data.plan import ShardPlan, read_plan
from eagle3_core.errors import ArtifactError, CorruptArtifactError, InputError, NotCommittedError, UnknownSchemaError
from eagle3_core.pipeline import STAGES
from eagle3_core.storage import Artifact, ObjectStore, committed_keys, find, load
from eagle3_core.storage.manifest import MANIFEST

PLANS, SHARDS, SETS = (STAGES[name].name for name in ("plan_capture", "capture", "seal"))

_READERS = 8
_SHARD_DEPTH = 3
"""Parts of a shard's key: capture/<identity>/<shard>."""

State = Literal["planned", "capturing", "captured", "sealed", "incomplete", "outdated"]


@dataclass(frozen=True)
class FeatureEntry:
    """A shard plan and the feature set made of it, if there is one; `committed` of its `shards` are there.

    `replaced` are the indexes of shards that are others now than those the set was sealed with.
    """

    plan: Artifact
    shards: ShardPlan
    sealed: Artifact | None
    committed: int
    made_at: float
    replaced: tuple[int, ...]

    @property
    def key(self) -> str:
        """Return the key people use: the feature set's, or the plan's where nothing is sealed."""
        return (self.sealed or self.plan).ref.key

    @property
    def state(self) -> State:
        """Return how far it is."""
        whole = self.committed == len(self.shards.shards)
        if self.sealed is not None:
            return "incomplete" if not whole else "outdated" if self.replaced else "sealed"
        if whole:
            return "captured"
        return "capturing" if self.committed else "planned"

    @property
    def samples(self) -> int:
        """Return the number of samples."""
        return sum(len(shard.sample_ids) for shard in self.shards.shards)

    @property
    def tokens(self) -> int:
        """Return the number of tokens."""
        return sum(shard.tokens for shard in self.shards.shards)

    @property
    def bytes(self) -> int:
        """Return what the hidden states take when all are there."""
        return self.shards.bytes

    @property
    def bytes_per_token(self) -> float:
        """Return the bytes of a token, on average."""
        return self.bytes / self.tokens


@dataclass(frozen=True)
class Catalog:
    """All of a root; `shards` maps every key below capture/ that holds anything to whether it is committed."""

    entries: tuple[FeatureEntry, ...]
    shards: dict[str, bool]
    damaged: dict[str, str]

    def captured(self, entry: FeatureEntry) -> list[str]:
        """Return the keys of an entry's committed shards."""
        return [shard.key for shard in entry.shards.shards if self.shards.get(shard.key)]

    def select(self, key: str | None) -> list[FeatureEntry]:
        """Return the entry of a feature set, the entries of a plan, or all; the beginning of a key is enough.

        Raises:
            NotCommittedError: there is none at `key`.
            InputError: several keys begin so.
        """
        wanted = (key or "").strip("/")
        names = {name for entry in self.entries for name in (entry.key, entry.plan.ref.key) if name.startswith(wanted)}
        if wanted and wanted not in names and len(names) > 1:
            raise InputError(
                f"{wanted}: expected the beginning of one key, found {', '.join(sorted(names))}; add digits"
            )
        found = [entry for entry in self.entries if names & {entry.key, entry.plan.ref.key}]
        if wanted and not found:
            if wanted in self.damaged:
                raise CorruptArtifactError(self.damaged[wanted])
            known = ", ".join(entry.key for entry in self.entries) or "none"
            raise NotCommittedError(f"expected a feature set or a plan at {wanted}, found none; there are: {known}")
        return found


def read_catalog(store: ObjectStore) -> Catalog:
    """Look at a root; damaged plans and feature sets are named, not hidden."""
    damaged: dict[str, str] = {}
    shards = shard_keys(store)
    plans = {artifact.ref.manifest_sha256: artifact for artifact in _artifacts(store, PLANS, damaged)}
    sealed: dict[str, list[Artifact | None]] = {}
    for artifact in _artifacts(store, SETS, damaged):
        plan = artifact.manifest.inputs.get(Kind.SHARD_PLAN, "")
        if plan in plans:
            sealed.setdefault(plan, []).append(artifact)
        else:
            damaged[artifact.ref.key] = f"{store.root}/{artifact.ref.key}: expected its shard plan, found none"
    entries = []
    for digest, plan_artifact in plans.items():
        try:
            plan_values = read_plan(plan_artifact)
        except (CorruptArtifactError, UnknownSchemaError) as error:
            damaged[plan_artifact.ref.key] = str(error)
            continue
        committed = sum(shards.get(shard.key, False) for shard in plan_values.shards)
        for one in sealed.get(digest, [None]):
            made_at = store.modified_at(f"{(one or plan_artifact).ref.key}/{MANIFEST}")
            replaced = () if one is None else _replaced(one, plan_values, damaged)
            entries.append(FeatureEntry(plan_artifact, plan_values, one, committed, made_at, replaced))
    return Catalog(tuple(sorted(entries, key=lambda entry: entry.made_at)), shards, damaged)


def _replaced(sealed: Artifact, plan: ShardPlan, damaged: dict[str, str]) -> tuple[int, ...]:
    """Return which committed shards are not those a feature set was sealed with; reads their manifests."""
    try:
        wanted = [str(entry["manifest_sha256"]) for entry in sealed.json(SAMPLES)["shards"]]
    except (CorruptArtifactError, ValueError, KeyError, TypeError) as error:
        damaged[sealed.ref.key] = str(error)
        return ()

    def found(key: str) -> str | None:
        try:
            ref = find(sealed.store, key)
        except (CorruptArtifactError, UnknownSchemaError):
            return None
        return None if ref is None else ref.manifest_sha256

    with ThreadPoolExecutor(_READERS) as pool:
        now = list(pool.map(found, [shard.key for shard in plan.shards]))
    pairs = zip(now, wanted, strict=True)
    return tuple(index for index, (one, other) in enumerate(pairs) if one is not None and one != other)


def shard_keys(store: ObjectStore) -> dict[str, bool]:
    """Return every shard's key below capture/, and whether its manifest is there."""
    found: dict[str, bool] = {}
    for key in store.list_keys(SHARDS):
        shard = "/".join(key.split("/")[:_SHARD_DEPTH])
        found[shard] = found.get(shard, False) or key == f"{shard}/{MANIFEST}"
    return found


def stored_bytes(store: ObjectStore, key: str) -> int:
    """Return the bytes of all files of an artifact; 0 where its manifest is absent or damaged."""
    try:
        return sum(file.bytes for file in load(store, key).manifest.files.values())
    except ArtifactError:
        return 0


def _artifacts(store: ObjectStore, prefix: str, damaged: dict[str, str]) -> Iterator[Artifact]:
    for key in committed_keys(store, prefix):
        try:
            yield load(store, key)
        except (CorruptArtifactError, UnknownSchemaError) as error:
            damaged[key] = str(error)
