"""Commit a stage output by writing its manifest last; verify it on read."""

from __future__ import annotations

import contextlib
import hashlib
import json
import uuid
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field, ValidationError

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.base import Section, canonical_sha256
from eagle3_core.errors import CorruptArtifactError, NotCommittedError, UnknownSchemaError
from eagle3_core.storage.store import ObjectStore

T = TypeVar("T")

SCHEMA = "eagle3/manifest/1"
MANIFEST = "manifest.json"
SEAL = "sha256_of_the_rest"
PLANNING = "plan_capture"
"""Claimed while a plan decides which shards to use again, and while shards that no plan uses are removed."""


class FileEntry(Section):
    """One file of an artifact."""

    bytes: int = Field(ge=0)
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


class Manifest(Section):
    """What an artifact consists of. No times and no hosts, so equal content has an equal manifest."""

    schema_version: Literal["eagle3/manifest/1"]
    kind: Kind
    inputs: dict[str, str] = Field(description="Input name to manifest sha256.")
    files: dict[str, FileEntry]
    facts: dict[str, Any]


@dataclass(frozen=True)
class Artifact:
    """A committed artifact, opened."""

    store: ObjectStore
    ref: Ref
    manifest: Manifest

    def path(self, name: str) -> Path:
        """Return a local file with the content of `name`, its size checked.

        Raises:
            CorruptArtifactError: the file is missing or has another size.
        """
        local = self._local(name, self.store.local_path)
        assert local is not None
        return local

    def kept_path(self, name: str) -> Path | None:
        """Return `path(name)`, to stay while the store lives; None where a bucket's cache has no room for it."""
        return self._local(name, self.store.keep_local)

    def check_size(self, name: str) -> None:
        """Look whether `name` is there and has its size; nothing of it is read.

        Raises:
            CorruptArtifactError: the file is missing or has another size.
        """
        self._sized(name, self.store.size, lambda size: size)

    def _local(self, name: str, find: Callable[[str, str], Path | None]) -> Path | None:
        return self._sized(name, find, lambda path: path.stat().st_size)

    def _sized(self, name: str, find: Callable[[str, str], T | None], size: Callable[[T], int]) -> T | None:
        """Return what `find` finds of a file, after comparing its size; None where it finds nothing."""
        entry = self.manifest.files.get(name)
        where = f"{self.store.root}/{self.ref.key}/{name}"
        if entry is None:
            raise CorruptArtifactError(f"{where}: not in the manifest, which has {sorted(self.manifest.files)}")
        try:
            found = find(f"{self.ref.key}/{name}", entry.sha256)
        except FileNotFoundError:
            raise CorruptArtifactError(f"{where}: expected {entry.bytes} bytes, found no file; repair it") from None
        if found is not None and size(found) != entry.bytes:
            raise CorruptArtifactError(f"{where}: expected {entry.bytes} bytes, found {size(found)}; repair it")
        return found

    def verified_path(self, name: str) -> Path:
        """Return `path(name)` after comparing its sha256 with the manifest."""
        local = self.path(name)
        found = file_sha256(local)
        wanted = self.manifest.files[name].sha256
        if found != wanted:
            where = f"{self.store.root}/{self.ref.key}/{name}"
            raise CorruptArtifactError(f"{where}: expected sha256 {wanted[:12]}, found {found[:12]}; repair it")
        return local

    def json(self, name: str) -> Any:
        """Return the parsed content of a JSON file, verified."""
        return json.loads(self.verified_path(name).read_text(encoding="utf-8"))


def file_sha256(path: Path) -> str:
    """Return the sha256 of a file, read once."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def commit(
    store: ObjectStore,
    key: str,
    staged: Path,
    kind: Kind,
    *,
    inputs: Mapping[str, Ref] | None = None,
    facts: Mapping[str, Any] | None = None,
    ref_facts: Mapping[str, Any] | None = None,
    replace: bool = False,
) -> Ref:
    """Move every file below `staged` under `key`, then write the manifest: from that moment the artifact exists.

    `facts` go into the manifest; `ref_facts` (a few numbers) also travel in the returned reference. Of several writers
    the first commits and the others return its artifact, since equal names are equal work; only with `replace` another
    content takes the place of what was there before. A crash leaves the old one, the new one or none, never a mixture.

    Raises:
        StorageFullError: the root lacks the space; nothing is half-written under a final manifest.
    """
    names = sorted(str(path.relative_to(staged)) for path in staged.rglob("*") if path.is_file())
    files = {name: FileEntry(bytes=(staged / name).stat().st_size, sha256=file_sha256(staged / name)) for name in names}
    shown = dict(ref_facts or {})
    manifest = Manifest(
        schema_version=SCHEMA,
        kind=kind,
        inputs={name: ref.manifest_sha256 for name, ref in sorted((inputs or {}).items())},
        files=files,
        facts={**shown, **(facts or {}), "shown": sorted(shown)},
    )
    values = manifest.model_dump(mode="json")
    digest = canonical_sha256(values)
    sealed = json.dumps({**values, SEAL: digest}, indent=1, sort_keys=True).encode()
    where = f"{key}/{MANIFEST}"
    seen = _seen(store, where)
    if seen not in (None, sealed) and not replace:
        return load(store, key).ref
    with _alone(store, key):
        if _seen(store, where) != seen:
            return load(store, key).ref
        if store.in_place and seen not in (None, sealed):
            store.remove(where)
            seen = None
        for name, entry in files.items():
            store.put_file(staged / name, f"{key}/{name}", entry.sha256)
        if not store.swap(where, sealed, seen):
            return load(store, key).ref
    return Ref(kind=kind, key=key, manifest_sha256=digest, facts=shown)


def _alone(store: ObjectStore, key: str) -> AbstractContextManager[bool]:
    """Keep a second writer out where its files would take the place of ours."""
    if not store.in_place:
        return contextlib.nullcontext(True)
    return store.claim(f"commit-{hashlib.sha256(key.encode()).hexdigest()[:2]}", lambda: None)


def _seen(store: ObjectStore, key: str) -> bytes | None:
    try:
        return store.read_bytes(key)
    except FileNotFoundError:
        return None


def committed_keys(store: ObjectStore, prefix: str) -> list[str]:
    """Return the key of every artifact below `prefix` that has a manifest, damaged ones included."""
    end = f"/{MANIFEST}"
    return [key.removesuffix(end) for key in store.list_keys(prefix) if key.endswith(end)]


def find(store: ObjectStore, key: str) -> Ref | None:
    """Return the reference of the artifact at `key`, or None if none is committed there."""
    try:
        return load(store, key).ref
    except NotCommittedError:
        return None


def find_sound(store: ObjectStore, key: str) -> Ref | None:
    """Return what `find` returns; an artifact whose manifest is damaged is put aside and counts as absent."""
    try:
        return find(store, key)
    except CorruptArtifactError as error:
        quarantine(store, key, str(error))
        return None


def load(store: ObjectStore, which: Ref | str) -> Artifact:
    """Open an artifact by reference or key; reads the manifest only.

    Raises:
        NotCommittedError: there is no manifest.
        CorruptArtifactError: the manifest is damaged, or is not the one the reference names.
        UnknownSchemaError: it was written by another version.
    """
    key = which if isinstance(which, str) else which.key
    where = f"{store.root}/{key}/{MANIFEST}"
    try:
        values = json.loads(store.read_bytes(f"{key}/{MANIFEST}"))
        seal, schema = values.pop(SEAL, None), values.get("schema_version")
    except FileNotFoundError:
        raise NotCommittedError(f"{where}: expected a committed artifact, found none; run its stage first") from None
    except (ValueError, AttributeError):
        raise CorruptArtifactError(f"{where}: not a JSON object; repair it") from None
    digest = canonical_sha256(values)
    if seal != digest:
        raise CorruptArtifactError(f"{where}: expected sha256 {seal!s:.12}, found {digest[:12]}; repair it")
    if schema != SCHEMA:
        raise UnknownSchemaError(f"{where}: expected {SCHEMA}, found {schema!r}; upgrade eagle3-pipeline")
    try:
        manifest = Manifest.model_validate(values)
    except ValidationError as error:
        raise CorruptArtifactError(f"{where}: {error.error_count()} invalid fields; repair it") from None
    shown = {name: manifest.facts[name] for name in manifest.facts.get("shown", []) if name in manifest.facts}
    ref = Ref(kind=manifest.kind, key=key, manifest_sha256=digest, facts=shown)
    if isinstance(which, Ref) and which.manifest_sha256 != ref.manifest_sha256:
        raise CorruptArtifactError(
            f"{where}: expected manifest {which.manifest_sha256[:12]}, found {ref.manifest_sha256[:12]}; "
            "clear the task that made it and all after it"
        )
    return Artifact(store, ref, manifest)


def verify(store: ObjectStore, which: Ref | str) -> Artifact:
    """Open an artifact and compare every byte with the manifest.

    Raises:
        CorruptArtifactError: names the first file that differs.
    """
    artifact = load(store, which)
    for name in artifact.manifest.files:
        artifact.verified_path(name)
    return artifact


def quarantine(store: ObjectStore, key: str, reason: str) -> str:
    """Move whatever lies at `key` aside, with the reason beside it; return the new key. Nothing is deleted."""
    target = f"quarantine/{key}/{uuid.uuid4().hex[:8]}"
    # Of two that found the same damage one moves it.
    with contextlib.suppress(FileNotFoundError):
        store.move_prefix(key, target)
    store.write_bytes(f"{target}/reason.json", json.dumps({"key": key, "reason": reason}).encode())
    return target
