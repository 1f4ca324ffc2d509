"""The line between the machines of one training run: who takes part, what they train, who was lost. Light: no torch.

The machine that runs the train stage leads: it listens at `training.rdzv_endpoint`, tells every other one (`eagle3
train-node`) what to do when all are there, and torchrun on each meets the others at the next port (c10d). The line
stays open while ranks run. A process that dies closes it, whatever library the ranks then wait in.
"""

from __future__ import annotations

import contextlib
import json
import queue
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Self

from eagle3_core.config.training import host_and_port
from eagle3_core.errors import ConfigError, WorkerDiedError

GATHERING_S = 1800.0
"""How long the leading machine waits for all others."""

SILENT_S = 10.0
"""After how long somebody who is connected and has not answered is named: a stranger, or a machine that downloads."""

LOOK_S = 0.5

LAST_WORDS_S = 20.0
"""How long it waits for what the others know about a failure: torchrun on each ends within that."""

KEEPALIVE = ((socket.TCP_KEEPIDLE, 5), (socket.TCP_KEEPINTVL, 3), (socket.TCP_KEEPCNT, 3))
"""A machine that vanished without closing its connections is noticed after 14 seconds."""


@dataclass(frozen=True, slots=True)
class Meeting:
    """Where torchrun meets the others; `address` is this machine's, as the others reach it."""

    nodes: int
    host: str
    port: int
    output: str
    address: str
    hosts: bool

    def arguments(self) -> tuple[str, ...]:
        """Return torchrun's arguments."""
        return (
            "--nnodes", str(self.nodes), "--rdzv-backend", "c10d", "--rdzv-endpoint", f"{self.host}:{self.port}",
            "--rdzv-id", self.output.rpartition("/")[2], "--rdzv-conf", f"is_host={int(self.hosts)}",
            "--local-addr", self.address,
        )  # fmt: skip


class Line:
    """One connection: JSON objects, a line each."""

    def __init__(self, connection: socket.socket, there: str) -> None:
        """Notice within seconds when the other machine is gone; `there` is its address."""
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in KEEPALIVE:
            connection.setsockopt(socket.IPPROTO_TCP, option, value)
        self._connection = connection
        self._lines = connection.makefile("r", encoding="utf-8")
        self.here, self.there = connection.getsockname()[0], there

    def say(self, **values: Any) -> bool:
        """Send an object; tell whether the other side is still there."""
        try:
            self._connection.sendall((json.dumps(values) + "\n").encode())
        except OSError:
            return False
        return True

    def hear(self, within_s: float | None = None) -> dict[str, Any] | None:
        """Return the next object, or None when the other side is gone or says nothing `within_s`."""
        try:
            self._connection.settimeout(within_s)
            found = json.loads(self._lines.readline())
        except (OSError, ValueError):
            return None
        return found if isinstance(found, dict) else None

    def close(self) -> None:
        """Hang up; who listens on the other side, or in another thread here, hears it."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)
        self._lines.close()
        self._connection.close()


def endpoint(text: str) -> tuple[str, int]:
    """Return host and port of `host:port`; the port after it is used, too.

    Raises:
        ConfigError: it is not that.
    """
    try:
        return host_and_port(text)
    except ValueError as error:
        raise ConfigError(f"training.{error}") from None


class _Arrivals:
    """Whoever rings is told the task and heard by a thread of its own, so that one who is silent keeps nobody out.

    Attributes:
        answers: the line of each who has answered or hung up, and the answer.
    """

    def __init__(self, listener: socket.socket, task: dict[str, Any]) -> None:
        """Answer the bell from now on, until `close`."""
        self._listener, self._task = listener, task
        self._closing = threading.Event()
        self._silent: dict[Line, float] = {}
        self.answers: queue.Queue[tuple[Line, dict[str, Any] | None]] = queue.Queue()
        self._threads: list[threading.Thread] = []
        self._bell = threading.Thread(target=self._accept, name="arrivals", daemon=True)
        self._bell.start()

    def named(self) -> str:
        """Return in words who is connected and has not answered for a while; empty for nobody."""
        since = time.monotonic() - SILENT_S
        names = [line.there for line, came in list(self._silent.items()) if came < since]
        return f" ({', '.join(names)}: connected, and has not said that it is ready)" if names else ""

    def close(self) -> None:
        """Hang up on all who have not answered, or too late."""
        self._closing.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._bell.join()
        for line in list(self._silent):
            line.close()
        for thread in self._threads:
            thread.join()
        while not self.answers.empty():
            self.answers.get()[0].close()

    def _accept(self) -> None:
        while not self._closing.is_set():
            try:
                connection, (there, *_) = self._listener.accept()
                line = Line(connection, there)
            except OSError:
                # One who hung up at once, or too many open files: others may still come.
                self._closing.wait(0.2)
                continue
            self._silent[line] = time.monotonic()
            self._threads.append(threading.Thread(target=self._hear, args=(line,), daemon=True))
            self._threads[-1].start()

    def _hear(self, line: Line) -> None:
        answer = line.hear() if line.say(task=self._task) else None
        del self._silent[line]
        self.answers.put((line, answer))


@dataclass
class Company:
    """The other machines, as the leading one sees them."""

    meeting: Meeting
    lines: list[Line] = field(default_factory=list)
    lost: str = ""
    """The first machine that hung up or failed, in words; empty while all go on."""
    refusal: str = ""
    """The last machine that came and could not take part, and why."""
    reports: list[dict[str, Any]] = field(default_factory=list)
    """What ranks of other machines died of."""
    _threads: list[threading.Thread] = field(default_factory=list)

    @classmethod
    def gather(cls, where: str, nodes: int, output: str, task: dict[str, Any], told: Callable[[str], None]) -> Self:
        """Wait until all others have the `task` and are ready; `told` hears how many are missing, and who is silent.

        Raises:
            WorkerDiedError: not all came.
        """
        host, port = endpoint(where)
        try:
            listener = socket.create_server(("", port), backlog=nodes)
        except OSError as error:
            raise WorkerDiedError(f"training.rdzv_endpoint {where}: cannot listen there: {error.strerror}") from None
        found, arrivals = cls(Meeting(nodes, host, port + 1, output, "", True)), _Arrivals(listener, task)
        with listener, contextlib.closing(arrivals):
            end, said = time.monotonic() + GATHERING_S, ""
            while missing := nodes - 1 - len(found.lines):
                who = arrivals.named() + found.refusal
                if (now := f"waiting for {missing} of {nodes} machines at {where}{who}") != said:
                    told(said := now)
                if time.monotonic() > end:
                    found.dismiss()
                    raise WorkerDiedError(
                        f"expected {nodes} machines within {GATHERING_S:g} s, found {1 + len(found.lines)}{who}; run "
                        f"`eagle3 train-node {where}` on each of the others, then run again"
                    )
                with contextlib.suppress(queue.Empty):
                    found._welcome(*arrivals.answers.get(timeout=LOOK_S))
        found.meeting = Meeting(nodes, host, port + 1, output, found.lines[0].here, True)
        return found

    def _welcome(self, line: Line, answer: dict[str, Any] | None) -> None:
        """Keep a machine that says it is ready, which it may be after a download."""
        if answer is not None and "ready" in answer:
            self.lines.append(line)
            return
        why = answer.get("refused", answer) if answer is not None else "hung up"
        self.refusal = f" ({line.there}: {why})"
        line.close()

    def begin(self, end_ranks: Callable[[], None]) -> None:
        """Let all start; `end_ranks` is called once, as soon as a machine is lost."""
        for line in self.lines:
            line.say(go=True)
            thread = threading.Thread(target=self._listen, args=(line, end_ranks), daemon=True)
            self._threads.append(thread)
            thread.start()

    def last_words(self) -> None:
        """Wait until every machine has said how its ranks ended, or has hung up, a while at most."""
        end = time.monotonic() + LAST_WORDS_S
        for thread in self._threads:
            thread.join(max(0.0, end - time.monotonic()))

    def dismiss(self) -> None:
        """Hang up: who still trains ends its ranks, and all wait for the next attempt or for the output."""
        for line in self.lines:
            line.close()

    def _listen(self, line: Line, end_ranks: Callable[[], None]) -> None:
        answer = line.hear()
        if answer is not None and answer.get("code") == 0:
            return
        if answer is None:
            cause = f"the machine {line.there} was lost"
        elif answer.get("stopped"):
            cause = f"the machine {line.there} was stopped by SIGTERM"
        else:
            self.reports += answer.get("reports", [])
            cause = f"the ranks of {line.there} ended: {answer.get('cause')}"
        self.lost = self.lost or cause
        if answer is None or not answer.get("stopped"):  # all ranks save when one is stopped
            end_ranks()
