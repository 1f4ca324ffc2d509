"""Where artifacts live: a directory or an S3 prefix, and the commit protocol over either."""

from eagle3_core.storage.manifest import Artifact, Manifest, commit, find, load, quarantine, verify
from eagle3_core.storage.store import ObjectStore, open_store

__all__ = ["Artifact", "Manifest", "ObjectStore", "commit", "find", "load", "open_store", "quarantine", "verify"]
