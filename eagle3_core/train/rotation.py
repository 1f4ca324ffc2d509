"""Which checkpoints of an output exist, and which go. Light: the stage process imports no torch."""

from __future__ import annotations

from collections.abc import Collection

from eagle3_core.storage import ObjectStore
from eagle3_core.storage.manifest import MANIFEST


def checkpoint_key(output: str, step: int) -> str:
    """Return where the checkpoint of a step is."""
    return f"{output}/checkpoints/step-{step:06d}"


def checkpoint_steps(store: ObjectStore, output: str) -> list[int]:
    """Return the steps of all committed checkpoints, rising."""
    prefix = f"{output}/checkpoints/step-"
    keys = store.list_keys(f"{output}/checkpoints")
    found = (key.removeprefix(prefix).split("/") for key in keys if key.startswith(prefix))
    return sorted(int(step) for step, *rest in found if rest == [MANIFEST])


def keep_checkpoints(store: ObjectStore, output: str, steps: Collection[int]) -> None:
    """Delete every checkpoint but those of `steps`, and what killed writers left of one."""
    kept = tuple(f"{checkpoint_key(output, step)}/" for step in steps)
    gone = [key for key in store.list_keys(f"{output}/checkpoints") if not key.startswith(kept)]
    # Manifests first: from then on a checkpoint is absent.
    for key in sorted(gone, key=lambda key: not key.endswith(f"/{MANIFEST}")):
        store.remove(key)
