"""Sends figures to one tracker from a thread of its own: a slow or failing tracker neither delays nor ends training."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Mapping

from eagle3_core.train.destinations import Destination

CLOSING_S = 60.0
"""How long the end of training waits for a tracker."""

Row = tuple[int, Mapping[str, float]]

LOG = logging.getLogger(__name__)


class Sender:
    """Rows wait here until the tracker has taken them; what fails is said once and tried again with the next row."""

    def __init__(self, name: str, connect: Callable[[int], Destination]) -> None:
        """Send to what `connect` opens, given the step that was resumed from."""
        self.name = name
        self._connect = connect
        self._destination: Destination | None = None
        self._arriving: queue.Queue[Row | bool] = queue.Queue()
        self._waiting: deque[Row] = deque()
        self._resumed = 0
        self._cause: str | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    @property
    def behind(self) -> bool:
        """Tell whether the tracker failed at the last row and has not taken it since."""
        return self._cause is not None

    def begin(self, resumed: int, rows: Mapping[int, Mapping[str, float]]) -> None:
        """Start with all rows up to the step `resumed` from: what a former attempt did not get through goes now."""
        self._resumed = resumed
        self._waiting.extend(rows.items())
        self._thread.start()

    def send(self, step: int, values: Mapping[str, float]) -> None:
        """Hand over the figures of a step; returns at once."""
        self._arriving.put((step, values))

    def close(self, *, finished: bool) -> None:
        """Wait for what is on its way, and say what did not get through."""
        if not self._thread.is_alive():
            return
        self._arriving.put(finished)
        self._thread.join(CLOSING_S)
        if self._thread.is_alive():
            self._cause = self._cause or f"no answer within {CLOSING_S:g} s"
        if self._cause is not None:
            LOG.warning("%s lacks the last %d steps' figures: %s; %s has them", self.name, len(self._waiting),
                        self._cause, "metrics.jsonl")  # fmt: skip

    def _run(self) -> None:
        self._try()
        while True:
            arrived = self._arriving.get()
            if isinstance(arrived, bool):
                self._try(arrived)
                return
            self._waiting.append(arrived)
            self._try()

    def _try(self, finished: bool | None = None) -> None:
        """Send all that waits, and close if `finished` says with what."""
        try:
            if self._destination is None:
                self._destination = self._connect(self._resumed)
            while self._waiting:
                step, values = self._waiting[0]
                if step > self._destination.last:
                    self._destination.write(step, values)
                self._waiting.popleft()
            if finished is not None:
                self._destination.close(finished=finished)
        except Exception as error:  # noqa: BLE001 - libraries raise what they like, and none of it may end training
            cause = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
            if self._cause is None:
                LOG.warning("%s does not take figures: %s; training goes on, and they are sent later", self.name, cause)
            self._cause = cause
        else:
            if self._cause is not None:
                LOG.info("%s takes figures again and has all", self.name)
            self._cause = None
