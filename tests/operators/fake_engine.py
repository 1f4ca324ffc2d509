"""Stands for the engine's interpreter: the real `python -m eagle3_core`, with stages that commit next to nothing.

What a stage does is told by files in FAKE_DIR: `<stage>.fail` holds {"type": ..., "message": ...} to raise once,
`<stage>.wait` makes it wait until the file is gone, `<stage>.facts` is what its reference says, `bad` is what a repair
finds.
Every execution leaves a line in `calls`.
"""

import importlib
import json
import os
import sys
import time
import types
from pathlib import Path

from eagle3_core import errors
from eagle3_core.__main__ import main
from eagle3_core.context import StageContext

FAKE = Path(os.environ["FAKE_DIR"])
SHARDS = 3


def run(context: StageContext):
    name = context.stage.name
    with (FAKE / "calls").open("a") as file:
        file.write(f"{name} {context.index}\n")
    failing = FAKE / f"{name}.fail"
    if failing.exists():
        told = json.loads(failing.read_text())
        failing.unlink()
        raise getattr(errors, told["type"])(told["message"])
    while (FAKE / f"{name}.wait").exists():
        time.sleep(0.05)
    content = {"facts": told.read_text()} if (told := FAKE / f"{name}.facts").exists() else None
    if done := context.done(content):
        return done
    staged = context.staged()
    facts, files = OUTPUTS.get(name, ({}, {}))
    facts = json.loads(content["facts"]) if content else facts
    for file, text in files.items():
        (staged / file).write_text(text)
    (staged / "name").write_text(name)
    context.progress.update(1, 1, "steps")
    return context.commit(staged, content=content, ref_facts=facts)


def _plan():
    shards = [
        {"index": index, "digest": "0", "sample_ids": [f"{index}-{i}" for i in range(32)], "tokens": 1000 + index}
        for index in range(SHARDS)
    ]
    return json.dumps(
        {"aux_layers": [1, 2, 3], "dtype": "float32", "target_dtype": "float32", "hidden_size": 8,
         "max_sample_tokens": 64, "target": {}, "engine": {}, "shards": shards}
    )  # fmt: skip


OUTPUTS = {
    "plan_capture": ({"num_shards": SHARDS}, {"plan.json": _plan()}),
    "report": (
        {"acceptance_length": 2.5, "trainer_tau": 2.4, "speedup": 1.1, "shape": "7/1/8", "passed": True, "summary": ""},
        {"report.html": "<html>report</html>"},
    ),
    "publish": ({"outcome": "published", "published": True, "said": "Published as demo: Passed."}, {}),
}

if __name__ == "__main__":
    if sys.argv[3] == "eagle3_core.repair":
        print("shard 1: corrupt: sha256", file=sys.stderr, flush=True)
        print((FAKE / "bad").read_text())
        sys.exit()
    from eagle3_core.pipeline import STAGES

    importlib.import_module("eagle3_core.stages")
    for stage in STAGES:
        module = types.ModuleType(f"eagle3_core.stages.{stage}")
        module.run = run
        sys.modules[module.__name__] = module
    # As called: -P -m eagle3_core STAGE ...
    sys.exit(main(sys.argv[4:]))
