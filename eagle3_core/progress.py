"""Progress that others can read: one small JSON file, replaced atomically, and a log line now and then."""

from __future__ import annotations

import json
import math
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

FILE = "progress.json"


class Progress:
    """Counts units done; writes `progress.json` at most once a second and logs at most every ten. Safe for threads."""

    def __init__(self, stage: str, directory: Path | None) -> None:
        """Report for `stage` into `directory`, or to the log alone."""
        self._stage, self._directory = stage, directory
        self._started = self._written = self._logged = 0.0
        self._first = self._done = 0.0
        self._lock = threading.Lock()

    def update(self, done: float, total: float | None, unit: str, **detail: float | int | str | None) -> None:
        """Report that `done` of `total` units are done; `detail` holds loss, rates and the like."""
        with self._lock:
            self._update(done, total, unit, detail)

    def _update(self, done: float, total: float | None, unit: str, detail: Mapping[str, Any]) -> None:
        now = time.monotonic()
        # A challenge counts from the beginning again with its next server.
        if not self._started or done < self._done:
            self._started, self._first = now, done
        self._done = done
        finished = total is not None and done >= total
        if now - self._written < 1.0 and not finished:
            return
        state = self._state(now, done, total, unit, detail)
        self._written = now
        self._write(state)
        if now - self._logged >= 10.0 or finished:
            self._logged = now
            print(describe(state), flush=True)

    def _state(
        self, now: float, done: float, total: float | None, unit: str, detail: Mapping[str, Any]
    ) -> dict[str, Any]:
        elapsed = now - self._started
        rate = (done - self._first) / elapsed if elapsed > 0.5 and done > self._first else None
        eta = (total - done) / rate if rate and total is not None else None
        shown = {name: value for name, value in finite(dict(detail)).items() if value is not None}
        return {"stage": self._stage, "done": done, "total": total, "unit": unit, "rate": rate, "eta_s": eta,
                "at": time.time(), "detail": shown}  # fmt: skip

    def phase(self, text: str) -> None:
        """Report a phase that has no count, such as an engine start."""
        with self._lock:
            self._started = 0.0
            print(f"{self._stage}: {text}", flush=True)
            self._write({"stage": self._stage, "phase": text, "at": time.time(), "detail": {}})

    def _write(self, state: Mapping[str, Any]) -> None:
        if self._directory is not None:
            temp = self._directory / f".{FILE}.tmp"
            temp.write_text(json.dumps(state), encoding="utf-8")
            temp.replace(self._directory / FILE)


def finite(value: Any) -> Any:
    """Return a JSON value with None wherever there was a number that is not finite, which JSON does not know."""
    if isinstance(value, dict):
        return {name: finite(part) for name, part in value.items()}
    if isinstance(value, list):
        return [finite(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def describe(state: Mapping[str, Any]) -> str:
    """Return one line for people: stage, count, rate, ETA, details."""
    if "phase" in state:
        return f"{state['stage']}: {state['phase']}"
    total = f"/{state['total']:,.0f}" if state["total"] is not None else ""
    parts = [f"{state['stage']}: {state['done']:,.0f}{total} {state['unit']}"]
    if state["rate"]:
        parts.append(f"{state['rate']:,.1f} {state['unit']}/s")
    if state["eta_s"] is not None:
        parts.append(f"ETA {state['eta_s']:,.0f} s")
    parts += [f"{name} {_figure(value)}" for name, value in state["detail"].items()]
    return ", ".join(parts)


def _figure(value: float | str) -> str:
    if not isinstance(value, float):
        return str(value)
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"
