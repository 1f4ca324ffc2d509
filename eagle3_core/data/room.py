"""Which shards are captured at once: as many as the disk has room for, those begun first before the others."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

from eagle3_core.errors import StorageFullError


class GiveWayError(Exception):
    """A shard that was begun before has to have the room; there may be some again once it is finished."""


@dataclass(frozen=True)
class Free:
    """What may still be written, and where."""

    bytes: int
    where: str


class Room:
    """Lets a shard in when few are captured and the disk holds all of it beside what they still have to write.

    When the disk fills meanwhile, the newest gives way until the rest of the others fits: what it has written goes, and
    the oldest goes on. Only one that is alone is refused. Safe for threads.
    """

    def __init__(self, free: Callable[[], Free], reserve: int, on_their_way: int, at_once: int) -> None:
        """Ask `free` each time; leave `reserve` bytes, and as many as states `on_their_way` may take of this disk.

        Of those let in, `at_once` may still have rows to write; the others are summed and committed.
        """
        self._free, self._reserve, self._on_their_way, self._at_once = free, reserve, on_their_way, at_once
        self._rests: dict[int, int] = {}
        self._recorded = set[int]()
        self._had_others = set[int]()
        self._most: float = float("inf")
        self._changed = threading.Condition()

    def enter(self, shard: int, need: int) -> None:
        """Wait until it is the turn of a shard of `need` bytes and there is room for it.

        Raises:
            StorageFullError: there is none, and none of our own under way will give any back.
        """
        with self._changed:
            while not self._its_turn() or not self._fits(need + sum(self._rests.values()) + self._on_their_way):
                if not self._rests:
                    raise self._full(need, self._on_their_way)
                self._changed.wait()
            self._rests[shard] = need
            if len(self._rests) > 1:
                self._had_others |= self._rests.keys()

    def keep(self, shard: int, rest: int) -> None:
        """Go on with a shard that has `rest` bytes to write; wait where newer ones give way for it.

        Raises:
            GiveWayError: an older one needs the room.
            StorageFullError: the shard is alone, and there is none.
        """
        with self._changed:
            self._rests[shard] = rest
            # What lies in the spool has left the free space by now, and was asked for at the door.
            while not self._fits(sum(size for other, size in self._rests.items() if not self._newer(other, shard))):
                if not self._is_newest(shard):
                    self._changed.wait()
                elif len(self._rests) > 1:
                    raise GiveWayError(f"shard {shard}: no room for it beside those that were begun before")
                else:
                    raise self._full(rest)

    def written(self, shard: int, rest: int) -> None:
        """Let another begin: the rows of this shard are on the disk, `rest` bytes about them are still to come."""
        with self._changed:
            self._rests[shard] = rest
            self._recorded.add(shard)
            self._changed.notify_all()

    def wait_written(self, shard: int) -> None:
        """Wait until the rows of a shard are on the disk, or it is over."""
        with self._changed:
            while shard in self._rests.keys() - self._recorded:
                self._changed.wait()

    def leave(self, shard: int) -> None:
        """Forget a shard that is finished or given up; what it had written and nobody needs is gone by now."""
        with self._changed:
            self._rests.pop(shard, None)
            self._recorded.discard(shard)
            self._had_others.discard(shard)
            self._changed.notify_all()

    def fewer(self, shard: int) -> bool:
        """Expect room for one shard less than are under way, since this one met a full disk whatever the figures say.

        Returns:
            Whether that may help: it was not alone all the time.
        """
        with self._changed:
            self._most = min(self._most, max(1, len(self._rests) - 1))
            return shard in self._had_others

    def _its_turn(self) -> bool:
        return len(self._rests) < self._most and len(self._rests.keys() - self._recorded) < self._at_once

    def _newer(self, other: int, shard: int) -> bool:
        order = list(self._rests)
        return order.index(other) > order.index(shard)

    def _is_newest(self, shard: int) -> bool:
        return list(self._rests)[-1] == shard

    def _fits(self, need: int) -> bool:
        return self._free().bytes >= need + self._reserve

    def _full(self, need: int, on_their_way: int = 0) -> StorageFullError:
        free = self._free()
        waiting = f"{on_their_way:,} for states on their way, " if on_their_way else ""
        return StorageFullError(
            f"{free.where}: expected {need:,} bytes for the rest of a shard, {waiting}plus a reserve of "
            f"{self._reserve:,}, found {free.bytes:,} free; free space and resume: committed shards are kept"
        )
