"""`python -m eagle3_core STAGE`: the one entry point every job runs."""

from __future__ import annotations

import argparse
import importlib
import json
import os
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from eagle3_core.artifacts import Ref
from eagle3_core.config import RunConfig
from eagle3_core.context import StageContext
from eagle3_core.errors import EXIT_CODES, DefectError, Eagle3Error
from eagle3_core.pipeline import STAGES
from eagle3_core.progress import Progress
from eagle3_core.storage import full_disk_is_typed, open_store

DEFECTS = (ImportError, SyntaxError, NameError, AttributeError, TypeError, AssertionError, NotImplementedError)
"""What only a change of code or installation helps against; other surprises may be the machine's and are retried."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one stage; the output reference goes to `result.json` in the job directory and to the last line printed.

    Returns:
        0, or the exit code of the error's remedy (`errors.EXIT_CODES`).
    """
    parser = argparse.ArgumentParser(prog="python -m eagle3_core", description=__doc__)
    parser.add_argument("stage", choices=STAGES)
    parser.add_argument("--root", required=True, help="directory or s3:// URI of the artifacts")
    parser.add_argument("--run", required=True, help="key of the frozen run configuration below the root")
    parser.add_argument("--inputs", default="{}", help="JSON object: input name to reference")
    parser.add_argument("--index", type=int, help="element of a fanned-out stage")
    arguments = parser.parse_args(argv)
    directory = Path(os.environ.get("EAGLE3_JOB_DIR") or tempfile.mkdtemp(prefix="eagle3-"))
    try:
        ref = _execute(arguments, directory)
    except Eagle3Error as error:
        state = {"type": type(error).__name__, "remedy": error.remedy, "message": " ".join(str(error).split())}
        _write(directory / "error.json", state)
        print(f"error: [{state['type']}] {state['message']}", file=sys.stderr, flush=True)
        return EXIT_CODES[error.remedy]
    values = ref.model_dump(mode="json")
    _write(directory / "result.json", values)
    print(json.dumps(values), flush=True)
    return 0


def _execute(arguments: argparse.Namespace, directory: Path) -> Ref:
    stage = STAGES[arguments.stage]
    run = RunConfig.parse(json.loads(open_store(arguments.root).read_bytes(arguments.run)), arguments.run)
    context = StageContext(
        stage=stage,
        run=run,
        store=open_store(arguments.root, run.training.cache_bytes),
        inputs={name: Ref.parse(value, name) for name, value in json.loads(arguments.inputs).items()},
        index=arguments.index,
        work=directory / "work",
        progress=Progress(stage.name, directory),
    )
    stage.check_inputs(context.inputs)
    context.work.mkdir(parents=True, exist_ok=True)
    try:
        execute: Callable[[StageContext], Ref] = importlib.import_module(f"eagle3_core.stages.{stage.name}").run
        with full_disk_is_typed(context.work):
            return execute(context)
    except DEFECTS as error:
        traceback.print_exc()
        where = traceback.extract_tb(error.__traceback__)[-1]
        raise DefectError(
            f"{stage.name}: {type(error).__name__}: {error} ({where.filename}:{where.lineno}); nothing of the run is "
            "lost; mend the code or the environment (`make setup`), then clear this task or run again"
        ) from error


def _write(path: Path, values: object) -> None:
    temp = path.with_name(f".{path.name}.tmp")
    temp.write_text(json.dumps(values), encoding="utf-8")
    temp.replace(path)


if __name__ == "__main__":
    sys.exit(main())
