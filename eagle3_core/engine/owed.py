"""What tells a server that is silent because nobody asks from one that is silent because it hangs."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager


class Owed:
    """What a server owes its clients: requests in hand, and when it last took or answered one."""

    def __init__(self) -> None:
        self._lock, self.requests, self.moved = threading.Lock(), 0, time.monotonic()

    @contextmanager
    def one(self) -> Iterator[None]:
        """Count one request while the block runs."""
        self._count(1)
        try:
            yield
        finally:
            self._count(-1)

    def _count(self, change: int) -> None:
        with self._lock:
            self.requests += change
            self.moved = time.monotonic()
