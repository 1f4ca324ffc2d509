"""Which checkpoints of an output exist, and how one goes. Light: the stage process imports no torch."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Protocol, runtime_checkable

from eagle3_core.storage import ObjectStore
from eagle3_core.storage.manifest import MANIFEST


@runtime_checkable
class Deletes(Protocol):
    """A store that can drop what is no longer needed."""

    def delete_prefix(self, prefix: str) -> None:
        """Delete everything below `prefix/`."""


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
    if isinstance(store, Deletes):
        store.delete_prefix(key)
        return
    directory = Path(store.root) / key
    if directory.is_dir():
        (directory / MANIFEST).unlink(missing_ok=True)
        shutil.rmtree(directory)
