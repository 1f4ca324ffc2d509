"""Releases: which drafter is the champion of a name, which were before it, and who moved the pointer when and why."""

from __future__ import annotations

import datetime
import getpass
import json
import platform
from collections.abc import Callable, Mapping
from typing import Any, Literal

from pydantic import Field, ValidationError

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config.base import Section
from eagle3_core.config.champion import Champion, Pinned
from eagle3_core.errors import (
    ArtifactError,
    CorruptArtifactError,
    InputError,
    NotCommittedError,
    StoreUnreachableError,
    UnknownSchemaError,
)
from eagle3_core.storage import ObjectStore, load, verify

SCHEMA: Literal["eagle3/release/2"] = "eagle3/release/2"
KEPT = 20
_TRIES = 10


class Entry(Section):
    """A drafter that is or was the champion."""

    drafter: str
    drafter_manifest_sha256: str
    report: str
    report_manifest_sha256: str
    summary: str = Field(description="What its report said.")
    at: str = Field(description="When it became the champion, UTC.")
    by: str
    why: str

    def same(self, other: Entry) -> bool:
        """Tell whether both are the same drafter by the same report."""
        return (self.drafter_manifest_sha256, self.report_manifest_sha256) == (
            other.drafter_manifest_sha256, other.report_manifest_sha256,
        )  # fmt: skip


class Withdrawal(Section):
    """A drafter that somebody took back: no run makes it the champion again."""

    drafter_manifest_sha256: str
    at: str
    by: str
    why: str


class Release(Section):
    """The content of `releases/<name>.json`."""

    schema_version: Literal["eagle3/release/2"] = SCHEMA
    name: str
    current: Entry
    history: tuple[Entry, ...] = Field((), description="Former champions, the last one first.")
    withdrawn: tuple[Withdrawal, ...] = ()

    def withdrawal(self, drafter_sha256: str) -> Withdrawal | None:
        """Return who took a drafter back; None: nobody did."""
        return next((one for one in self.withdrawn if one.drafter_manifest_sha256 == drafter_sha256), None)


def pointer_key(name: str) -> str:
    """Return the key of a release's pointer."""
    return f"releases/{name}.json"


def read_release(store: ObjectStore, name: str) -> Release | None:
    """Return a release, or None if nothing was ever published under that name.

    Raises:
        UnknownSchemaError: another version wrote it.
        ArtifactError: it is no release.
    """
    return _read(store, name)[0]


def existing_release(store: ObjectStore, name: str) -> Release:
    """Return a release that must be there.

    Raises:
        InputError: nothing was ever published under that name.
        ArtifactError: it is no release, or of another version.
    """
    return _existing(store, name, read_release(store, name))


def all_releases(store: ObjectStore) -> list[Release]:
    """Return every release of a root, by name."""
    names = [key.removeprefix("releases/").removesuffix(".json") for key in store.list_keys("releases")]
    return [found for name in names if (found := read_release(store, name)) is not None]


def current_champion(store: ObjectStore, name: str) -> Champion | None:
    """Return the champion of a name, its manifests compared with the pointer's; None: there is none yet.

    Raises:
        ArtifactError: an artifact of it is missing, or is not the one the pointer names.
    """
    release = read_release(store, name)
    if release is None:
        return None
    try:
        return champion_of(store, release.current)
    except (NotCommittedError, CorruptArtifactError) as error:
        raise ArtifactError(
            f"champion of {name}: {error}; or go back to the one before: `eagle3 releases rollback {name} --why ...`"
        ) from None


def champion_of(store: ObjectStore, entry: Entry) -> Champion:
    """Return an entry with its checkpoint, found by its report's lineage.

    Raises:
        NotCommittedError: a manifest is missing.
        CorruptArtifactError: a manifest is not the one that was released.
    """
    drafter = load(store, _ref(Kind.DRAFTER, entry.drafter, entry.drafter_manifest_sha256))
    report = load(store, _ref(Kind.EVAL_REPORT, entry.report, entry.report_manifest_sha256))
    rows: list[Mapping[str, Any]] = report.json("report.json")["lineage"]
    made = {row["artifact"]: Pinned(key=row["key"], manifest_sha256=row["manifest_sha256"]) for row in rows}
    checkpoint = load(store, _ref(Kind.CHECKPOINT, made["checkpoint"].key, made["checkpoint"].manifest_sha256))
    return Champion(
        drafter=pinned(drafter.ref), checkpoint=pinned(checkpoint.ref), report=pinned(report.ref),
        target_sha256=str(drafter.manifest.facts["target_sha256"]),
    )  # fmt: skip


def pinned(ref: Ref) -> Pinned:
    """Return a reference without its kind and facts."""
    return Pinned(key=ref.key, manifest_sha256=ref.manifest_sha256)


def opened(kind: Kind, pin: Pinned) -> Ref:
    """Return what `pinned` was made from, for `load`, which compares the manifest."""
    return _ref(kind, pin.key, pin.manifest_sha256)


def point(store: ObjectStore, name: str, entry: Entry, expected: str | None) -> str | None:
    """Make `entry` the champion, and the one before it the first of the history, if nobody else did meanwhile.

    Doing so twice is doing so once, so a retry after a kill is harmless.

    Args:
        store: The root.
        name: The release.
        entry: The new champion; who, when and why are its own.
        expected: Manifest digest of the drafter that was challenged; None: there was none.

    Returns:
        None if `entry` is the champion now; else why it is not.

    Raises:
        StoreUnreachableError: it was changed under our hands again and again.
    """
    refused: list[str] = []

    def move(release: Release | None) -> Release | None:
        refused.clear()
        if release is None:
            return Release(name=name, current=entry)
        if release.current.same(entry):
            return release
        if taken := release.withdrawal(entry.drafter_manifest_sha256):
            refused.append(f"it was taken back by {taken.by} at {taken.at}: {taken.why}")
            return None
        if release.current.drafter_manifest_sha256 != expected:
            refused.append(
                f"{release.current.drafter} became the champion while this run was judged; run again to challenge it"
            )
            return None
        history = (release.current, *release.history)[:KEPT]
        return release.model_copy(update={"current": entry, "history": history})

    _swap(store, name, move)
    return refused[0] if refused else None


def roll_back(store: ObjectStore, name: str, why: str, *, by: str | None = None, to: str | None = None) -> Release:
    """Make a former champion the champion again, and take the present one back.

    Args:
        store: The root.
        name: The release.
        why: For the record.
        by: Who; None: the user of this process.
        to: Beginning of the drafter's key or manifest digest; None: the last one that nobody took back.

    Raises:
        InputError: there is no such release, or no former champion to go back to.
        ArtifactError: the former champion is not there any more, or damaged.
        StoreUnreachableError: it was changed under our hands again and again.
    """

    def move(release: Release | None) -> Release:
        release = _existing(store, name, release)
        former = _former(release, to)
        for kind, key, digest in ((Kind.DRAFTER, former.drafter, former.drafter_manifest_sha256),
                                  (Kind.EVAL_REPORT, former.report, former.report_manifest_sha256)):  # fmt: skip
            verify(store, _ref(kind, key, digest))
        who, at = by or whoami(), now()
        taken = Withdrawal(drafter_manifest_sha256=release.current.drafter_manifest_sha256, at=at, by=who, why=why)
        chosen = former.model_copy(update={"at": at, "by": who, "why": f"rolled back: {why}"})
        history = (release.current, *(one for one in release.history if not one.same(former)))[:KEPT]
        again = (former.drafter_manifest_sha256, taken.drafter_manifest_sha256)
        kept = [one for one in release.withdrawn if one.drafter_manifest_sha256 not in again]
        return release.model_copy(update={"current": chosen, "history": history, "withdrawn": (taken, *kept)})

    moved = _swap(store, name, move)
    assert moved is not None, "a rollback refuses by an error"
    return moved


def whoami() -> str:
    """Return user and machine, for the record."""
    try:
        user = getpass.getuser()
    except (KeyError, OSError):
        user = "unknown user"
    return f"{user}@{platform.node()}"


def now() -> str:
    """Return the time in UTC, to the second."""
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _existing(store: ObjectStore, name: str, release: Release | None) -> Release:
    if release is None:
        raise InputError(f"release {name}: expected one below {store.root}, found none; see `eagle3 releases ls`")
    return release


def _former(release: Release, to: str | None) -> Entry:
    if not to:
        found = [one for one in release.history if release.withdrawal(one.drafter_manifest_sha256) is None]
    else:
        found = [one for one in release.history
                 if one.drafter.startswith(to) or one.drafter_manifest_sha256.startswith(to)]  # fmt: skip
        if len(several := sorted({one.drafter for one in found})) > 1:
            raise InputError(f"--to {to}: expected the beginning of one former champion's key or digest, found that of "
                             f"{', '.join(several)}; give more of it")  # fmt: skip
    if not found:
        raise InputError(
            f"release {release.name}: expected a former champion{f' {to}' if to else ' that nobody took back'} among "
            f"{len(release.history)}, found none; see `eagle3 releases show {release.name}`"
        )
    return found[0]


def _ref(kind: Kind, key: str, digest: str) -> Ref:
    return Ref(kind=kind, key=key, manifest_sha256=digest)


def _read(store: ObjectStore, name: str) -> tuple[Release | None, bytes | None]:
    key = pointer_key(name)
    try:
        seen = store.read_bytes(key)
    except FileNotFoundError:
        return None, None
    where = f"{store.root}/{key}"
    try:
        values = json.loads(seen)
        schema = values.get("schema_version")
    except (ValueError, AttributeError):
        raise ArtifactError(f"{where}: expected a JSON object, found other text; put a copy of it back") from None
    if schema != SCHEMA:
        raise UnknownSchemaError(
            f"{where}: expected {SCHEMA}, found {schema!r}; upgrade eagle3-pipeline, or, if it is older, move it away: "
            "the next drafter that passes is published anew"
        )
    try:
        return Release.model_validate(values), seen
    except ValidationError as error:
        raise ArtifactError(f"{where}: {error.error_count()} invalid fields; put a copy of it back") from None


def _swap(store: ObjectStore, name: str, move: Callable[[Release | None], Release | None]) -> Release | None:
    """Write what `move` makes of the release; it is asked again where another writer came first, None stops."""
    for _ in range(_TRIES):
        release, seen = _read(store, name)
        moved = move(release)
        if moved is None or moved is release:
            return moved
        if store.swap(pointer_key(name), moved.model_dump_json(indent=1).encode(), seen):
            return moved
    raise StoreUnreachableError(f"{store.root}/{pointer_key(name)}: others publish {name} all the time; try again")
