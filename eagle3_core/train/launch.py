"""Run torchrun for a stage: forward SIGTERM, wait, and say in one line what went wrong. Light: imports no torch."""

from __future__ import annotations

import collections
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from eagle3_core import errors
from eagle3_core.errors import Eagle3Error, StorageFullError, TrainingError, WorkerDiedError
from eagle3_core.train.request import ERRORS, OUTCOME, REQUEST, Outcome, TrainRequest

STOP_PATIENCE_S = 60.0
"""How long ranks may take to save after SIGTERM; torchrun itself kills them after 30 s."""

OUT_OF_MEMORY = ("outofmemory", "out of memory", "memoryerror", "can't allocate memory")
SHARED_MEMORY = ("out of resource: shared memory", "outofresources")
NO_SPACE = ("no space left", "disk quota exceeded")
LOST_PEER = ("connection closed by peer", "connection reset", "nccl", "gloo", "socket", "timed out", "timeout")


def run_torchrun(request: TrainRequest, nproc: int) -> Outcome:
    """Train with `nproc` ranks; return when all is done.

    Raises:
        WorkerDiedError: a rank was killed or lost, or SIGTERM came: run again to resume from the last checkpoint.
        Eagle3Error: what a rank raised.
        TrainingError: anything else that a rank died of.
    """
    shutil.rmtree(request.work / ERRORS, ignore_errors=True)
    (request.work / OUTCOME).unlink(missing_ok=True)
    path = request.work / REQUEST
    path.write_text(request.model_dump_json(), encoding="utf-8")
    command = (sys.executable, "-m", "eagle3_core.train.agent", str(os.getpid()), str(nproc), str(path))
    process = subprocess.Popen(
        command, env=environment(nproc), process_group=0, stderr=subprocess.PIPE, text=True, errors="replace"
    )
    tail = _Tail(process)
    with _forwarding_sigterm(process) as stopped:
        code = process.wait()
    tail.join()
    outcome = request.work / OUTCOME
    if code == 0 and outcome.is_file():
        return Outcome.parse(json.loads(outcome.read_text(encoding="utf-8")), str(outcome))
    raise diagnose(_rank_errors(request.work), tail.lines, code, stopped=bool(stopped))


def environment(nproc: int) -> dict[str, str]:
    """Return the environment of torchrun: gloo on the loopback, cores shared out among ranks unless the user did."""
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    return {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": str(threads), **os.environ}


def diagnose(
    reports: Sequence[dict[str, Any]], lines: Sequence[str], code: int, *, stopped: bool = False
) -> Eagle3Error:
    """Return the error that tells the cause: the first rank's own word, unless it only lost a peer that was ended."""
    killed = "training was stopped by SIGTERM" if stopped else _killed(lines, code)
    for report in sorted(reports, key=lambda report: report["at"]):
        where = f"rank {report['rank']}: {report['type']}: {report['message']}"
        kind = getattr(errors, report["type"], None)
        if isinstance(kind, type) and issubclass(kind, Eagle3Error):
            return kind(report["message"])
        text = where.lower()
        if any(word in text for word in NO_SPACE):
            return StorageFullError(f"{where}; free space and resume")
        if any(word in text for word in SHARED_MEMORY):
            return TrainingError(f"{where}; a kernel needs more shared memory than this GPU has: train on another kind")
        if any(word in text for word in OUT_OF_MEMORY):
            return TrainingError(f"{where}; lower training.row_tokens and training.batch_tokens")
        if not any(word in text for word in LOST_PEER):
            return TrainingError(where)
        if not killed:
            return WorkerDiedError(f"{where}; run again to resume from the last checkpoint")
    if killed:
        return WorkerDiedError(f"{killed}; run again to resume from the last checkpoint")
    last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
    return WorkerDiedError(f"torchrun ended with exit code {code}: {last.strip()[:300]}; run again to resume")


def _killed(lines: Sequence[str], code: int) -> str:
    if code < 0:
        return f"torchrun was killed by signal {-code} ({signal.Signals(-code).name})"
    for line in lines:
        found = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", line)
        if found and int(found[1]) != signal.SIGTERM:
            name = signal.Signals(int(found[1])).name
            hint = "; if nobody killed it, the host ran out of memory" if name == "SIGKILL" else ""
            return f"rank {found[2]} was killed by signal {found[1]} ({name}){hint}"
    return ""


def _rank_errors(work: Path) -> list[dict[str, Any]]:
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((work / ERRORS).glob("rank-*.json"))]


@contextmanager
def _forwarding_sigterm(process: subprocess.Popen[str]) -> Iterator[list[int]]:
    """Pass SIGTERM on to torchrun, and kill it if that does not end it; yields the signals that came."""
    came: list[int] = []

    def forward(number: int, _frame: object) -> None:
        came.append(number)
        process.terminate()
        timer = threading.Timer(STOP_PATIENCE_S, process.kill)
        timer.daemon = True
        timer.start()

    previous = signal.signal(signal.SIGTERM, forward)
    try:
        yield came
    finally:
        signal.signal(signal.SIGTERM, previous)
        if process.poll() is None:
            # Ranks die with the agent.
            process.kill()
            process.wait()


class _Tail(threading.Thread):
    """Copies the ranks' stderr through and remembers its end."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        super().__init__(daemon=True)
        assert process.stderr is not None
        self._stream = process.stderr
        self._kept: collections.deque[str] = collections.deque(maxlen=400)
        self.start()

    def run(self) -> None:
        for line in self._stream:
            self._kept.append(line)
            sys.stderr.write(line)
            sys.stderr.flush()

    @property
    def lines(self) -> list[str]:
        return list(self._kept)
