"""A store that misbehaves, over TLS: recovered within bounds or refused in one line, and nothing lost or half there."""

import datetime
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.errors import CorruptArtifactError, InputError, StoreUnreachableError
from eagle3_core.storage import commit, find, load, open_store, verify

PART = 5 << 20
README = Path(__file__).resolve().parents[3] / "README.md"


@pytest.fixture(autouse=True)
def small_parts(monkeypatch, no_waits):
    monkeypatch.setattr("eagle3_core.storage.s3.PART_BYTES", PART)


@pytest.fixture
def large(tmp_path):
    """Return a directory with a file of three parts."""
    staged = tmp_path / "large"
    staged.mkdir()
    (staged / "features.bin").write_bytes(os.urandom(2 * PART + 999))
    return staged


def objects(s3):
    return [item["Key"] for item in s3.list_objects_v2(Bucket="bucket").get("Contents", [])]


def uploads(s3):
    return sorted(item["Key"] for item in s3.list_multipart_uploads(Bucket="bucket").get("Uploads", []))


# ------------------------------------------------------------------------------------------------- killed half-way
@pytest.fixture
def killed_upload(s3, server, large):
    """Return once a process was killed between the parts of an upload."""
    held, hold = threading.Event(), threading.Event()

    def fault(request, _environ):
        if "partNumber=2" in request or "partNumber=3" in request:
            held.set()
            hold.wait(20)

    server.fault = fault
    code = (
        "import sys; from pathlib import Path; from eagle3_core.artifacts import Kind\n"
        "import eagle3_core.storage.s3 as s3; from eagle3_core.storage import commit, open_store\n"
        f"s3.PART_BYTES = {PART}\n"
        f"commit(open_store('s3://bucket/some/prefix'), 'capture/i/s', Path({str(large)!r}), Kind.SHARD)\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code])
    assert held.wait(60)
    writer.send_signal(signal.SIGKILL)
    writer.wait()
    hold.set()
    server.fault = None


def test_an_upload_that_was_killed_is_nowhere_to_be_seen_and_a_later_run_finishes(store, s3, killed_upload, large):
    assert find(store, "capture/i/s") is None
    assert objects(s3) == []
    assert len(uploads(s3)) == 1
    artifact = verify(store, commit(store, "capture/i/s", large, Kind.SHARD))
    assert artifact.path("features.bin").read_bytes() == (large / "features.bin").read_bytes()


def test_leftovers_are_our_own_old_uploads_and_no_others(store, s3, server, killed_upload):
    def started(days):
        """moto dates every upload to 2010; give it an age."""
        now = datetime.datetime.now(datetime.UTC) - datetime.timedelta(days=days)
        stamp = now.strftime("%Y-%m-%dT%H:%M:%S.000Z").encode()
        old = b"2010-11-10T20:48:33.000Z"
        spoil = server.spoiled(lambda body: [body.replace(old, stamp)])
        server.fault = lambda request, _: spoil if "GET" in request and "uploads" in request else None

    [ours] = [key.removeprefix("some/prefix/") for key in uploads(s3)]
    for key in ("elsewhere/capture/i/s", "some/prefix2/capture/i/s", "some/prefix/notes/mine", "capture/i/s"):
        s3.create_multipart_upload(Bucket="bucket", Key=key)
    started(days=0.5)
    assert store.leftovers(86400, remove=True) == []
    started(days=2)
    assert store.leftovers(86400, remove=False) == [ours]
    assert len(uploads(s3)) == 5
    assert store.leftovers(86400, remove=True) == [ours]
    assert uploads(s3) == ["capture/i/s", "elsewhere/capture/i/s", "some/prefix/notes/mine", "some/prefix2/capture/i/s"]


# ------------------------------------------------------------------------------------------------ storms and resets
@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_a_storm_that_ends_is_recovered(store, server, large, fault, no_waits):
    left = server.once("/bucket/", getattr(server, fault), times=7)
    ref = commit(store, "capture/i/s", large, Kind.SHARD)
    assert left == [0]
    server.once("/bucket/", getattr(server, fault), times=7)
    artifact = verify(store, ref)
    server.fault = None
    assert artifact.path("features.bin").read_bytes() == (large / "features.bin").read_bytes()


@pytest.mark.parametrize("fault", ["busy", "reset"])
def test_a_storm_that_does_not_end_asks_for_a_retry_in_one_line(store, server, large, committed, fault):
    server.fault = lambda *_: getattr(server, fault)
    server.requests.clear()
    for attempt in (
        lambda: store.read_bytes("seal/abc/manifest.json"),
        lambda: commit(store, "capture/i/s", large, Kind.SHARD),
        lambda: store.list_keys("seal"),
        lambda: store.exists("seal/abc/manifest.json"),
        lambda: store.remove("seal/abc/manifest.json"),
    ):
        with pytest.raises(StoreUnreachableError, match="try again") as caught:
            attempt()
        assert "\n" not in str(caught.value)
    assert 5 * 5 <= len(server.requests) <= 5 * 10
    server.fault = None
    assert find(store, "seal/abc") == committed
    assert find(store, "capture/i/s") is None


@pytest.mark.parametrize("times", [2, 1000])
def test_answers_that_break_off_are_read_again_but_not_for_ever(store, server, committed, times):
    artifact = load(store, committed)
    server.once("GET /bucket/some/prefix/seal", server.spoiled(lambda body: [body[: len(body) // 2]]), times)
    if times == 2:
        assert find(store, "seal/abc") == committed
        server.once("one.bin", server.spoiled(lambda body: [body[:100]]), times)
        assert artifact.verified_path("one.bin").read_bytes() == b"a" * 1000
        return
    for attempt in (lambda: store.read_bytes("seal/abc/manifest.json"), lambda: artifact.path("one.bin")):
        with pytest.raises(StoreUnreachableError, match="try again"):
            attempt()
    assert [path for path in store.cache.directory.rglob("*") if path.is_file() and path.name != "lock"] == []


def test_a_slow_answer_is_waited_for_and_one_that_stalls_is_asked_for_again(server, committed, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.s3.READ_S", 0.7)
    store, stalls = open_store("s3://bucket/some/prefix"), [True, False]

    def drip(body):
        yield body[:10]
        time.sleep(3 if stalls.pop() else 0.1)
        yield body[10:]

    stalls[:] = [False, False, True]  # taken from the end: the first answer stalls, the next ones are slow
    server.fault = lambda request, _: server.spoiled(drip) if "GET" in request and "one.bin" in request else None
    assert load(store, committed).verified_path("one.bin").read_bytes() == b"a" * 1000


# ------------------------------------------------------------------------------------------------------ wrong bytes
def test_other_bytes_than_were_sent_are_sent_again_once_and_then_refused(store, s3, server, large):
    server.once("partNumber=2", server.spoil_upload)
    verify(store, commit(store, "capture/i/s", large, Kind.SHARD))
    server.fault = lambda request, _: server.spoil_upload if "partNumber=2" in request else None
    (large / "features.bin").write_bytes(os.urandom(2 * PART))
    with pytest.raises(StoreUnreachableError, match="other bytes arrived than were sent, twice; try again"):
        commit(store, "capture/i/other", large, Kind.SHARD)
    server.fault = lambda request, _: server.spoil_upload if "PUT" in request and "manifest.json" in request else None
    (large / "features.bin").write_bytes(b"small")
    with pytest.raises(StoreUnreachableError, match="other bytes arrived than were sent; try again"):
        commit(store, "capture/i/third", large, Kind.SHARD)


def test_an_etag_of_another_kind_is_no_damage_where_the_bytes_are_right(store, server, large):
    def foreign(environ, start_response):
        def start(status, headers, *rest):
            headers = [(k, '"of-another-kind"' if k == "ETag" else v) for k, v in headers]
            return start_response(status, headers, *rest)

        return server._app(environ, start)

    server.fault = lambda request, _: None if "partNumber" in request else foreign
    ref = commit(store, "capture/i/s", large, Kind.SHARD)
    server.fault = None
    assert verify(store, ref).ref == ref


def test_a_download_with_one_wrong_bit_is_made_again_once_and_then_refused(store, server, committed):
    artifact = load(store, committed)
    wrong = server.spoiled(lambda body: [body[:-1] + bytes([body[-1] ^ 1])])
    server.once("GET /bucket/some/prefix/seal/abc/", wrong)
    assert artifact.path("one.bin").read_bytes() == b"a" * 1000
    server.fault = lambda request, _: wrong if "GET" in request and "two.bin" in request else None
    with pytest.raises(CorruptArtifactError, match="2 downloads; repair it"):
        artifact.path("deep/two.bin")
    server.fault = None
    assert artifact.path("deep/two.bin").read_bytes() == b"b" * 500


# ------------------------------------------------------------------------------------------------ what only TLS shows
def test_a_ca_that_is_not_known_is_asked_for_at_once(server, s3, monkeypatch):
    monkeypatch.delenv("AWS_CA_BUNDLE")
    started = len(server.requests)
    with pytest.raises(InputError, match="set AWS_CA_BUNDLE to a PEM file"):
        open_store("s3://bucket/some/prefix").read_bytes("a")
    assert len(server.requests) == started


def test_o1_no_request_has_a_checksum_in_a_trailer_which_other_stores_refuse(store, server, large, monkeypatch):
    from boto3 import Session

    def only_with_a_length(environ, start_response):
        environ["wsgi.input"].read()
        start_response("411 Length Required", [("Content-Length", "0")])
        return []

    server.fault = lambda request, environ: (
        only_with_a_length if "aws-chunked" in environ.get("HTTP_CONTENT_ENCODING", "") else None
    )
    verify(store, commit(store, "capture/i/s", large, Kind.SHARD))
    with pytest.raises(Exception, match="411"):
        Session().client("s3").put_object(Bucket="bucket", Key="x", Body=b"x")
    # What the README tells for clients of others, such as Airflow's log handler.
    for name in ("AWS_REQUEST_CHECKSUM_CALCULATION", "AWS_RESPONSE_CHECKSUM_VALIDATION"):
        assert f"`{name}=when_required`" in README.read_text()
        monkeypatch.setenv(name, "when_required")
    Session().client("s3").put_object(Bucket="bucket", Key="x", Body=b"x")
