"""A drafter artifact as one directory, wherever its store keeps the files."""

from __future__ import annotations

import shutil
from pathlib import Path

from eagle3_core.storage import Artifact

FILES = ("config.json", "model.safetensors")


def materialise(drafter: Artifact, directory: Path) -> Path:
    """Return `directory` after linking the drafter's verified files into it."""
    shutil.rmtree(directory, ignore_errors=True)
    directory.mkdir(parents=True)
    for name in FILES:
        (directory / name).symlink_to(drafter.verified_path(name).resolve())
    return directory
