"""Jobs, with real processes: each guarantee is provoked by killing something."""

import json
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from eagle3_core import jobs
from eagle3_core.errors import CaptureMismatchError, Eagle3Error, JobError, JobFencedError, JobLostError
from eagle3_core.jobs import JobSpec
from eagle3_core.jobs.files import COMMAND, EXIT, LEASE_EXPIRED, SILENT, SUPERVISOR
from eagle3_core.jobs.processes import Identity, members
from eagle3_core.jobs.supervisor import Lease

REF = {"kind": "corpus", "key": "regenerate/abc", "manifest_sha256": "0" * 64, "facts": {}}
PRELUDE = (
    f"RESULT = {json.dumps(REF)!r}"
    + """
import json, os, pathlib, signal, subprocess, sys, time
job = pathlib.Path(os.environ["EAGLE3_JOB_DIR"])
(job / "work").mkdir(exist_ok=True)
def succeed(): (job / "result.json").write_text(RESULT)
def note(text):
    with (job / "work" / "notes").open("a") as file: file.write(text + "\\n")
"""
)


@pytest.fixture
def spec(tmp_path):
    made = []

    def make(code, name="job"):
        directory = tmp_path / name
        made.append(directory)
        return JobSpec(directory, (sys.executable, "-c", PRELUDE + textwrap.dedent(code)), tmp_path)

    yield make
    for directory in made:
        jobs.end_processes(directory, grace_s=0)


def until(condition):
    while not condition():
        time.sleep(0.02)


def notes(directory):
    file = directory / "work" / "notes"
    return file.read_text().split() if file.exists() else []


def supervisor(job):
    return json.loads((job.directory / SUPERVISOR).read_text())["pid"]


# A server that hides in a session of its own, and the stage that started it.
WITH_RUNAWAY = """
if notes_before := (job / "work" / "notes").exists():
    note("second"); succeed(); sys.exit()
note("first")
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
time.sleep(1000)
"""


def test_the_log_begins_with_what_is_run(spec):
    job = jobs.start_or_join(spec("succeed()"), "one")
    jobs.wait(job, poll_s=0.02)
    assert (job.directory / "log").read_text().startswith(f"supervisor: attempt 1: {sys.executable}")


def test_a_job_returns_its_reference_and_a_second_start_joins_without_running_it_again(spec):
    work = spec("note('ran'); succeed()")
    ref = jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)
    again = jobs.start_or_join(work, "two")
    assert ref.key == jobs.wait(again).key == REF["key"]
    assert again.joined
    assert notes(work.directory) == ["ran"]


def test_always_runs_a_succeeded_job_again(spec):
    work = spec("note('ran'); succeed()")
    jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)
    jobs.wait(jobs.start_or_join(work, "one", always=True), poll_s=0.02)
    assert notes(work.directory) == ["ran", "ran"]


def test_a_running_job_is_joined_and_has_no_twin(spec):
    work = spec("note('ran')\nwhile not (job / 'go').exists(): time.sleep(0.02)\nsucceed()")
    first = jobs.start_or_join(work, "one")
    until(lambda: notes(work.directory))
    second = jobs.start_or_join(work, "two", always=True)
    assert second.joined
    assert second.state().name == "running"
    (work.directory / "go").touch()
    assert jobs.wait(first, poll_s=0.02) == jobs.wait(second, poll_s=0.02)
    assert notes(work.directory) == ["ran"]


def test_many_starters_at_once_start_one_job(spec, tmp_path):
    work = spec("note('ran'); time.sleep(1); succeed()")
    code = (
        "import sys, pathlib; from eagle3_core import jobs; "
        "jobs.wait(jobs.start_or_join(jobs.JobSpec(pathlib.Path(sys.argv[1]), tuple(sys.argv[2:]), "
        "pathlib.Path('/')), 'x'))"
    )
    starters = [subprocess.Popen([sys.executable, "-c", code, str(work.directory), *work.argv]) for _ in range(4)]
    assert [starter.wait() for starter in starters] == [0] * 4
    assert notes(work.directory) == ["ran"]


def test_a_stage_error_comes_back_as_its_own_type_with_its_message(spec):
    work = spec(
        """
        (job / "error.json").write_text(json.dumps(
            {"type": "CaptureMismatchError", "remedy": "retry", "message": "rows 7, tokens 8"}))
        sys.exit(75)
        """
    )
    with pytest.raises(CaptureMismatchError, match="rows 7, tokens 8"):
        jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)


def test_a_type_of_another_version_is_retried_where_its_remedy_says_so(spec):
    for remedy, kind in (("retry", JobLostError), ("fix", JobError)):
        work = spec(
            f"""
            (job / "error.json").write_text(json.dumps(
                {{"type": "OfTomorrowError", "remedy": "{remedy}", "message": "no answer"}}))
            sys.exit(75)
            """
        )
        with pytest.raises(kind, match="no answer"):
            jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)


def test_every_error_a_stage_can_raise_is_known_to_who_reads_its_result():
    import eagle3_core.engine.client
    import eagle3_core.storage.s3  # noqa: F401

    def below(kind):
        return [kind, *(one for sub in kind.__subclasses__() for one in below(sub))]

    known = {one.__name__ for one in below(Eagle3Error) if one.__module__ == "eagle3_core.errors"}
    foreign = {one for one in below(Eagle3Error) if one.__module__.startswith("eagle3_core")} - {
        one for one in below(Eagle3Error) if one.__module__ in ("eagle3_core.errors", "eagle3_core.cli.airflow_local")
    }
    assert "StoreUnreachableError" in known and "EngineUnreachableError" in known
    assert not {
        one for one in foreign if not one.__module__.startswith(("eagle3_core.cli", "eagle3_core.evaluate.bench"))
    }


def test_a_traceback_is_a_lost_job_that_quotes_the_last_line(spec):
    work = spec("raise RuntimeError('no such luck')")
    with pytest.raises(JobLostError, match="RuntimeError: no such luck"):
        jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)


def test_a_failed_job_starts_a_new_attempt_in_the_same_directory_with_its_partial_work(spec):
    work = spec("note('ran')\nif len((job / 'work' / 'notes').read_text().split()) < 2: sys.exit(1)\nsucceed()")
    with pytest.raises(JobLostError):
        jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)
    assert jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02).key == REF["key"]
    assert notes(work.directory) == ["ran", "ran"]
    assert json.loads((work.directory / COMMAND).read_text())["attempt"] == 2


@pytest.mark.parametrize("victim", ["supervisor", "stage"])
def test_kill_9_leaves_no_process_and_the_next_attempt_finishes(spec, victim):
    work = spec(WITH_RUNAWAY)
    job = jobs.start_or_join(work, "one")
    until(lambda: len(members(work.directory)) == 3)
    pids = members(work.directory)
    stage = next(pid for pid in pids if pid != supervisor(job) and parent(pid) == supervisor(job))
    os.kill(supervisor(job) if victim == "supervisor" else stage, signal.SIGKILL)
    with pytest.raises(JobLostError):
        jobs.wait(job, poll_s=0.02)
    assert members(work.directory) == []
    assert jobs.wait(jobs.start_or_join(work, "two"), poll_s=0.02).key == REF["key"]
    assert notes(work.directory) == ["first", "second"]
    assert members(work.directory) == []


def parent(pid):
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


def test_a_restart_after_the_supervisor_died_unseen_ends_what_it_left(spec):
    work = spec(WITH_RUNAWAY)
    job = jobs.start_or_join(work, "one")
    until(lambda: len(members(work.directory)) == 3)
    os.kill(supervisor(job), signal.SIGKILL)
    until(lambda: job.state().name == "lost")
    assert members(work.directory)
    jobs.wait(jobs.start_or_join(work, "two"), poll_s=0.02)
    assert members(work.directory) == []


def test_kill_9_of_the_starter_leaves_the_job_running_and_the_next_starter_joins_it(spec):
    work = spec("note('ran')\nwhile not (job / 'go').exists(): time.sleep(0.02)\nsucceed()")
    code = (
        "import sys, pathlib; from eagle3_core import jobs; "
        "jobs.wait(jobs.start_or_join(jobs.JobSpec(pathlib.Path(sys.argv[1]), tuple(sys.argv[2:]), "
        "pathlib.Path('/')), 'worker'))"
    )
    starter = subprocess.Popen([sys.executable, "-c", code, str(work.directory), *work.argv])
    until(lambda: notes(work.directory))
    starter.kill()
    starter.wait()
    job = jobs.start_or_join(work, "retry")
    assert job.joined
    (work.directory / "go").touch()
    jobs.wait(job, poll_s=0.02)
    assert notes(work.directory) == ["ran"]


def test_kill_lets_the_stage_end_by_itself_then_sweeps(spec):
    work = spec(
        """
        signal.signal(signal.SIGTERM, lambda *_: (note("ended"), sys.exit(1)))
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(1000)"], start_new_session=True)
        note("ready")
        while True: time.sleep(0.02)
        """
    )
    job = jobs.start_or_join(work, "one")
    until(lambda: notes(work.directory))
    jobs.kill(job.directory, "one")
    assert notes(work.directory) == ["ready", "ended"]
    assert members(work.directory) == []
    assert job.state().name == "failed"


def test_a_stale_owner_cannot_kill_a_job_that_another_attempt_took_over(spec):
    work = spec("note('ran'); time.sleep(1000)")
    stale = jobs.start_or_join(work, "try 1")
    jobs.start_or_join(work, "try 2")
    with pytest.raises(JobFencedError, match="try 2"):
        jobs.kill(stale.directory, "try 1")
    assert stale.state().name == "running"


def test_a_job_that_nobody_follows_ends_when_its_lease_runs_out(spec):
    work = spec(WITH_RUNAWAY)
    job = jobs.start_or_join(work, "one", lease_s=1)
    until(lambda: job.state().name == "failed")
    assert json.loads((work.directory / EXIT).read_text())["code"] == LEASE_EXPIRED
    assert members(work.directory) == []


BLOCKED = """
# A writer that blocks for ever: nobody reads what it writes.
(job / "progress.json").write_text('{"stage": "capture", "phase": "writing"}')
if (job / "work" / "freed").exists(): succeed(); sys.exit()
read, write = os.pipe()
while True:
    os.write(write, bytes(4096))
"""


def test_f1_a_job_whose_write_never_returns_ends_with_one_line_and_goes_on_once_it_can(spec):
    work = spec(BLOCKED)
    job = jobs.start_or_join(work, "one", silence_s=1.5, grace_s=0.1)
    with pytest.raises(JobLostError, match=r"no sign of life for too long, it was ended; last: writing; see"):
        jobs.wait(job)
    assert json.loads((work.directory / EXIT).read_text())["code"] == SILENT
    assert members(work.directory) == []
    (work.directory / "work" / "freed").touch()
    assert jobs.wait(jobs.start_or_join(work, "one")).key == "regenerate/abc"


def test_a_job_that_logs_or_reports_may_take_as_long_as_it_likes(spec):
    code = """
    for number in range(16):
        time.sleep(0.5)
        print(number, flush=True) if number < 8 else (job / "progress.json").write_text("{}")
    succeed()
    """
    assert jobs.wait(jobs.start_or_join(spec(code), "one", silence_s=1.5)).key == "regenerate/abc"


def test_a_job_whose_log_was_removed_lives_while_it_logs(spec):
    code = """
    (job / "log").unlink()
    for number in range(8):
        time.sleep(0.5)
        print(number, flush=True)
    succeed()
    """
    assert jobs.wait(jobs.start_or_join(spec(code), "one", silence_s=1.5)).key == "regenerate/abc"


def test_a_machine_that_slept_does_not_cost_the_lease(tmp_path, monkeypatch):
    now = 100.0
    monkeypatch.setattr("eagle3_core.jobs.supervisor.time.monotonic", lambda: now)
    lease = Lease([tmp_path / "lease"], 60)
    now += 3600
    assert not lease.expired()
    for _ in range(13):
        now += 4
        assert not lease.expired()
    now += 4
    assert lease.expired()


def test_a_later_process_with_the_same_number_is_not_the_job():
    here = Identity.of(os.getpid())
    assert here.alive()
    assert not Identity(here.pid, str(int(here.starttime) - 1), here.boot_id).alive()
    assert not Identity(here.pid, here.starttime, "another boot").alive()


def test_a_job_does_not_see_the_schedulers_secrets(spec, monkeypatch):
    monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "secret")
    monkeypatch.setenv("PYTHONPATH", "/nowhere")
    work = spec("note(str([name for name in os.environ if 'AIRFLOW' in name or name == 'PYTHONPATH'])); succeed()")
    jobs.wait(jobs.start_or_join(work, "one"), poll_s=0.02)
    assert notes(work.directory) == ["[]"]
