"""Run one SGLang server as a context manager: ready when it has really generated, gone when the block ends."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import httpx

from eagle3_core.engine import gpus, processes
from eagle3_core.engine import log as server_log
from eagle3_core.engine.client import CaptureSettings, EngineClient, Sampling
from eagle3_core.engine.effective import compare_effective
from eagle3_core.engine.launch import LaunchPlan
from eagle3_core.engine.owed import Owed
from eagle3_core.engine.shipping import ShippedLog
from eagle3_core.engine.spool import make_spool, most_bytes
from eagle3_core.engine.startup import StartWatch
from eagle3_core.errors import EngineDiedError, EngineError

if TYPE_CHECKING:
    from eagle3_core.context import StageContext

# A GPU server gets time to end by itself; a CPU server has nothing to give back, and SGLang drains in steps of 5 s.
_GRACE_S = {"cuda": 10.0, "cpu": 0.5}
_WATCH_S = 0.25
_BUSY = 0.2
"""Share of a core from which on a server computes; an idle one was seen to use 0.01, at most 0.04."""


class SglangServer:
    """Owns one server: its processes, its port, its log and, for a capture plan, its spool.

    The server dies with this process (even by kill -9), and carries the environment of its job, so that the job's
    supervisor can find it too.
    """

    def __init__(
        self,
        plan: LaunchPlan,
        *,
        log: Path,
        silence_s: float = 600.0,
        threads: int = 2,
        on_phase: Callable[[str], None] | None = None,
        shipped: ShippedLog | None = None,
    ) -> None:
        """Prepare; nothing runs before the block is entered. `shipped` copies the log while the block runs."""
        self.plan = plan
        self.log = log
        self.effective: Mapping[str, Any] = {}
        self.ready_s = 0.0
        self._silence_s, self._threads = silence_s, threads
        self._on_phase = on_phase or (lambda _text: None)
        self._shipped = shipped
        self._mark = uuid.uuid4().hex
        self._port = 0
        self._process: subprocess.Popen[bytes] | None = None
        self._spool: Path | None = None
        self._segments: set[Path] = set()
        self._note: Path | None = None
        self._owed = Owed()
        self._died: str | None = None
        self._closing = threading.Event()
        self._watcher: threading.Thread | None = None
        self._opened: server_log.OpenLog | None = None

    @classmethod
    def of_stage(cls, plan: LaunchPlan, context: StageContext) -> Self:
        """Prepare the server of a running stage: its log in the job's work, its phases among the job's.

        Where the root is a bucket, `jobs/<job>/sglang.log` there follows the log.
        """
        serving, log, say = context.run.serving, context.work / "sglang.log", context.progress.phase
        key = f"jobs/{context.work.parent.name}/sglang.log"
        shipped = None if context.store.in_place else ShippedLog(log, context.store, key, say)
        return cls(plan, log=log, silence_s=serving.silence_s, threads=serving.threads, on_phase=say, shipped=shipped)

    @property
    def url(self) -> str:
        """Return the base address."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def pid(self) -> int:
        """Return the process id of the server's first process."""
        if self._process is None:
            raise EngineError("the server has not been started; enter its block first")
        return self._process.pid

    @property
    def pids(self) -> list[int]:
        """Return every living process of this server."""
        return processes.marked(self._mark)

    def client(self, timeout_s: float = 3600.0) -> EngineClient:
        """Return a client that notices the server's death; a request may take `timeout_s`."""
        capture = None
        if self._spool is not None:
            capture = CaptureSettings(
                self._spool, self.plan.prefill_tokens, page_size=int(self.effective.get("page_size") or 1)
            )
        return EngineClient(
            self.url,
            capture=capture,
            speculating=self.plan.mode == "speculate",
            cause_of_death=self.cause_of_death,
            owed=self._owed,
            timeout_s=timeout_s,
        )

    def cause_of_death(self) -> EngineDiedError | None:
        """Return the error to raise if the server has died since it was ready."""
        process = self._process
        if self._died is None and process is not None and process.poll() is not None:
            self._died = f"exit status {process.returncode}"
        if self._died is None:
            return None
        assert self._opened is not None
        return EngineDiedError(f"the SGLang server died ({self._died}); {self._opened.last_words()}")

    # ------------------------------------------------------------------------------------------------------- starting
    def __enter__(self) -> Self:
        started = time.monotonic()
        if self._shipped is not None:
            self._shipped.start()
        try:
            self._require_gpus()
            self._opened = opened = server_log.OpenLog(self.log)
            watch = StartWatch(opened, self._mark, self._silence_s, self._on_phase)
            self._start()
            self._wait_until_it_generates(watch)
            self._read_back()
        except BaseException:
            self._stop(kill=True)
            raise
        self._segments = processes.shared_memory(self.pids, f"{processes.MEMORY}/{processes.LOADS}")
        self._note = processes.note_shared_memory(processes.MEMORY, self._segments)
        self.ready_s = time.monotonic() - started
        self._watcher = threading.Thread(target=self._watch, args=(self.pids, opened), name="engine-watch", daemon=True)
        self._watcher.start()
        self._on_phase(f"engine: ready after {self.ready_s:.1f} s")
        return self

    def _start(self) -> None:
        self._port = processes.free_port()
        processes.free_shared_memory(processes.MEMORY)
        if self.plan.mode == "capture":
            self._spool = make_spool(processes.MEMORY, self.log.parent, most_bytes(self.plan.prefill_bytes))
        environment = os.environ | self.plan.environment(self._threads, self._spool) | {processes.MARK: self._mark}
        command = [sys.executable, "-m", "eagle3_core.engine.child", str(os.getpid()), *self.plan.argv(self._port)]
        self._on_phase("engine: starting SGLang")
        with self.log.open("ab") as output:
            output.write(f"$ {' '.join(command)}\n".encode())
            output.flush()
            self._process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, env=environment, start_new_session=True
            )

    def _wait_until_it_generates(self, watch: StartWatch) -> None:
        """Poll until a real request has been answered.

        Raises:
            EngineStartError: the process ended, or shows no sign of life.
        """
        assert self._process is not None
        while True:
            watch.look(self._process.poll())
            if processes.listening(self._port) and self._generates():
                return
            time.sleep(0.2)

    def _require_gpus(self) -> None:
        """Refuse GPUs that somebody else holds.

        Raises:
            GpuBusyError: names them.
        """
        if self.plan.device == "cpu" or self.plan.serving.share_gpus:
            return
        self._on_phase("engine: looking whether the GPUs are free")
        if not gpus.require_free(*self.plan.gpus):
            self._on_phase("engine: no nvidia-smi to ask whether the GPUs are free")

    def _generates(self) -> bool:
        try:
            if httpx.get(f"{self.url}/model_info", timeout=5.0).status_code != 200:
                return False
        except httpx.HTTPError:
            return False
        prompt = [min(1, int(self.plan.model.get("vocab_size", 2)) - 1)] * 3
        with self.client(timeout_s=self._silence_s) as client:
            if self.plan.mode == "capture":
                # Proof that the plugin is in place: a server without it would spool nothing.
                next(iter(client.capture([prompt])))
            else:
                client.generate_all([prompt], Sampling(max_new_tokens=1))
        return True

    def _read_back(self) -> None:
        with self.client() as client:
            info = client.server_info()
        compare_effective(self.plan, info)
        self.effective = info

    def _watch(self, pids: list[int], log: server_log.OpenLog) -> None:
        """Turn the death of one of the server's processes into that of all: requests in flight then fail at once.

        One that owes answers counts as dead when it is silent: no line in its log, no answer, for as long as a start
        may be. On a CPU, where a prefill can take that long and an idle server sleeps, one that computes is not silent.
        """
        size, used, moved, missed = 0, 0.0, time.monotonic(), False
        while not self._closing.wait(_WATCH_S):
            if log.removed and not missed:
                missed = True
                self._on_phase(f"engine: {self.log} was removed; SGLang goes on, what it logs is lost")
            now = (log.size, processes.cpu_seconds(pids) if self.plan.device == "cpu" else 0.0)
            if now[0] != size or now[1] - used > _BUSY * _WATCH_S:
                moved = time.monotonic()
            size, used = now
            silent_s, owed = time.monotonic() - max(moved, self._owed.moved), self._owed.requests
            gone = [pid for pid in pids if not processes.alive(pid)]
            if gone:
                died = f"its process {gone[0]} is gone"
            elif owed and silent_s > self._silence_s:
                died = f"silent for {silent_s:.0f} s (serving.silence_s) with {owed} requests in hand"
            else:
                continue
            if not self._closing.is_set():
                self._died = died
                processes.kill_marked(self._mark)
                return

    # ------------------------------------------------------------------------------------------------------- stopping
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        left = self._stop(kill=error is not None)
        if left and error is None:
            raise EngineError(f"SGLang could not be stopped: {left}")

    def _stop(self, *, kill: bool) -> str:
        """End every process; return what is left, empty for nothing."""
        self._closing.set()
        try:
            return self._end_processes(kill=kill)
        finally:
            if self._opened is not None:
                self._opened.close()
            if self._shipped is not None:
                self._shipped.end()

    def _end_processes(self, *, kill: bool) -> str:
        process = self._process
        pids = self.pids
        self._segments |= processes.shared_memory(pids, f"{processes.MEMORY}/{processes.LOADS}")
        if process is not None and not kill and process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(_GRACE_S[self.plan.device])
            except subprocess.TimeoutExpired:
                self._on_phase("engine: ending SGLang")
        left = processes.kill_marked(self._mark)
        for file in filter(None, (*self._segments, self._note)):
            # SGLang unlinks its own only after a drain that would take 5 s.
            file.unlink(missing_ok=True)
        if process is not None:
            process.wait()
        if self._watcher is not None:
            self._watcher.join()
        if self._spool is not None:
            shutil.rmtree(self._spool, ignore_errors=True)
        held = gpus.require_released(pids, *self.plan.gpus) if self.plan.device == "cuda" and pids else ""
        busy = process is not None and processes.listening(self._port)
        found = (f"processes {left}" * bool(left), f"port {self._port}" * busy, f"GPU memory: {held}" * bool(held))
        return ", ".join(filter(None, found))
