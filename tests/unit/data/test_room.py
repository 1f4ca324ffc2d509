"""A disk that holds fewer shards than are recorded at once: the oldest go on, the newest wait."""

import threading
import time

import pytest

from eagle3_core.data.room import Free, GiveWayError, Room
from eagle3_core.errors import StorageFullError


class Disk:
    def __init__(self, free):
        self.free = free

    def __call__(self):
        return Free(self.free, "/disk")


def started(call, *arguments):
    thread = threading.Thread(target=call, args=arguments, daemon=True)
    thread.start()
    return thread


def waits(thread):
    """Tell whether a thread still waits after it had time not to."""
    time.sleep(0.2)
    return thread.is_alive()


def test_a_shard_enters_beside_others_only_if_what_all_of_them_still_write_fits():
    disk = Disk(350)
    room = Room(disk, reserve=100, on_their_way=0, at_once=9)
    room.enter(1, 100)
    room.enter(2, 100)
    third = started(room.enter, 3, 100)
    assert waits(third)
    disk.free = 300
    room.keep(1, 50)
    assert waits(third)  # 50 + 100 + 100 + 100 is more than 300
    room.leave(1)
    third.join(20)
    assert not third.is_alive()


def test_the_newest_gives_way_and_the_oldest_waits_for_that_and_goes_on():
    disk = Disk(1000)
    room = Room(disk, reserve=100, on_their_way=0, at_once=9)
    for shard in (7, 3, 5):
        room.enter(shard, 100)
    disk.free = 250
    room.keep(7, 90)  # its own rest fits
    with pytest.raises(GiveWayError, match="shard 5"):
        room.keep(5, 100)
    disk.free = 150
    oldest = started(room.keep, 7, 80)
    assert waits(oldest)
    room.leave(5)
    assert waits(oldest)
    with pytest.raises(GiveWayError, match="shard 3"):
        room.keep(3, 100)
    disk.free = 180  # what both had written is gone
    room.leave(3)
    oldest.join(20)
    assert not oldest.is_alive()


def test_what_is_alone_and_has_no_room_is_told_what_would_be_needed():
    disk = Disk(1000)
    room = Room(disk, reserve=100, on_their_way=600, at_once=9)
    with pytest.raises(
        StorageFullError, match=r"^/disk: expected 301 bytes for the rest of a shard, 600 for states on"
    ):
        room.enter(1, 301)
    room.enter(1, 300)
    disk.free = 299  # states are on their way by now, and have taken what was asked for them
    with pytest.raises(StorageFullError, match=r"shard, plus a reserve of 100, found 299 free; free space and resume"):
        room.keep(1, 200)
    room.keep(1, 199)


def test_a_shard_whose_rows_are_on_the_disk_keeps_room_for_what_comes_with_its_commit():
    disk = Disk(110)
    room = Room(disk, reserve=0, on_their_way=0, at_once=9)
    room.enter(1, 100)
    room.written(1, 10)
    second = started(room.enter, 2, 101)
    assert waits(second)
    third = started(room.enter, 3, 100)
    third.join(20)
    assert not third.is_alive()
    with pytest.raises(GiveWayError):
        room.keep(3, 101)
    room.leave(3)
    room.leave(1)
    second.join(20)
    assert not second.is_alive()


def test_a_disk_that_is_full_whatever_its_figures_say_gets_fewer_shards_at_once():
    room = Room(Disk(1 << 60), reserve=0, on_their_way=0, at_once=9)
    for shard in (1, 2, 3):
        room.enter(shard, 1)
    assert room.fewer(3)
    room.leave(3)
    again = started(room.enter, 3, 1)
    assert waits(again)
    room.leave(1)
    again.join(20)
    assert not again.is_alive()
    assert room.fewer(3)
    room.leave(3)
    assert room.fewer(2)  # it is alone now, and was not when it met the full disk
    room.leave(2)
    room.enter(2, 1)
    assert not room.fewer(2)


def test_a_shard_has_its_turn_when_one_before_it_is_on_the_disk_or_over():
    room = Room(Disk(1 << 60), reserve=0, on_their_way=0, at_once=2)
    room.enter(1, 100)
    room.enter(2, 100)
    third, fourth = started(room.enter, 3, 100), started(room.wait_written, 1)
    room.keep(1, 1)
    assert waits(third)
    assert waits(fourth)
    room.written(1, 5)
    third.join(20)
    fourth.join(20)
    assert not third.is_alive()
    assert not fourth.is_alive()
    last = started(room.enter, 4, 100)
    assert waits(last)
    room.leave(2)
    last.join(20)
    assert not last.is_alive()
    room.wait_written(2)
