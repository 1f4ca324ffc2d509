"""Which checkpoints of an output exist, and which go. Light: the stage process imports no torch."""

from __future__ import annotations

import logging
from collections.abc import Collection

from eagle3_core.artifacts import Ref
from eagle3_core.errors import ArtifactError
from eagle3_core.storage import ObjectStore, quarantine, verify
from eagle3_core.storage.manifest import MANIFEST

LOG = logging.getLogger(__name__)


def checkpoint_key(output: str, step: int) -> str:
    """Return where the checkpoint of a step is."""
    return f"{output}/checkpoints/step-{step:06d}"


def checkpoint_steps(store: ObjectStore, output: str) -> list[int]:
    """Return the steps of all committed checkpoints, rising."""
    prefix = f"{output}/checkpoints/step-"
    keys = store.list_keys(f"{output}/checkpoints")
    found = (key.removeprefix(prefix).split("/") for key in keys if key.startswith(prefix))
    return sorted(int(step) for step, *rest in found if rest == [MANIFEST])


def newest_checkpoint(store: ObjectStore, output: str) -> Ref | None:
    """Return the newest checkpoint that verifies, read or downloaded whole; damaged ones are quarantined."""
    for step in reversed(checkpoint_steps(store, output)):
        key = checkpoint_key(output, step)
        try:
            return verify(store, key).ref
        except ArtifactError as error:
            LOG.warning("checkpoint of step %d set aside: %s", step, error)
            quarantine(store, key, str(error))
    return None


def keep_checkpoints(store: ObjectStore, output: str, steps: Collection[int]) -> None:
    """Delete every checkpoint but those of `steps`, and what killed writers left of one."""
    kept = tuple(f"{checkpoint_key(output, step)}/" for step in steps)
    gone = [key for key in store.list_keys(f"{output}/checkpoints") if not key.startswith(kept)]
    # Manifests first: from then on a checkpoint is absent.
    for key in sorted(gone, key=lambda key: not key.endswith(f"/{MANIFEST}")):
        store.remove(key)
