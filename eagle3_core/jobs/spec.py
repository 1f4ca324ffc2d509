"""Which command a stage is, and in which directory its job lives: equal work, equal directory."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.artifacts import Kind, Ref
from eagle3_core.config import RunConfig
from eagle3_core.config.base import canonical_sha256
from eagle3_core.identity import resolve_target
from eagle3_core.pipeline import STAGES, Stage
from eagle3_core.prompt_files import prompt_files
from eagle3_core.storage import open_store


@dataclass(frozen=True)
class JobSpec:
    """A command and the directory its job owns."""

    directory: Path
    argv: tuple[str, ...]
    cwd: Path


def stage_job(root: str, run_key: str, stage_name: str, inputs: Mapping[str, Ref], index: int | None = None) -> JobSpec:
    """Return the job of one stage, or of one element of a fanned-out stage.

    Raises:
        ArtifactError: the inputs are not those the stage reads.
        ConfigError: the frozen run configuration is not one.
    """
    store = open_store(root)
    stage = STAGES[stage_name]
    stage.check_inputs(inputs)
    run = RunConfig.parse(json.loads(store.read_bytes(run_key)), run_key)
    python = engine_python()
    digest = canonical_sha256(
        {
            "stage": [stage.name, stage.version],
            "run": _slice(stage, run),
            "inputs": {name: ref.manifest_sha256 for name, ref in inputs.items()},
            "outside": _outside(stage, run, python),
            "index": index,
        }
    )
    name = "-".join([stage.name, *([f"{index:05d}"] if index is not None else []), digest[:12]])
    passed = json.dumps({name: ref.model_dump(mode="json") for name, ref in inputs.items()}, sort_keys=True)
    argv = [str(python), "-P", "-m", "eagle3_core", stage.name, "--root", store.root, "--run", run_key,
            "--inputs", passed]  # fmt: skip
    if index is not None:
        argv += ["--index", str(index)]
    return JobSpec(jobs_directory(store.root) / name, tuple(argv), Path.cwd())


def repair_job(root: str, plan: Ref, *, check_only: bool) -> JobSpec:
    """Return the job that verifies the shards of a plan; it prints the indexes to capture again, as its last line."""
    store = open_store(root)
    passed = json.dumps(plan.expect(Kind.SHARD_PLAN).model_dump(mode="json"), sort_keys=True)
    argv = [str(engine_python()), "-P", "-m", "eagle3_core.repair", "--root", store.root, "--plan", passed]
    directory = jobs_directory(store.root) / f"repair-{plan.manifest_sha256[:12]}"
    return JobSpec(directory, (*argv, *(["--check-only"] if check_only else [])), Path.cwd())


def jobs_directory(root: str) -> Path:
    """Return where the jobs of a root live: below a directory root; on this machine's disk for a bucket."""
    if root.startswith("s3://"):
        return Path.home() / ".eagle3" / "jobs" / canonical_sha256(root)[:12]
    return Path(root).expanduser().resolve() / "jobs"


def engine_python() -> Path:
    """Return the interpreter of the engine environment.

    EAGLE3_ENGINE_PYTHON, or the one beside this package's checkout, or the one that runs now.
    """
    if named := os.environ.get("EAGLE3_ENGINE_PYTHON"):
        return Path(named)
    beside = Path(__file__).resolve().parents[2] / ".venvs" / "engine" / "bin" / "python"
    return beside if beside.exists() else Path(sys.executable)


def _slice(stage: Stage, run: RunConfig) -> dict[str, object]:
    if stage.produces == Kind.RELEASE:
        return {"name": run.name, **run.slice(stage.sections)}
    everything = tuple(name for name in RunConfig.model_fields if name not in ("name", "champion"))
    return run.slice(everything if stage.produces == Kind.PREFLIGHT else stage.sections)


def _outside(stage: Stage, run: RunConfig, python: Path) -> list[object]:
    """Return what changes when files a stage reads outside the store may have changed; the stage itself hashes them."""
    found: list[object] = []
    if "target" in stage.sections or not stage.inputs:
        target = resolve_target(run)
        found += [_stamp(path) for path in sorted(target.iterdir())] if target.is_dir() else [str(target)]
    if not stage.inputs:
        found += [_stamp(path) for path in prompt_files(run)]
    if stage.engine:
        packages = python.parent.parent.glob("lib/python3*/site-packages/*.dist-info")
        wanted = ("sglang-", "torch-", "transformers-")
        found += sorted(path.name for path in packages if path.name.startswith(wanted))
    return found


def _stamp(path: Path) -> list[object]:
    if not path.exists():
        return [str(path)]
    status = path.stat()
    return [str(path), status.st_size, status.st_mtime_ns]
