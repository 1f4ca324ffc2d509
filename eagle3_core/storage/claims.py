"""Claims in a bucket: one process of all machines holds a name, as long as it gives signs of life.

A claim is the object `<name>/<generation>`; the highest generation counts. It is made under "if none is there", so one
of several that want it gets it; renewed by being written again; abandoned once nobody has renewed it for `EXPIRY_S`, by
the store's own clock. Who finds an abandoned one makes the next generation, so a slow owner harms nobody.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from eagle3_core.errors import Eagle3Error
from eagle3_core.storage.local import locked
from eagle3_core.storage.s3 import Bucket
from eagle3_core.storage.store import claim_name

BEAT_S, EXPIRY_S, LOOK_S = 20.0, 120.0, 2.0


@dataclass(frozen=True)
class BucketClaims:
    """Claims below a prefix of a bucket; the processes of this machine agree by files in `locks` first."""

    bucket: Bucket
    prefix: str
    locks: Path

    @contextlib.contextmanager
    def hold(self, key: str, on_wait: Callable[[], None] | None) -> Iterator[bool]:
        """Hold `key` while the block runs; see `LocalStore.claim` for what is yielded."""
        name = claim_name(key)
        self.locks.mkdir(parents=True, exist_ok=True)
        with locked(self.locks / name, on_wait) as ours:
            generation = self._take(name, on_wait) if ours else None
            if generation is None:
                yield False
                return
            stop = threading.Event()
            beat = threading.Thread(target=self._renew, args=(name, generation, stop), name="claim", daemon=True)
            beat.start()
            try:
                yield True
            finally:
                stop.set()
                beat.join()
                self._release(name, generation)

    def holders(self) -> dict[str, str]:
        """Return the names that somebody holds, and who on which machine."""
        found, now = self.bucket.listing(f"{self.prefix}/")
        newest = {key.removeprefix(f"{self.prefix}/").rpartition("/")[0]: key for key in sorted(found)}
        held = {}
        for name, key in newest.items():
            # Gone or torn meanwhile: nobody holds it.
            with contextlib.suppress(FileNotFoundError, ValueError, KeyError, TypeError):
                if (now - found[key]).total_seconds() <= EXPIRY_S:
                    owner = json.loads(self.bucket.get(key)[0])
                    held[name] = f"process {owner['pid']} on {owner['host']}"
        return held

    def _take(self, name: str, on_wait: Callable[[], None] | None) -> int | None:
        """Return the generation that is ours, None where another has the claim and nobody wants to wait."""
        waiting = False
        while True:
            generation = self._free(name)
            if generation is not None and self.bucket.put_if(
                self._key(name, generation), self._owner(), IfNoneMatch="*"
            ):
                return generation
            if on_wait is None:
                return None
            if not waiting:
                on_wait()
                waiting = True
            time.sleep(LOOK_S)

    def _free(self, name: str) -> int | None:
        """Return the generation to make, None while somebody holds the newest."""
        found, now = self.bucket.listing(f"{self.prefix}/{name}/")
        if not found:
            return 0
        newest = max(found)
        age = (now - found[newest]).total_seconds()
        if age > EXPIRY_S or self._left_by_us(newest):
            return int(newest.rpartition("/")[2]) + 1
        return None

    def _left_by_us(self, key: str) -> bool:
        """Whether a process of this machine made it: it is dead then, for its lock is ours."""
        try:
            return bool(json.loads(self.bucket.get(key)[0])["machine"] == self._machine())
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return False

    def _renew(self, name: str, generation: int, stop: threading.Event) -> None:
        while not stop.wait(BEAT_S):
            # A store that is away for longer than the expiry costs the claim, never an artifact: see `commit`. Whatever
            # one beat ends with, the next may do better.
            with contextlib.suppress(Exception):
                self.bucket.put(self._key(name, generation), self._owner())

    def _release(self, name: str, generation: int) -> None:
        # What cannot be removed now is abandoned, and found so.
        with contextlib.suppress(Eagle3Error):
            for older in self.bucket.listing(f"{self.prefix}/{name}/")[0]:
                if older < self._key(name, generation):
                    self.bucket.delete(older)
            self.bucket.delete(self._key(name, generation))

    def _key(self, name: str, generation: int) -> str:
        return f"{self.prefix}/{name}/{generation:06d}"

    def _owner(self) -> bytes:
        values = {"machine": self._machine(), "host": socket.gethostname(), "pid": os.getpid()}
        return json.dumps(values).encode()

    def _machine(self) -> str:
        """Return what is equal for all processes that share the locks, and for nobody else."""
        path = self.locks / ".this-machine"
        # A link is there with its text or not at all: machines with an empty name would take each other's claims.
        with contextlib.suppress(FileExistsError):
            path.symlink_to(uuid.uuid4().hex)
        return str(path.readlink())
