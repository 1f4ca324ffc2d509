"""Where artifacts live: a directory or an S3 prefix, and the commit protocol over either."""

from eagle3_core.storage.local import full_disk_is_typed, locked, to_disk
from eagle3_core.storage.manifest import (
    PLANNING,
    Artifact,
    Manifest,
    commit,
    committed_keys,
    find,
    find_sound,
    load,
    quarantine,
    verify,
)
from eagle3_core.storage.store import ObjectStore, claim_name, open_store

__all__ = [
    "PLANNING",
    "Artifact",
    "Manifest",
    "ObjectStore",
    "claim_name",
    "commit",
    "committed_keys",
    "find",
    "find_sound",
    "full_disk_is_typed",
    "load",
    "locked",
    "open_store",
    "quarantine",
    "to_disk",
    "verify",
]
