"""Who stops a command stops what it had started, and is told so in one line."""

import json
import signal
import subprocess
import sys
import threading
import time

import pytest

from eagle3_core import jobs
from eagle3_core.cli.airflow_api import Api
from eagle3_core.cli.airflow_local import AirflowStoppedError, LocalAirflow
from eagle3_core.jobs.processes import MARK, marked

COMMAND = """
import dataclasses, signal, sys
# Whoever runs the tests in the background of a shell hands down that SIGINT is ignored.
signal.signal(signal.SIGINT, signal.default_int_handler)
from eagle3_core import jobs
from eagle3_core.cli.main import app

job = '''
import pathlib, signal, sys, time
def save(*_):
    pathlib.Path("saved").touch()
    sys.exit(1)
signal.signal(signal.SIGTERM, save)
pathlib.Path("begun").touch()
time.sleep(600)
'''
real = jobs.stage_job
def sleeping(*arguments):
    spec = real(*arguments)
    (spec.directory / "work").mkdir(parents=True, exist_ok=True)
    return dataclasses.replace(spec, argv=(sys.executable, "-c", job), cwd=spec.directory / "work")
jobs.stage_job = sleeping
app(sys.argv[1:])
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_that_is_stopped_ends_its_job_in_an_orderly_way_and_says_how_to_go_on(tmp_path, number):
    command = [sys.executable, "-c", COMMAND, "run", "demo", "--root", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as run:
        end = time.monotonic() + 120
        while not (begun := list(tmp_path.glob("jobs/*/work/begun"))):
            assert time.monotonic() < end
            assert run.poll() is None, run.stderr.read()
            time.sleep(0.05)
        run.send_signal(number)
        try:
            said = run.communicate(timeout=60)[1].splitlines()
        finally:
            run.kill()
    assert run.returncode == 128 + number
    assert said[-1] == "stopped: run the same again, it goes on where it was"
    directory = begun[0].parents[1]
    assert (begun[0].parent / "saved").exists()
    assert jobs.directory_state(directory).name == "failed"
    assert marked(f"{MARK}={directory}") == []


@pytest.fixture
def airflow(tmp_path):
    """An Airflow that ran once, of which nothing is left."""
    home = tmp_path / "airflow"
    home.mkdir()
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    process = {"pid": gone.pid, "starttime": "1", "boot_id": "x"}
    (home / "standalone.json").write_text(json.dumps({"process": process, "port": 9, "root": str(tmp_path)}))
    return LocalAirflow(home, str(tmp_path))


def test_an_airflow_that_died_is_started_again_and_one_that_was_stopped_is_not(airflow, monkeypatch):
    started = []
    monkeypatch.setattr(LocalAirflow, "_start", lambda self, say: started.append(say))
    monkeypatch.setattr(LocalAirflow, "_unhealthy", lambda self: [])
    airflow.ensure(print, again=True)
    assert len(started) == 1
    airflow.stop()
    with pytest.raises(AirflowStoppedError, match=r"were stopped \(`make stop` .*; run the same again"):
        airflow.ensure(print, again=True)
    assert len(started) == 1
    airflow.ensure(print)  # somebody asks for it anew
    assert len(started) == 2
    airflow.ensure(print, again=True)


def test_who_waits_for_a_stopped_airflow_hears_of_it_at_once(airflow):
    threading.Timer(0.5, airflow.stop).start()
    with pytest.raises(AirflowStoppedError):
        Api(airflow)  # nobody listens there
    airflow.stop()


def test_a_stop_interrupts_a_start(airflow, monkeypatch):
    state, stopping = iter([False]), threading.Timer(0.5, airflow.stop)
    monkeypatch.setattr(LocalAirflow, "_start", lambda self, say: stopping.start())
    monkeypatch.setattr(LocalAirflow, "_running", lambda self: next(state, True))
    monkeypatch.setattr(LocalAirflow, "_unhealthy", lambda self: ["scheduler"])
    with pytest.raises(AirflowStoppedError):
        airflow.ensure(print)
    stopping.join(60)
    assert not stopping.is_alive()
