"""Two machines train together: two torchrun agents that meet by c10d, here both on the loopback."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time

import pytest

from eagle3_core.storage import open_store
from eagle3_core.train.rotation import checkpoint_steps
from tests.integration.test_train import RESUME, finish, processes, start, wait_for_checkpoint
from tests.integration.training_inputs import make_inputs

RANKS = "eagle3_core.train.worker"
AGENT = "eagle3_core.train.agent"


STARTED = []


@pytest.fixture(autouse=True)
def loopback(monkeypatch):
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    yield
    for process in STARTED:  # they wait for the next attempt, after a failure too
        process.kill()
        process.wait()


def free_port():
    """Return a port that is free, and the next one too."""
    while True:
        with socket.create_server(("127.0.0.1", 0)) as one:
            port = one.getsockname()[1]
            try:
                socket.create_server(("127.0.0.1", port + 1)).close()
            except (OSError, OverflowError):
                continue
            return port


def start_node(endpoint, directory):
    directory.mkdir(exist_ok=True)
    environment = {**os.environ, "EAGLE3_JOB_DIR": str(directory), "OMP_NUM_THREADS": "1",
                   "TMPDIR": str(directory)}  # fmt: skip
    with (directory / "log").open("ab") as log:
        command = [sys.executable, "-m", "eagle3_core.train.node", endpoint]
        STARTED.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    return STARTED[-1]


def gone(directory, module, began):
    while processes(directory, module):
        assert time.monotonic() - began < 30, "processes left over"
        time.sleep(0.05)


def test_two_machines_survive_what_happens_to_either_and_train_what_one_does(tmp_path):
    expected = finish(make_inputs(tmp_path / "alone", nproc=2), tmp_path / "alone/job")
    endpoint = f"127.0.0.1:{free_port()}"
    inputs = make_inputs(tmp_path / "both", nproc=1, nodes=2, rdzv_endpoint=endpoint)
    lead, other = tmp_path / "lead", tmp_path / "other"
    node = start_node(endpoint, other)
    cases = (
        (other, AGENT, "ended: torchrun was killed by signal 9 (SIGKILL)"),
        (lead, AGENT, "torchrun was killed by signal 9 (SIGKILL)"),
        (other, RANKS, "was killed by signal 9 (SIGKILL)"),
        (other, "eagle3_core.train.node", "the machine 127.0.0.1 was lost"),
        (other, "SIGTERM", "the machine 127.0.0.1 was stopped by SIGTERM"),
        (lead, "SIGTERM", "training was stopped by SIGTERM"),
    )
    for where, victim, cause in cases:
        step = max(checkpoint_steps(open_store(str(inputs.root)), expected.key), default=0)
        process = start(inputs, lead)
        wait_for_checkpoint(inputs, expected.key, step, process, lead)
        if victim == "SIGTERM":
            (process if where == lead else node).send_signal(signal.SIGTERM)
        else:
            os.kill(processes(where, victim)[-1], signal.SIGKILL)
        began = time.monotonic()
        assert process.wait(60) == RESUME, (lead / "log").read_text()[-3000:]
        gone(lead, "", began)
        gone(other, AGENT, began)
        gone(other, RANKS, began)
        error = json.loads((lead / "error.json").read_text())
        assert error["type"] == "WorkerDiedError"
        assert cause in error["message"], error
        if where == other and victim in ("eagle3_core.train.node", "SIGTERM"):
            assert node.wait(10) == (RESUME if victim == "SIGTERM" else -signal.SIGKILL)
            node = start_node(endpoint, other)
    assert finish(inputs, lead) == expected
    assert node.wait(30) == 0, (other / "log").read_text()[-3000:]
    assert not processes(other)
    assert "training is whole" in (other / "log").read_text()
