"""One Airflow on this machine: start or re-join it, wait until it can work, stop it."""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import httpx

from eagle3_core import jobs
from eagle3_core.errors import Eagle3Error, Remedy
from eagle3_core.jobs.files import read_json, write_json
from eagle3_core.jobs.processes import Identity, kill_marked, marked

CHECKOUT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0
_STATE = "standalone.json"
_STOPPED = "stopped"
_PASSWORDS = "passwords.json"
_USER = "admin"


class AirflowError(Eagle3Error):
    """The local Airflow did not start or refused a request."""

    remedy = Remedy.RETRY


class AirflowStoppedError(Eagle3Error):
    """Somebody stopped the local Airflow on purpose while this process followed a run of it."""

    remedy = Remedy.RESUME


@dataclass(frozen=True)
class LocalAirflow:
    """`airflow standalone` on SQLite, bound to the loopback address, with its files below `home`.

    `root` is where the artifacts of its runs live.
    """

    home: Path
    root: str

    @property
    def log(self) -> Path:
        """Return the output of all components."""
        return self.home / "standalone.log"

    @property
    def _mark(self) -> str:
        """Return the setting that every process of this Airflow has in its environment, and no job has."""
        return f"AIRFLOW_HOME={self.home}"

    @property
    def url(self) -> str:
        """Return the address of the UI.

        Raises:
            AirflowError: it was never started.
        """
        state = read_json(self.home / _STATE)
        if state is None:
            raise AirflowError(f"{self.home}: expected a started Airflow, found none; run `eagle3 demo`")
        return f"http://127.0.0.1:{state['port']}"

    @property
    def login(self) -> tuple[str, str]:
        """Return user and password."""
        passwords = read_json(self.home / _PASSWORDS) or {}
        return _USER, str(passwords.get(_USER, ""))

    def ensure(self, say: Callable[[str], None], *, again: bool = False) -> None:
        """Start it unless it runs already, `again` if it died; return when scheduler, DAG processor and API answer.

        Raises:
            AirflowError: it ended, or is not healthy after five minutes.
            AirflowStoppedError: it was stopped on purpose, before it is to start `again` or while it starts.
        """
        with self._locked():
            if again:
                self.raise_if_stopped()
            (self.home / _STOPPED).unlink(missing_ok=True)
            if self._running():
                if self._becomes_healthy(say, 60.0):
                    return
                say("Airflow runs but is not healthy; starting it anew")
            # Without asking: tasks that are asked to end would end their jobs, which the next Airflow re-joins.
            kill_marked(self._mark)
            self._start(say)
            if not self._becomes_healthy(say, START_LIMIT_S):
                raise AirflowError(f"Airflow: not healthy after {START_LIMIT_S:.0f} s; see {self.log}")

    def stop(self) -> None:
        """End Airflow, then every job of its root; who follows a run of it does not start it again."""
        self.home.mkdir(parents=True, exist_ok=True)
        (self.home / _STOPPED).touch()
        with self._locked():
            (self.home / _STOPPED).touch()  # again: who waited for the lock to start it has removed the mark
            self._end()
            (self.home / _STATE).unlink(missing_ok=True)
        for directory in jobs.jobs_directory(self.root).glob("*"):
            if jobs.directory_state(directory).name in ("running", "lost"):
                jobs.end_processes(directory)

    def raise_if_stopped(self) -> None:
        """Raise if it was stopped since it was asked for last.

        Raises:
            AirflowStoppedError: it was.
        """
        if (self.home / _STOPPED).exists():
            raise AirflowStoppedError(
                "Airflow and its jobs were stopped (`make stop` or `eagle3 stop`) while this followed a run; run the "
                "same again, it goes on where it was"
            )

    def _running(self) -> bool:
        state = read_json(self.home / _STATE)
        return state is not None and Identity(**state["process"]).alive() and state["root"] == self.root

    def _start(self, say: Callable[[str], None]) -> None:
        say("starting Airflow")
        port = _free_port(8080)
        self._write_password()
        environment = self._environment(port)
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                [str(_bin() / "airflow"), "standalone"], cwd=self.home, env=environment, stdin=subprocess.DEVNULL,
                stdout=log, stderr=log, start_new_session=True,
            )  # fmt: skip
        identity = Identity.of(process.pid)
        if identity is None:
            raise AirflowError(f"Airflow ended at once; see {self.log}")
        write_json(self.home / _STATE, {"process": asdict(identity), "port": port, "root": self.root})

    def _environment(self, port: int) -> dict[str, str]:
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHONPATH"))}
        settings = {
            "CORE__DAGS_FOLDER": str(CHECKOUT / "dags"),
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__PARALLELISM": "4",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(self.home / _PASSWORDS),
            "CORE__EXECUTION_API_SERVER_URL": f"http://127.0.0.1:{port}/execution/",
            "API__HOST": "127.0.0.1",
            "API__PORT": str(port),
            "API__BASE_URL": f"http://127.0.0.1:{port}",
            "API__WORKERS": "1",
            "API__MAXIMUM_PAGE_LIMIT": "2000",
            # A busy machine answers late: attempts must not die of it.
            "WORKERS__MAX_FAILED_HEARTBEATS": "60",
            "LOGGING__WORKER_LOG_SERVER_PORT": str(_free_port(8793)),
            "LOGGING__TRIGGER_LOG_SERVER_PORT": str(_free_port(8893)),
        }
        return {
            **kept,
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            "AIRFLOW_HOME": str(self.home),  # the mark
            "PATH": f"{_bin()}:{os.environ.get('PATH', '')}",
            "EAGLE3_ROOT": self.root,
            "EAGLE3_RETRY_DELAY_S": "5",
            # Keeps AIRFLOW_HOME readable in /proc for stop().
            "SPT_NOENV": "1",
        }

    def _write_password(self) -> None:
        file = self.home / _PASSWORDS
        if not file.exists():
            write_json(file, {_USER: secrets.token_urlsafe(9)})
            file.chmod(0o600)

    def _becomes_healthy(self, say: Callable[[str], None], limit_s: float) -> bool:
        started, said = time.monotonic(), 0.0
        while (elapsed := time.monotonic() - started) < limit_s:
            self.raise_if_stopped()
            missing = self._unhealthy()
            if not missing:
                return True
            if not self._running():
                raise AirflowError(f"Airflow ended while starting; see {self.log}")
            if elapsed - said > 5:
                said = elapsed
                say(f"waiting for Airflow's {', '.join(missing)} ({elapsed:.0f} s)")
            time.sleep(0.3)
        return False

    def _unhealthy(self) -> list[str]:
        try:
            health = httpx.get(f"{self.url}/api/v2/monitor/health", timeout=5).json()
        except (httpx.HTTPError, ValueError):
            return ["API server"]
        wanted = {"metadatabase": "database", "scheduler": "scheduler", "dag_processor": "DAG processor"}
        return [title for name, title in wanted.items() if (health.get(name) or {}).get("status") != "healthy"]

    def _end(self) -> None:
        """SIGTERM to the process group, since standalone alone would orphan its components; then whoever is left."""
        state = read_json(self.home / _STATE)
        if state is not None and (identity := Identity(**state["process"])).alive():
            os.killpg(identity.pid, signal.SIGTERM)
            end = time.monotonic() + 25
            while marked(self._mark) and time.monotonic() < end:
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(identity.pid, os.WNOHANG)
                time.sleep(0.2)
        kill_marked(self._mark)

    @contextlib.contextmanager
    def _locked(self) -> Iterator[None]:
        self.home.mkdir(parents=True, exist_ok=True)
        with (self.home / "lock").open("a") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield


def _bin() -> Path:
    """Return the directory of the Airflow environment's commands."""
    beside = CHECKOUT / ".venvs" / "airflow" / "bin"
    if not (beside / "airflow").exists():
        raise AirflowError(f"{beside}: expected the Airflow environment, found none; run `make setup`")
    return beside


def _free_port(first: int) -> int:
    """Return the first port from `first` on that nobody on this machine listens on."""
    for port in range(first, first + 100):
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("", port))
            except OSError:
                continue
            return port
    raise AirflowError(f"ports {first} to {first + 99}: expected a free one, found none; stop something")
