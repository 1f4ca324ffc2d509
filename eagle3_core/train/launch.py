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
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Self

from eagle3_core import errors
from eagle3_core.errors import Eagle3Error, StorageFullError, TrainingError, WorkerDiedError
from eagle3_core.train.nodes import Company
from eagle3_core.train.request import ERRORS, OUTCOME, REQUEST, Outcome, TrainRequest

STOP_PATIENCE_S = 60.0
"""How long ranks may take to save after SIGTERM; torchrun itself kills them after 30 s."""

AGAIN = "; run again to resume from the last checkpoint"

OUT_OF_MEMORY = ("outofmemory", "out of memory", "memoryerror", "can't allocate memory")
SHARED_MEMORY = ("out of resource: shared memory", "outofresources")
NO_SPACE = ("no space left", "disk quota exceeded")
LOST_PEER = ("connection closed by peer", "connection reset", "nccl", "gloo", "socket", "timed out", "timeout")


class Torchrun:
    """torchrun on this machine: a child that gets our SIGTERM and does not outlive us. Enter it in the main thread."""

    def __init__(self, request: TrainRequest, nproc: int, meeting: Sequence[str] = ()) -> None:
        """Prepare `nproc` ranks; `meeting` are the arguments by which torchrun finds other machines."""
        self._request, self._nproc, self._meeting = request, nproc, meeting
        self._came: list[int] = []
        self._ended = False

    def __enter__(self) -> Self:
        """Start."""
        work, path = self._request.work, self._request.work / REQUEST
        shutil.rmtree(work / ERRORS, ignore_errors=True)
        (work / OUTCOME).unlink(missing_ok=True)
        path.write_text(self._request.model_dump_json(), encoding="utf-8")
        command = (sys.executable, "-m", "eagle3_core.train.agent", str(os.getpid()), str(self._nproc), str(path),
                   *self._meeting)  # fmt: skip
        environ = environment(self._nproc, alone=not self._meeting)
        self._process = subprocess.Popen(
            command, env=environ, process_group=0, stderr=subprocess.PIPE, text=True, errors="replace"
        )
        self._tail = _Tail(self._process)
        self._previous = signal.signal(signal.SIGTERM, self._forward)
        return self

    def __exit__(self, *_: object) -> None:
        """End what still runs; ranks die with their agent."""
        signal.signal(signal.SIGTERM, self._previous)
        if self._process.poll() is None:
            self.end()
            self._process.wait()

    def _forward(self, number: int, _frame: object) -> None:
        """Pass SIGTERM on, and kill torchrun if that does not end it."""
        self._came.append(number)
        self._process.terminate()
        timer = threading.Timer(STOP_PATIENCE_S, self.end)
        timer.daemon = True
        timer.start()

    @property
    def stopped(self) -> bool:
        """Tell whether SIGTERM came."""
        return bool(self._came)

    def end(self) -> None:
        """Kill torchrun and with it all ranks here; any thread may."""
        if self._process.poll() is None:
            self._ended = True
            self._process.kill()

    def wait(self) -> int:
        """Return torchrun's exit code once it has ended."""
        code = self._process.wait()
        self._tail.join()
        return code

    def error(self, code: int, others: Sequence[dict[str, Any]] = (), lost: str = "") -> Eagle3Error:
        """Return what went wrong, given what ranks of other machines died of, and which machine was lost."""
        reports = [*rank_reports(self._request.work), *others]
        return diagnose(reports, self._tail.lines, 1 if self._ended else code, stopped=self.stopped, lost=lost)


def run_torchrun(request: TrainRequest, told: Callable[[str], None]) -> Outcome:
    """Train with the ranks of this machine, and of `training.nodes` - 1 others; return when all is done.

    Args:
        request: What to train.
        told: Hears what is waited for, a phrase.

    Raises:
        WorkerDiedError: a rank or machine was lost or did not come, or SIGTERM came: run again to resume from the last
            checkpoint.
        Eagle3Error: what a rank raised.
        TrainingError: anything else that a rank died of.
    """
    training, company = request.run.training, None
    if training.nodes > 1:
        task = request.model_dump(mode="json")
        company = Company.gather(str(training.rdzv_endpoint), training.nodes, request.output, task, told)
    nproc = local_ranks(request)
    told(f"starting {nproc} rank(s) on {request.device}")
    try:
        with Torchrun(request, nproc, company.meeting.arguments() if company else ()) as torchrun:
            if company is not None:
                company.begin(torchrun.end)
            code = torchrun.wait()
        if company is not None:
            company.last_words()
        path = request.work / OUTCOME
        if code == 0 and path.is_file():
            return Outcome.parse(json.loads(path.read_text(encoding="utf-8")), str(path))
        if company is None:
            raise torchrun.error(code)
        raise torchrun.error(code, company.reports, company.lost)
    finally:
        if company is not None:
            company.dismiss()


def local_ranks(request: TrainRequest) -> int:
    """Return how many ranks this machine has: on GPUs at most one rank each."""
    if request.device != "cuda":
        return request.run.training.nproc
    import torch

    return min(request.run.training.nproc, torch.cuda.device_count())


def environment(nproc: int, *, alone: bool = True) -> dict[str, str]:
    """Return the environment of torchrun: cores shared out among ranks unless the user did, gloo on the loopback.

    With other machines gloo takes the interface that GLOO_SOCKET_IFNAME names, or that of the host's name.
    """
    threads = max(1, len(os.sched_getaffinity(0)) // nproc)
    network = {"GLOO_SOCKET_IFNAME": "lo"} if alone else {}
    return {**network, "OMP_NUM_THREADS": str(threads), **os.environ}


def diagnose(
    reports: Sequence[dict[str, Any]], lines: Sequence[str], code: int, *, stopped: bool = False, lost: str = ""
) -> Eagle3Error:
    """Return the error that tells the cause: the first rank's own word, unless it only lost a peer that was ended.

    `lost` says which other machine was lost, which ends ranks here, too.
    """
    killed = "training was stopped by SIGTERM" if stopped else _killed_rank(lines) or _killed(code) or lost
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
            return WorkerDiedError(f"{where}{AGAIN}")
    if killed:
        return WorkerDiedError(f"{killed}{AGAIN}")
    last = next((line for line in reversed(lines) if line.strip()), "nothing on stderr")
    return WorkerDiedError(f"torchrun ended with exit code {code}: {last.strip()[:300]}{AGAIN}")


def _killed(code: int) -> str:
    return f"torchrun was killed by signal {-code} ({signal.Signals(-code).name})" if code < 0 else ""


def _killed_rank(lines: Sequence[str]) -> str:
    for line in lines:
        found = re.search(r"exitcode: -(\d+)\) local_rank: (\d+)", line)
        if found and int(found[1]) != signal.SIGTERM:
            name = signal.Signals(int(found[1])).name
            hint = "; if nobody killed it, the host ran out of memory" if name == "SIGKILL" else ""
            return f"rank {found[2]} was killed by signal {found[1]} ({name}){hint}"
    return ""


def rank_reports(work: Path) -> list[dict[str, Any]]:
    """Return what ranks of this machine left about their end."""
    return [json.loads(path.read_text(encoding="utf-8")) for path in sorted((work / ERRORS).glob("rank-*.json"))]


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
