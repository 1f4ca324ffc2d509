"""Keep a copy of a growing log in the bucket: what a machine wrote before it died is read there."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

from eagle3_core.errors import Eagle3Error
from eagle3_core.storage import ObjectStore

EVERY_S = 15.0
_MOST_BYTES = 1 << 20


class ShippedLog:
    """Copies the last MiB of a log every so often, if it has grown, and once more at the end.

    A copy that cannot be made stops nothing: it is said once, and tried again.
    """

    def __init__(self, log: Path, store: ObjectStore, key: str, say: Callable[[str], None]) -> None:
        """Prepare; nothing is copied before `start`."""
        self._log, self._store, self._key, self._say = log, store, key, say
        self._shipped, self._failed, self._over = 0, False, threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-shipping", daemon=True)

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def end(self) -> None:
        """Copy what came last, and stop."""
        self._over.set()
        if self._thread.is_alive():
            self._thread.join()

    def _run(self) -> None:
        while not self._over.wait(EVERY_S):
            self._ship()
        self._ship()

    def _ship(self) -> None:
        try:
            size = self._log.stat().st_size if self._log.exists() else 0  # none before the server begins
            if size == self._shipped:
                return
            with self._log.open("rb") as file:
                file.seek(max(0, size - _MOST_BYTES))
                self._store.write_bytes(self._key, file.read(_MOST_BYTES))
            self._shipped = size
        except (OSError, Eagle3Error) as error:
            if not self._failed:
                self._say(f"engine: its log was not copied to {self._store.root}/{self._key}: {error}")
            self._failed = True
