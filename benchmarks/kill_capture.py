# ruff: noqa: T201 - a program
"""Kill a capture again and again, finish it, and compare it with one that nobody disturbed.

`python benchmarks/kill_capture.py` plans at least `--shards` small shards of random samples for the demo's target and
captures them twice: in one go, and with `--kills` kill -9 at random moments, of the capture process or of one of the
engine's, each followed by another attempt as a scheduler would make it. Then every sample must be there once, and every
byte be the same. Prints one JSON line; anything else is an error.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle3_core.artifacts import Ref
from eagle3_core.data.plan import read_plan
from eagle3_core.data.shards import INDEX
from eagle3_core.repair import inspect
from eagle3_core.storage import find, load, open_store
from eagle3_core.storage.manifest import MANIFEST

VICTIMS = ("capture", "engine")
ORPHANS_MAY_LIVE_S = 20.0


def processes_of(mark: str) -> list[int]:
    """Return the living processes that carry a mark in their environment, whoever their parent is now."""
    needle, found = mark.encode(), []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            if state != "Z" and needle in (entry / "environ").read_bytes().split(b"\0"):
                found.append(int(entry.name))
        except OSError:
            continue
    return found


@dataclass
class Capture:
    """The capture of one plan in one root, as jobs: one process each."""

    root: Path
    run: str
    plan: Ref
    attempts: int = 0
    asked: int = 0
    keys: list[str] = field(init=False)

    def __post_init__(self) -> None:
        self.store = open_store(str(self.root))
        self.keys = [shard.key for shard in read_plan(load(self.store, self.plan)).shards]

    @property
    def missing(self) -> list[int]:
        """Return the shards that are not committed."""
        return [index for index, key in enumerate(self.keys) if find(self.store, key) is None]

    @property
    def committed(self) -> int:
        """Return how many shards are committed."""
        return sum((self.root / key / MANIFEST).exists() for key in self.keys)

    @property
    def job(self) -> Path:
        """Return the directory of the job."""
        return self.root / "jobs" / "capture"

    @property
    def mark(self) -> str:
        """Return what every process of the job carries in its environment."""
        return f"EAGLE3_JOB_DIR={self.job}"

    @property
    def engine_starts(self) -> int:
        """Return how many engines were started."""
        return (self.job / "work" / "sglang.log").read_text(errors="replace").count("\n$ ") + 1

    def start(self, index: int) -> subprocess.Popen[bytes]:
        """Start the task of one shard; it goes on with others."""
        self.attempts += 1
        self.job.mkdir(parents=True, exist_ok=True)
        inputs = json.dumps({"shard_plan": self.plan.model_dump(mode="json")})
        command = [sys.executable, "-m", "eagle3_core", "capture", "--root", str(self.root), "--run", self.run]
        self.asked = index
        command += ["--inputs", inputs, "--index", str(index)]
        with (self.job / "log").open("ab") as log:
            environment = os.environ | {"EAGLE3_JOB_DIR": str(self.job)}
            return subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)

    def finish(self) -> None:
        """Run the task of every shard, one after the other, as Airflow does with one slot."""
        for index in range(len(self.keys)):
            if self.start(index).wait():
                raise SystemExit(f"capture failed: {(self.job / 'log').read_text()[-2000:]}")

    def kill(self, process: subprocess.Popen[bytes], victim: str, chance: random.Random) -> str:
        """Kill; return who was hit: there is no engine yet in the first moments."""
        engine = [pid for pid in processes_of(self.mark) if pid != process.pid]
        if victim == "engine" and engine:
            os.kill(chance.choice(engine), signal.SIGKILL)
        else:
            victim = "capture"
            process.kill()
        # An engine that dies while it works ahead fails nobody: the shard that was asked for is there.
        if process.wait() == 0 and (victim == "capture" or find(self.store, self.keys[self.asked]) is None):
            raise SystemExit(f"a capture whose {victim} was killed ended as if nothing had happened")
        deadline = time.monotonic() + ORPHANS_MAY_LIVE_S
        while left := processes_of(self.mark):
            if time.monotonic() > deadline:
                raise SystemExit(f"{victim} was killed and left processes {left}")
            time.sleep(0.05)
        return victim


def disturb(capture: Capture, kills: int, seed: int) -> Counter[str]:
    """Kill at random moments between the first shard and the last; return who was hit, and when."""
    chance, hits = random.Random(seed), Counter[str]()
    victims = [VICTIMS[number % 2] for number in range(kills)]
    chance.shuffle(victims)
    # A kill is due when so many shards are committed, and a random moment later: in the middle of one, or of a commit.
    shards = len(capture.keys)
    moments = sorted(chance.randrange(shards // 2) for _ in range(kills))
    for due, victim in zip(moments, victims, strict=True):
        process = capture.start(capture.missing[0])
        if capture.committed > due:
            # The last attempt came further than this kill was meant for: it hits the start of the engine.
            time.sleep(chance.uniform(0.2, 8.0))
        while process.poll() is None and capture.committed <= due:
            time.sleep(0.01)
        time.sleep(chance.uniform(0.0, 0.005 * shards))
        if process.poll() is not None:
            raise SystemExit(f"ended by itself: {(capture.job / 'log').read_text()[-2000:]}")
        begun = any((capture.job / "work" / "out").glob("*/*.safetensors"))
        hits[f"{capture.kill(process, victim, chance)} while {'capturing' if begun else 'starting'}"] += 1
    return hits


def compare(one: Capture, other: Capture, sample_ids: list[str]) -> None:
    """Demand every sample once and the same bytes in both.

    Raises:
        SystemExit: says what differs.
    """
    digests = []
    for capture in (one, other):
        findings = inspect(capture.store, capture.plan, lambda _bytes: None)
        bad = [finding.reason for finding in findings if finding.state != "ok"]
        ids = [name for key in capture.keys for name in load(capture.store, key).json(INDEX)["sample_ids"]]
        if bad or sorted(ids) != sorted(sample_ids):
            raise SystemExit(
                f"expected {len(sample_ids)} samples once, found {len(ids)}, {len(set(ids))} distinct; {bad}"
            )
        digests.append([finding.manifest_sha256 for finding in findings])
    # A manifest names the checksums of every file and tensor.
    if digests[0] != digests[1]:
        raise SystemExit(f"{sum(a != b for a, b in zip(*digests, strict=True))} of {len(digests[0])} shards differ")


def matrix(planned: Path, run: str, plan: Ref, sample_ids: list[str], kills: int, seed: int) -> dict[str, Any]:
    """Capture a plan undisturbed in its root and disturbed in a copy of it; return the figures."""
    copy = planned.with_name(f"{planned.name}-killed")
    shutil.copytree(planned, copy)
    calm, killed = Capture(planned, run, plan), Capture(copy, run, plan)
    began = time.monotonic()
    calm.finish()
    calm_s, began = time.monotonic() - began, time.monotonic()
    hits = disturb(killed, kills, seed)
    killed.finish()
    # One engine for all tasks, and at most one more for every kill.
    if calm.engine_starts != 1 or killed.engine_starts > 1 + kills:
        raise SystemExit(
            f"expected 1 and at most {1 + kills} engines, found {calm.engine_starts}, {killed.engine_starts}"
        )
    killed_s = time.monotonic() - began
    compare(calm, killed, sample_ids)
    return {
        "kills": dict(sorted(hits.items())), "tasks": [calm.attempts, killed.attempts],
        "engine_starts": [calm.engine_starts, killed.engine_starts], "shards": len(calm.keys),
        "samples": len(sample_ids), "undisturbed_s": round(calm_s, 1), "killed_s": round(killed_s, 1),
        "overhead_s_per_kill": round((killed_s - calm_s) / kills, 1), "identical": True,
    }  # fmt: skip


def main() -> None:
    """Parse, kill, compare, print one JSON object."""
    from synthetic import Pipeline, answers

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--shards", type=int, default=64)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--root", type=Path, help="where shards are written; a fresh directory below it is used")
    arguments = parser.parse_args()
    corpus = answers(arguments.shards * 14, 80.0, 480, 2048)
    with tempfile.TemporaryDirectory(dir=arguments.root) as scratch:
        overrides = {"capture.shard_tokens": 1024, "capture.prefill_tokens": 512}
        pipeline = Pipeline.with_corpus(Path(scratch) / "root", overrides, corpus)
        plan = pipeline.stage("plan_capture")
        if plan.facts["num_shards"] < arguments.shards:
            raise SystemExit(f"expected {arguments.shards} shards, planned {plan.facts['num_shards']}")
        ids = [answer.id for answer in corpus]
        print(json.dumps(matrix(pipeline.root, pipeline.key, plan, ids, arguments.kills, arguments.seed)))


if __name__ == "__main__":
    main()
