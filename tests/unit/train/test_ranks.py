"""Two ranks share rows, parameters, moments and a validation, and end with what one would have."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from eagle3_core.data.batches import pack, share
from eagle3_core.storage import load, open_store
from eagle3_core.train.checkpoint import Checkpoints
from eagle3_core.train.distributed import Ranks
from eagle3_core.train.learner import Learner
from eagle3_core.train.loader import batches
from eagle3_core.train.optim import learning_rate
from eagle3_core.train.rotation import checkpoint_key, newest_checkpoint
from eagle3_core.train.validate import validate
from tests.unit.train.conftest import MemoryFeatures
from tests.unit.train.two_ranks import CLIP, SMALL, STEPS

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def pair(request, tmp_path_factory):
    """What two processes found, their folder and their precision."""
    folder = tmp_path_factory.mktemp("pair")
    environment = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.unit.train.two_ranks", str(rank), str(folder), request.param],
            cwd=ROOT, env=environment, stderr=subprocess.PIPE, text=True,
        )
        for rank in range(2)
    ]  # fmt: skip
    for process in processes:
        _, errors = process.communicate(timeout=100)
        assert process.returncode == 0, errors[-3000:]
    return folder, [json.loads((folder / f"rank-{rank}.json").read_text()) for rank in range(2)], request.param


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch):
    monkeypatch.setattr("eagle3_core.train.distributed.BLOCK", SMALL)
    torch.set_num_threads(1)


def alone(job, steps):
    """Return the learner after steps of two ranks' rows, summed as two ranks sum them, and updated as a whole."""
    learner, order = Learner.of(job, Ranks.alone()), job.order
    for step in range(steps):
        halves = []
        for rank in range(2):
            learner.sums.clear()
            mine = share(order.rows(step), order.lengths, rank, 2)
            for batch in batches(job.features, mine, torch.device("cpu"), job.dtype):
                learner.accumulate(batch)
            halves.append((learner.sums.gradients.clone(), learner.sums._small.clone()))
        learner.sums.gradients.copy_(halves[0][0] + halves[1][0])
        learner.sums._small.copy_(halves[0][1] + halves[1][1])
        learner.update(learning_rate(step, order.total_steps, job.training))
    return learner


@pytest.fixture
def features():
    return MemoryFeatures(held_out=8)


def test_parameters_and_moments_in_parts_are_those_of_a_whole_to_the_last_bit(pair, make_job):
    folder, ranks, precision = pair
    assert [rank["state"] for rank in ranks] == [STEPS, STEPS], "one rank asked, both stopped"
    job = make_job(precision=precision, weight_decay=0.5, max_grad_norm=CLIP)
    parameters, moments = alone(job, STEPS).optimizer.collect()
    count = sum(tensor.numel() for tensor in parameters.values())
    assert [rank["part"] for rank in ranks] == [-(-count // (2 * SMALL)) * SMALL] * 2, "a half each"
    kept = load(open_store(str(folder)), checkpoint_key("train/x", STEPS))
    for name, expected in parameters.items():
        assert torch.equal(load_file(kept.path("drafter.safetensors"))[name], expected), name
    for name, expected in moments.items():
        assert torch.equal(load_file(kept.path("optimizer.safetensors"))[name], expected), name


def test_another_number_of_ranks_resumes_with_all_that_was_saved(pair, make_job):
    folder, _, precision = pair
    store, job = open_store(str(folder)), make_job(precision=precision, weight_decay=0.5, max_grad_norm=CLIP)
    learner = Learner.of(job, Ranks.alone())
    newest = newest_checkpoint(store, "train/x")
    state = Checkpoints(store, "train/x", folder / "elsewhere", job.training, newest).resume(learner.optimizer)
    assert state.step == STEPS
    kept = load(store, newest)
    parameters, moments = learner.optimizer.collect()
    for found, name in ((parameters, "drafter.safetensors"), (moments, "optimizer.safetensors")):
        for key, tensor in found.items():
            assert torch.equal(load_file(kept.path(name))[key], tensor), key


def test_a_validation_over_two_ranks_is_that_of_one(pair, make_job):
    folder, ranks, precision = pair
    job = make_job(precision=precision, weight_decay=0.5, max_grad_norm=CLIP)
    assert len(pack(job.order.lengths, job.held_out, job.training.row_tokens)) > 1, "both ranks have a row"
    learner = Learner.of(job, Ranks.alone())
    store = open_store(str(folder))
    newest = newest_checkpoint(store, "train/x")
    Checkpoints(store, "train/x", folder / "elsewhere", job.training, newest).resume(learner.optimizer)
    expected = validate(job, learner, Ranks.alone(), lambda: False)
    assert ranks[0] == ranks[1]
    assert ranks[0]["report"]["samples"] == expected.report()["samples"]
    assert ranks[0]["trained"] == list(expected.trained.greedy.valid)
    for found, row in zip(ranks[0]["report"]["by_depth"], expected.table(), strict=True):
        assert found == pytest.approx(row)


def test_the_gradients_norm_is_that_of_all_ranks_rows_a_chain_and_clips_on_every_rank_alike(pair, make_job):
    folder, ranks, precision = pair
    job, store = make_job(precision=precision, weight_decay=0.5, max_grad_norm=CLIP), open_store(str(folder))
    learner = Learner.of(job, Ranks.alone())
    newest = newest_checkpoint(store, "train/x")
    Checkpoints(store, "train/x", folder / "elsewhere", job.training, newest).resume(learner.optimizer)
    for batch in batches(job.features, job.order.rows(0), torch.device("cpu"), job.dtype):
        learner.accumulate(batch)
    chains = float(learner.sums._fixed[0])
    norm = float(learner.sums.gradients.double().norm()) / chains
    assert norm > CLIP, "nothing would be clipped"
    for rank in ranks:
        assert rank["norm"] == pytest.approx(norm, rel=1e-3)
        assert rank["divisor"] == pytest.approx(chains * norm / CLIP, rel=1e-3)


def test_ranks_that_see_different_things_do_not_go_on(pair):
    _, ranks, _ = pair
    assert {rank["disagreed"] for rank in ranks} == {"ranks disagree about a number: [7, 8]; run again to resume"}


def test_one_rank_that_is_asked_to_stop_ends_a_validation_on_all(pair):
    _, ranks, _ = pair
    assert [rank["stopped"] for rank in ranks] == [True, True]
