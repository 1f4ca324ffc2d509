"""Start or re-join a job, follow it, end it. No job ever has a twin: starting and killing happen under a lock."""

from __future__ import annotations

import contextlib
import fcntl
import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from eagle3_core.artifacts import Ref
from eagle3_core.errors import (
    CorruptArtifactError,
    Eagle3Error,
    JobError,
    JobFencedError,
    JobLostError,
    NotCommittedError,
    Remedy,
    told,
)
from eagle3_core.jobs.files import (
    COMMAND,
    ERROR,
    EXIT,
    LEASE,
    LOCK,
    LOG,
    OF_ONE_ATTEMPT,
    OWNER,
    PROGRESS,
    RESULT,
    SILENT,
    SUPERVISOR,
    read_json,
    write_json,
)
from eagle3_core.jobs.processes import MARK, Identity, sweep
from eagle3_core.jobs.spec import JobSpec
from eagle3_core.storage import ObjectStore, load

LEASE_S = 600.0
"""A job whose lease nobody renewed for so long is ended: no device is held for a scheduler that never comes back."""
SILENCE_S = 3600.0
"""A job that logs nothing and reports no progress for so long is ended: whatever it waits for does not come."""
GRACE_S = 20.0

StateName = Literal["absent", "running", "succeeded", "failed", "lost"]


@dataclass(frozen=True)
class JobState:
    """`code` is the command's exit code (negative: a signal); `error` the content of error.json."""

    name: StateName
    code: int | None = None
    error: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class Job:
    """A started job, as one of its followers sees it."""

    directory: Path
    joined: bool
    log_start: int

    def state(self) -> JobState:
        """Return how the job is now."""
        return directory_state(self.directory)

    def renew(self) -> None:
        """Renew the lease; a follower calls it at every look."""
        (self.directory / LEASE).touch()

    def progress(self) -> dict[str, Any] | None:
        """Return what the stage last reported."""
        return read_json(self.directory / PROGRESS)

    def log_size(self) -> int:
        """Return how long the log is, in bytes; 0 if somebody removed it."""
        return (self.directory / LOG).stat().st_size if (self.directory / LOG).exists() else 0

    def log_since(self, offset: int) -> tuple[list[str], int]:
        """Return the whole lines of the log after `offset` bytes, and the next offset."""
        try:
            with (self.directory / LOG).open("rb") as file:
                file.seek(offset)
                data = file.read()
        except FileNotFoundError:
            return [], offset
        whole = data[: data.rfind(b"\n") + 1]
        return whole.decode("utf-8", "replace").splitlines(), offset + len(whole)

    def log_tail(self, lines: int = 20) -> list[str]:
        """Return the last lines of the log."""
        return log_tail(self.directory, lines)


def log_tail(directory: Path, lines: int = 20) -> list[str]:
    """Return the last lines of a job's log."""
    with contextlib.suppress(FileNotFoundError), (directory / LOG).open(encoding="utf-8", errors="replace") as file:
        return [line.rstrip("\n") for line in deque(file, lines)]
    return []


def start_or_join(
    spec: JobSpec,
    owner: str,
    *,
    always: bool = False,
    lease_s: float = LEASE_S,
    silence_s: float = SILENCE_S,
    grace_s: float = GRACE_S,
) -> Job:
    """Join the job if it runs or has succeeded, else start an attempt in the same directory; own it from now on.

    `always` starts an attempt even after success: for what must be done anew each time.
    """
    spec.directory.mkdir(parents=True, exist_ok=True)
    with _locked(spec.directory):
        (spec.directory / OWNER).write_text(owner, encoding="utf-8")
        (spec.directory / LEASE).touch()
        state = directory_state(spec.directory)
        joined = state.name == "running" or (state.name == "succeeded" and not always)
        if not joined:
            sweep(spec.directory)
            _start(spec, {"lease_s": lease_s, "silence_s": silence_s, "grace_s": grace_s})
        command = read_json(spec.directory / COMMAND) or {}
    return Job(spec.directory, joined, int(command.get("log_start", 0)))


def directory_state(directory: Path) -> JobState:
    """Return the state of the job that lives in `directory`."""
    supervisor = read_json(directory / SUPERVISOR)
    if supervisor is None:
        return JobState("absent")
    running = Identity(**supervisor).alive()
    # Read after the look at the process: it writes this file before it ends.
    ended = read_json(directory / EXIT)
    if running:
        # With exit.json written it has a moment to live; ended means that no process is left.
        return JobState("running")
    _reap(supervisor["pid"])
    if ended is None:
        return JobState("lost")
    if ended["code"] == 0:
        return JobState("succeeded", 0)
    return JobState("failed", ended["code"], read_json(directory / ERROR))


def committed_result(spec: JobSpec, store: ObjectStore) -> Ref | None:
    """Return the output of a job that has succeeded, if it is still committed; start nothing."""
    if directory_state(spec.directory).name != "succeeded":
        return None
    with contextlib.suppress(NotCommittedError, CorruptArtifactError):
        return load(store, _result(spec.directory)).ref
    return None


def wait(job: Job, on_progress: Callable[[dict[str, Any]], None] | None = None, poll_s: float = 0.5) -> Ref:
    """Renew the lease until the job ends; return its output.

    Raises:
        Eagle3Error: what the stage raised, as the same type; JobLostError where it left no word.
    """
    shown = None
    while (state := job.state()).name == "running":
        job.renew()
        if on_progress and (progress := job.progress()) is not None and progress != shown:
            shown = progress
            on_progress(progress)
        time.sleep(poll_s)
    return outcome(job, state)


def outcome(job: Job, state: JobState) -> Ref:
    """Return the output of a stage's job that has ended, or raise what it raised."""
    raise_failure(job, state)
    return _result(job.directory)


def raise_failure(job: Job, state: JobState) -> None:
    """Raise what the job raised, if it did not succeed; sweep up after it."""
    if state.name != "succeeded":
        sweep(job.directory)
        raise _error(job.directory, state)


def kill(directory: Path, owner: str, grace_s: float = GRACE_S) -> None:
    """End the job of `directory` and every process of it, if `owner` still owns it.

    Raises:
        JobFencedError: another attempt took the job over; nothing was touched.
    """
    with _locked(directory):
        now = (directory / OWNER).read_text(encoding="utf-8")
        if now != owner:
            raise JobFencedError(f"{directory}: expected owner {owner}, found {now}; leave the job to it")
        end_processes(directory, grace_s)


def end_processes(directory: Path, grace_s: float = GRACE_S) -> None:
    """Ask the supervisor to end, wait at most `grace_s` and a little, then kill every process of the job."""
    supervisor = read_json(directory / SUPERVISOR)
    if supervisor is not None and (identity := Identity(**supervisor)).alive():
        with contextlib.suppress(ProcessLookupError):
            os.kill(identity.pid, signal.SIGTERM)
        end = time.monotonic() + grace_s
        while identity.alive() and time.monotonic() < end:
            time.sleep(0.05)
    sweep(directory)


def _reap(pid: int) -> None:
    """Take the exit status if `pid` is a child of this process, so that it leaves no zombie."""
    with contextlib.suppress(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)


def _start(spec: JobSpec, patience: Mapping[str, float]) -> None:
    previous = read_json(spec.directory / COMMAND) or {}
    for name in OF_ONE_ATTEMPT:
        (spec.directory / name).unlink(missing_ok=True)
    log = spec.directory / LOG
    command = {
        "argv": list(spec.argv),
        "cwd": str(spec.cwd),
        "attempt": int(previous.get("attempt", 0)) + 1,
        "log_start": log.stat().st_size if log.exists() else 0,
        **patience,
        "started_at": time.time(),
    }
    write_json(spec.directory / COMMAND, command)
    argv = [sys.executable, "-P", "-m", "eagle3_core.jobs.supervisor", str(spec.directory)]
    append = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    # Not subprocess: the supervisor outlives this process on purpose, which Popen objects take for a leak.
    pid = os.posix_spawn(
        sys.executable,
        argv,
        _environment(spec.directory),
        file_actions=[
            (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
            (os.POSIX_SPAWN_OPEN, 1, str(log), append, 0o644),
            (os.POSIX_SPAWN_DUP2, 1, 2),
        ],
        setsid=True,
    )
    identity = Identity.of(pid)
    if identity is None:
        raise JobLostError(f"{spec.directory}: the supervisor died at once; see {log}")
    write_json(spec.directory / SUPERVISOR, asdict(identity))


def _environment(directory: Path) -> dict[str, str]:
    """Return the caller's environment less its scheduler's settings, which hold secrets, and its Python's."""
    dropped = ("AIRFLOW", "_AIRFLOW", "PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV", "__PYVENV")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # SPT_NOENV: setproctitle, which SGLang uses, would overwrite the mark where /proc shows it.
    return {**kept, MARK: str(directory), "EAGLE3_JOB_DIR": str(directory), "SPT_NOENV": "1", "PYTHONUNBUFFERED": "1"}


def _result(directory: Path) -> Ref:
    values = read_json(directory / RESULT)
    if values is None:
        raise JobLostError(f"{directory.name}: ended without an error and without a result; see {directory / LOG}")
    return Ref.parse(values, str(directory / RESULT))


def _error(directory: Path, state: JobState) -> Eagle3Error:
    log = directory / LOG
    if state.error is not None:
        message = str(state.error["message"])
        # A type of another version: its remedy still says whether a retry helps.
        unknown = JobLostError if state.error.get("remedy") == Remedy.RETRY else JobError
        return told(str(state.error["type"]), message) or unknown(message)
    if state.name == "lost":
        return JobLostError(f"{directory.name}: its supervisor vanished (killed, or the machine restarted); see {log}")
    if state.code == SILENT:
        doing = read_json(directory / PROGRESS) or {}
        said = doing.get("phase") or f"{doing.get('done', 0)} of {doing.get('total')} {doing.get('unit', '')}".strip()
        return JobLostError(f"{directory.name}: no sign of life for too long, it was ended; last: {said}; see {log}")
    if state.code is not None and state.code < 0:
        name = signal.Signals(-state.code).name
        return JobLostError(f"{directory.name}: killed by {name}, often for lack of memory; see {log}")
    said = next((line for line in reversed(log_tail(directory)) if line and not line.startswith("supervisor:")), "")
    return JobLostError(f"{directory.name}: no result, code {state.code}: {said.strip()[:300]}; see {log}")


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    with (directory / LOCK).open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
