"""Which checkpoints of an output exist, and how one goes. Light: the stage process imports no torch."""

from __future__ import annotations

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


def drop_checkpoint(store: ObjectStore, key: str) -> None:
    """Delete one checkpoint, its manifest first: from then on it is absent."""
    store.remove(f"{key}/{MANIFEST}")
    for name in store.list_keys(key):
        store.remove(name)
