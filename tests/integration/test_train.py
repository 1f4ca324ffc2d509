"""The train stage as a job runs it: a process, torchrun, two gloo ranks, checkpoints in a store."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.artifacts import Ref
from eagle3_core.storage import load, open_store
from eagle3_core.train.rotation import checkpoint_steps
from tests.integration.training_inputs import make_inputs

RESUME = 76


def start(inputs, job):
    job.mkdir(exist_ok=True)
    # One thread a rank: spinning threads of tiny products would wait for each other more than they work.
    environment = {**os.environ, "EAGLE3_JOB_DIR": str(job), "OMP_NUM_THREADS": "1"}
    with (job / "log").open("ab") as log:
        command = [sys.executable, "-m", "eagle3_core", *inputs.arguments()]
        return subprocess.Popen(command, env=environment, stdout=log, stderr=log)


def processes(job, module=""):
    """Return pids of this job's live processes whose command names `module`."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            state = (entry / "stat").read_text().rpartition(")")[2].split()[0]
            mine = f"EAGLE3_JOB_DIR={job}".encode() in (entry / "environ").read_bytes().split(b"\0")
            if mine and state not in "ZX" and module.encode() in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except (OSError, IndexError):
            continue
    return found


def finish(inputs, job):
    process = start(inputs, job)
    assert process.wait(900) == 0, (job / "log").read_text()[-3000:]
    return Ref.parse(json.loads((job / "result.json").read_text()), "result")


def wait_for_checkpoint(inputs, output, after, process, job):
    store = open_store(str(inputs.root))
    end = time.monotonic() + 600
    while time.monotonic() < end:
        assert process.poll() is None, (job / "log").read_text()[-3000:]
        steps = checkpoint_steps(store, output)
        if steps and steps[-1] > after:
            return steps[-1]
        time.sleep(0.02)
    raise AssertionError("no checkpoint in time: " + (job / "log").read_text()[-3000:])


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """An uninterrupted run, while somebody has torchrun's own port."""
    base = tmp_path_factory.mktemp("whole")
    inputs = make_inputs(base)
    with contextlib.ExitStack() as held:
        with contextlib.suppress(OSError):
            held.enter_context(socket.create_server(("", 29500)))
        return inputs, finish(inputs, base / "job")


def test_the_stage_writes_the_drafter_its_sizes_its_vocab_and_what_it_measured(whole):
    inputs, ref = whole
    artifact = load(open_store(str(inputs.root)), ref)
    assert set(artifact.manifest.files) == {
        "drafter.safetensors", "drafter_config.json", "metrics.jsonl", "validation.json", "vocab.safetensors",
    }  # fmt: skip
    report = artifact.json("validation.json")
    assert ref.facts["trainer_tau"] == pytest.approx(report["trainer_tau"], abs=1e-4)
    assert report["trainer_tau"] > 1.5
    walks = report["samples"].values()
    pooled = sum(w["completion_tokens"] for w in walks) / sum(w["verify_passes"][3] for w in walks)
    assert pooled == pytest.approx(report["trainer_tau"])
    assert checkpoint_steps(open_store(str(inputs.root)), ref.key) == [], "checkpoints go when the output is there"
    parameters = load_file(artifact.path("drafter.safetensors"))
    assert all(bool(tensor.isfinite().all()) for tensor in parameters.values())


def test_a_second_run_finds_the_output_and_starts_nothing(whole, tmp_path):
    inputs, ref = whole
    assert finish(inputs, tmp_path / "again") == ref
    assert "starting" not in (tmp_path / "again" / "log").read_text()


def test_killed_in_every_way_and_resumed_the_output_is_the_same_to_the_last_bit(whole, tmp_path):
    _, expected = whole
    inputs, job = make_inputs(tmp_path), tmp_path / "job"
    for victim in ("eagle3_core.train.worker", "eagle3_core.train.agent", "eagle3_core\0train\0", "sigterm"):
        # The attempt before may have saved once more while it was killed: this one is to train before it is.
        step = max(checkpoint_steps(open_store(str(inputs.root)), expected.key), default=0)
        process = start(inputs, job)
        wait_for_checkpoint(inputs, expected.key, step + 2, process, job)
        if victim == "sigterm":
            process.send_signal(signal.SIGTERM)
        else:
            os.kill(processes(job, victim)[-1], signal.SIGKILL)
        killed = time.monotonic()
        code = process.wait(300)
        while processes(job):
            assert time.monotonic() - killed < 30, "processes left over"
            time.sleep(0.05)
        assert code == (-signal.SIGKILL if "\0" in victim else RESUME), (victim, (job / "log").read_text()[-3000:])
        if code == RESUME:
            error = json.loads((job / "error.json").read_text())
            assert error["type"] == "WorkerDiedError"
            cause = {"eagle3_core.train.worker": "SIGKILL", "eagle3_core.train.agent": "SIGKILL", "sigterm": "SIGTERM"}
            assert cause[victim] in error["message"]
    assert finish(inputs, job) == expected
    assert "resumed from the checkpoint" in (job / "log").read_text()


def test_a_rank_that_hangs_ends_the_attempt_and_the_next_one_resumes(whole, tmp_path):
    _, expected = whole
    inputs, job = make_inputs(tmp_path, rank_timeout_s=15), tmp_path / "job"
    process = start(inputs, job)
    wait_for_checkpoint(inputs, expected.key, 2, process, job)
    os.kill(processes(job, "eagle3_core.train.worker")[-1], signal.SIGSTOP)
    assert process.wait(120) == RESUME, (job / "log").read_text()[-3000:]
    assert not processes(job)
    assert "resume" in json.loads((job / "error.json").read_text())["message"]
    assert finish(inputs, job) == expected


def test_one_rank_and_a_second_run_with_two_give_the_loss_curve_of_two(whole, tmp_path):
    inputs, ref = whole
    alone, job = make_inputs(tmp_path, nproc=1), tmp_path / "job"
    process = start(alone, job)
    wait_for_checkpoint(alone, ref.key, 50, process, job)
    process.send_signal(signal.SIGTERM)
    assert process.wait(60) == RESUME
    store = open_store(str(alone.root))
    run = json.loads(store.read_bytes(alone.run_key))
    run["training"]["nproc"] = 2
    store.write_bytes(alone.run_key, json.dumps(run).encode())
    other = finish(alone, job)
    assert "starting 1 rank(s)" in (job / "log").read_text() and "starting 2 rank(s)" in (job / "log").read_text()
    assert other.key == ref.key, "the number of ranks must not change the name"

    def curve(inputs, ref):
        lines = load(open_store(str(inputs.root)), ref).path("metrics.jsonl").read_text().splitlines()
        return torch.tensor([json.loads(line)["loss"] for line in lines if "loss" in json.loads(line)])

    torch.testing.assert_close(curve(alone, other), curve(inputs, ref), atol=1e-3, rtol=1e-3)


def test_another_target_than_the_captured_one_is_refused_in_one_line(tmp_path):
    inputs = make_inputs(tmp_path)
    config = tmp_path / "target" / "config.json"
    config.write_text(config.read_text().replace("10000.0", "20000.0"))
    process = start(inputs, tmp_path / "job")
    assert process.wait(600) == 65
    error = json.loads((tmp_path / "job" / "error.json").read_text())
    assert error["type"] == "TargetError"
    assert "config differ" in error["message"]


def challenge(whole, base, **training):
    """Return the inputs of a run in the root of `whole` that starts from its drafter."""
    inputs, ref = whole
    pin = {"key": ref.key, "manifest_sha256": ref.manifest_sha256}
    store = open_store(str(inputs.root))
    values = json.loads(store.read_bytes(inputs.run_key))
    values["training"] |= {"start_from": "champion", **training}
    target = load(store, ref).json("drafter_config.json")["target_sha256"]
    values["champion"] = {"drafter": pin, "checkpoint": pin, "report": pin, "target_sha256": target}
    key = f"runs/{base.name}.json"
    store.write_bytes(key, json.dumps(values).encode())
    return replace(inputs, run_key=key)


def test_what_the_champion_has_learnt_already_is_not_trained_again(whole, tmp_path):
    assert finish(challenge(whole, tmp_path), tmp_path / "job") == whole[1]
    log = (tmp_path / "job" / "log").read_text()
    assert "nothing new since the champion" in log
    assert "rank(s)" not in log


def test_a_warm_start_goes_on_from_the_champion_at_its_own_rate(whole, tmp_path):
    ref = finish(challenge(whole, tmp_path, epochs=2, warm_learning_rate=1e-4), tmp_path / "job")
    assert ref.key != whole[1].key
    store = open_store(str(whole[0].root))
    first, warm = (
        [json.loads(line) for line in load(store, one).path("metrics.jsonl").read_text().splitlines()]
        for one in (whole[1], ref)
    )
    assert next(line["loss"] for line in warm if "loss" in line) < 0.5 * next(
        line["loss"] for line in first if "loss" in line
    )
    assert max(line["learning_rate"] for line in warm if "learning_rate" in line) <= 1e-4
    assert ref.facts["trainer_tau"] > 0.95 * whole[1].facts["trainer_tau"]
