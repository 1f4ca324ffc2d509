"""StageContext: what a stage gets to see, and how it hands in its output."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.config import RunConfig
from eagle3_core.pipeline import Stage, output_key, shard_key
from eagle3_core.progress import Progress
from eagle3_core.storage import Artifact, ObjectStore, commit, find_sound, load


@dataclass(frozen=True)
class StageContext:
    """One execution of one stage.

    `work` is a local directory that survives retries of the same job, on the root's filesystem where the root is local.
    `index` is set for fanned-out stages.
    """

    stage: Stage
    run: RunConfig
    store: ObjectStore
    inputs: Mapping[str, Ref]
    index: int | None
    work: Path
    progress: Progress

    def input(self, name: str) -> Artifact:
        """Open an input."""
        return load(self.store, self.inputs[name])

    def key(self, content: Mapping[str, str] | None = None) -> str:
        """Return where this execution's output belongs."""
        base = output_key(self.stage, self.run, self.inputs, content=content)
        return base if self.index is None else shard_key(base, self.index)

    def done(self, content: Mapping[str, str] | None = None) -> Ref | None:
        """Return the output if it is already committed: a retry then costs one read. A damaged one is put aside."""
        return find_sound(self.store, self.key(content))

    def staged(self) -> Path:
        """Return an empty directory for the files of the output."""
        directory = self.work / "out"
        shutil.rmtree(directory, ignore_errors=True)
        directory.mkdir(parents=True)
        return directory

    def commit(
        self,
        staged: Path,
        *,
        content: Mapping[str, str] | None = None,
        facts: Mapping[str, Any] | None = None,
        ref_facts: Mapping[str, Any] | None = None,
        replace: bool = False,
    ) -> Ref:
        """Commit the staged files as this execution's output; see `storage.commit`."""
        return commit(
            self.store,
            self.key(content),
            staged,
            self.stage.produces,
            inputs=self.inputs,
            facts=facts,
            ref_facts=ref_facts,
            replace=replace,
        )
