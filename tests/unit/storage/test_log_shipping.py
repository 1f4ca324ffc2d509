"""A log that grows on this machine is found in the bucket, whatever becomes of the machine."""

import time

import pytest

from eagle3_core.engine import shipping
from eagle3_core.engine.shipping import ShippedLog
from eagle3_core.storage import open_store


@pytest.fixture
def shipped(s3, tmp_path, monkeypatch):
    monkeypatch.setattr(shipping, "EVERY_S", 0.05)
    log, said = tmp_path / "sglang.log", []
    copy = ShippedLog(log, open_store("s3://bucket/root"), "jobs/capture-1/sglang.log", said.append)
    copy.log, copy.said = log, said
    yield copy
    copy.end()


def arrives(store, text):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline:
        if store.exists("jobs/capture-1/sglang.log") and store.read_bytes("jobs/capture-1/sglang.log") == text:
            return True
        time.sleep(0.02)
    return False


def test_the_copy_follows_the_log_and_has_its_last_line(shipped):
    store = open_store("s3://bucket/root")
    shipped.start()  # before there is a log: the server has not begun
    shipped.log.write_bytes(b"loading weights\n")
    assert arrives(store, b"loading weights\n")
    with shipped.log.open("ab") as log:
        log.write(b"x" * (1 << 20))
    assert arrives(store, b"x" * (1 << 20))  # a MiB of it at most
    shipped.log.write_bytes(b"killed\n")
    shipped.end()
    assert store.read_bytes("jobs/capture-1/sglang.log") == b"killed\n"


def test_a_server_that_never_began_has_no_log_to_miss(shipped):
    shipped.start()
    shipped.end()
    assert shipped.said == []


def test_a_bucket_that_refuses_stops_nothing_and_is_said_once(shipped, s3):
    store = open_store("s3://bucket/root")
    s3.delete_bucket(Bucket="bucket")
    shipped.log.write_bytes(b"one")
    shipped.start()
    deadline = time.monotonic() + 20
    while not shipped.said and time.monotonic() < deadline:
        time.sleep(0.02)
    time.sleep(0.3)
    assert len(shipped.said) == 1
    assert "was not copied to s3://bucket/root/jobs/capture-1/sglang.log" in shipped.said[0]
    s3.create_bucket(Bucket="bucket")
    assert arrives(store, b"one")
