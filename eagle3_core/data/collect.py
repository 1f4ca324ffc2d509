"""Remove captured features that nothing refers to any more: plans, feature sets and shards, and nothing else. Light."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle3_core.data.catalog import Catalog, FeatureEntry, read_catalog, stored_bytes
from eagle3_core.data.lineage import HOLDS, Lineage, Reference, read_lineage
from eagle3_core.errors import CorruptArtifactError, JobError
from eagle3_core.storage import PLANNING, ObjectStore
from eagle3_core.storage.manifest import MANIFEST

SCHEMA = "eagle3/gc/1"


@dataclass(frozen=True)
class Collection:
    """What would go and what stays; `keys` in the order of removal, with the bytes of each."""

    sets: tuple[str, ...]
    plans: tuple[str, ...]
    shards: dict[str, int]
    kept: dict[str, str]

    @property
    def keys(self) -> tuple[str, ...]:
        """Return everything that goes: what refers before what is referred to."""
        return (*self.sets, *self.plans, *self.shards)

    def without(self, keys: Sequence[str]) -> Collection:
        """Return the same, less some keys that do not go after all."""
        left = set(keys)
        return Collection(
            sets=tuple(key for key in self.sets if key not in left),
            plans=tuple(key for key in self.plans if key not in left),
            shards={key: size for key, size in self.shards.items() if key not in left},
            kept=self.kept,
        )

    @property
    def bytes(self) -> int:
        """Return the bytes of the shards that go."""
        return sum(self.shards.values())


def holders(lineage: Lineage, entry: FeatureEntry, history: bool = True) -> list[Reference]:
    """Return who keeps a plan and its feature set."""
    digests = [artifact.ref.manifest_sha256 for artifact in (entry.plan, entry.sealed) if artifact is not None]
    counted = [standing for standing in HOLDS if history or standing != "earlier"]
    return [reference for reference in lineage.of(*digests) if reference.standing in counted]


def survey(store: ObjectStore, *, history: bool = True, abandoned_after_days: float | None = None) -> Collection:
    """Find what nobody holds: no release, no run that goes on, no job that runs or may be resumed.

    Raises:
        CorruptArtifactError: something is damaged, so that it cannot be told what it refers to.
        JobError: a plan is being made, which may use any shard.
    """
    lineage = read_lineage(store, abandoned_after_days=abandoned_after_days)
    catalog = read_catalog(store)
    _refuse_unclear(lineage, catalog, history)
    kept: dict[str, str] = {}
    going: list[FeatureEntry] = []
    for entry in catalog.entries:
        # A plan has one feature set at a time: what holds one of the two holds both.
        same = [other for other in catalog.entries if other.plan.ref == entry.plan.ref]
        held = [reference for other in same for reference in holders(lineage, other, history)]
        if held:
            kept[entry.key] = ", ".join(dict.fromkeys(str(reference) for reference in held))
        else:
            going.append(entry)
    used = {shard.key for entry in catalog.entries if entry.key in kept for shard in entry.shards.shards}
    free = sorted(key for key in catalog.shards if key not in used)
    return Collection(
        sets=tuple(entry.sealed.ref.key for entry in going if entry.sealed is not None),
        plans=tuple(dict.fromkeys(entry.plan.ref.key for entry in going)),
        shards=_sizes(store, catalog, free),
        kept=kept,
    )


def remove(store: ObjectStore, find: Callable[[], Collection]) -> tuple[Collection, dict[str, Any]]:
    """Look with `find` and remove what it found, while no plan can be made; return what went and the record at `gc/`.

    A shard that somebody works on stays. Killed on its way, it leaves nothing half there that counts as whole: every
    manifest goes before its files, and the record was written first.

    Raises:
        JobError: a plan is being made.
    """
    with store.claim(PLANNING) as alone:
        if not alone:
            raise JobError(f"{store.root}: a plan is being made, which may use any shard; wait for it")
        found = find()
        record = {"schema_version": SCHEMA, "at": time.time(), "finished": False, "bytes": found.bytes,
                  "remove": list(found.keys), "busy": [], "kept": found.kept}  # fmt: skip
        key = f"gc/{time.strftime('%Y%m%dT%H%M%SZ', time.gmtime())}-{uuid.uuid4().hex[:6]}.json"
        if not found.keys:
            return found, record
        _note(store, key, record)
        busy = []
        for artifact in found.keys:
            if not _remove(store, artifact):
                busy.append(artifact)
        gone = found.without(busy)
        record |= {"finished": True, "busy": busy, "bytes": gone.bytes}
        _note(store, key, record)
    return gone, {**record, "record": key}


def _refuse_unclear(lineage: Lineage, catalog: Catalog, history: bool) -> None:
    broken = [text for standing, text in lineage.broken if history or standing != "earlier"]
    problems = [*broken, *catalog.damaged.values()]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CorruptArtifactError(
            f"gc: {problems[0]}{more}; what it refers to is unknown, so nothing is removed; repair it, or remove it by "
            "hand if it is of an earlier version that nobody needs"
        )
    if lineage.planning:
        raise JobError(f"gc: {lineage.planning[0]} runs and may use any shard; wait for it")


def _sizes(store: ObjectStore, catalog: Catalog, keys: Sequence[str]) -> dict[str, int]:
    """Return the bytes of shards: as plans give them, or the manifest of one that no plan names; 0 where torn."""
    planned = {shard.key: entry.shards.bytes_of(shard) for entry in catalog.entries for shard in entry.shards.shards}

    def size(key: str) -> int:
        if not catalog.shards[key]:
            return 0
        return planned[key] if key in planned else stored_bytes(store, key)

    return {key: size(key) for key in keys}


def _remove(store: ObjectStore, key: str) -> bool:
    """Remove an artifact, its manifest first; False if somebody works on it."""
    with store.claim(key) as ours:
        if not ours:
            return False
        names = sorted(store.list_keys(key), key=lambda name: name != f"{key}/{MANIFEST}")
        for name in names:
            store.remove(name)
    return True


def _note(store: ObjectStore, key: str, record: dict[str, Any]) -> None:
    store.write_bytes(key, json.dumps(record, indent=1).encode())
