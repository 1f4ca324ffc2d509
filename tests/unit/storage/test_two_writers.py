"""Two runs on one root: of writers that interleave one commits, what it committed stays whole, and claims hold."""

import json
import os
import socket
import subprocess
import sys
import threading
import time

import pytest

from eagle3_core.artifacts import Kind
from eagle3_core.errors import InputError, StoreUnreachableError
from eagle3_core.releases import Entry, point
from eagle3_core.storage import commit, find, open_store, verify
from tests.unit.conftest import no_room


def staged(tmp_path, who):
    directory = tmp_path / f"staged-{who}"
    directory.mkdir()
    for name in ("features.bin", "index.json"):
        (directory / name).write_bytes(f"{name} of {who}".encode() * 100)
    return directory


class Pausing:
    """A store that does something else before its n-th change."""

    def __init__(self, store, change, otherwise):
        self._store, self._left, self._otherwise = store, change, otherwise

    def __getattr__(self, name):
        found = getattr(self._store, name)
        if name not in ("put_file", "swap", "remove"):
            return found

        def changing(*arguments):
            if self._left == 0:
                self._otherwise()
            self._left -= 1
            return found(*arguments)

        return changing


# ------------------------------------------------------------------------------------------------------ one commits
@pytest.mark.parametrize("change", range(3))
def test_on_a_bucket_the_one_who_comes_between_commits_and_the_other_returns_its_artifact(store, tmp_path, change):
    first, second = staged(tmp_path, "first"), staged(tmp_path, "second")
    winner = []
    pausing = Pausing(store, change, lambda: winner.append(commit(store, "capture/i/s", second, Kind.SHARD)))
    returned = commit(pausing, "capture/i/s", first, Kind.SHARD)
    assert winner == [returned] == [find(store, "capture/i/s")]
    assert verify(store, returned).path("features.bin").read_bytes() == (second / "features.bin").read_bytes()


def test_in_a_directory_the_second_waits_and_returns_the_firsts_artifact(tmp_path):
    root = str(tmp_path / "root")
    first, second = staged(tmp_path, "first"), staged(tmp_path, "second")
    returned = []
    other = threading.Thread(
        target=lambda: returned.append(commit(open_store(root), "capture/i/s", second, Kind.SHARD))
    )

    def start_the_other():
        other.start()
        time.sleep(0.3)
        assert not returned

    done = commit(Pausing(open_store(root), 1, start_the_other), "capture/i/s", first, Kind.SHARD)
    other.join()
    assert returned == [done] == [find(open_store(root), "capture/i/s")]
    assert verify(open_store(root), done).path("index.json").read_bytes() == b"index.json of first" * 100


@pytest.mark.parametrize("bucket", [True, False])
def test_what_is_committed_is_not_replaced_by_equal_work_with_another_content(store, tmp_path, bucket):
    place = store if bucket else open_store(str(tmp_path / "root"))
    first = commit(place, "capture/i/s", staged(tmp_path, "first"), Kind.SHARD)
    assert commit(place, "capture/i/s", staged(tmp_path, "second"), Kind.SHARD) == first
    verify(place, first)


def test_a_replacement_on_a_bucket_lets_the_old_stand_until_the_new_is_there(store, tmp_path):
    old = commit(store, "preflight/x", staged(tmp_path, "old"), Kind.PREFLIGHT)
    seen = []
    pausing = Pausing(store, 2, lambda: seen.append(verify(store, "preflight/x").ref))
    new = commit(pausing, "preflight/x", staged(tmp_path, "new"), Kind.PREFLIGHT, replace=True)
    assert seen == [old]
    assert verify(store, "preflight/x").ref == new != old


def test_a_manifest_whose_answer_was_lost_is_known_as_ones_own(store, server, tmp_path, no_waits):
    def written_but_reset(environ, start_response):
        b"".join(server._app(environ, lambda *_: None))
        return server.reset(environ, start_response)

    left = server.once("PUT /bucket/some/prefix/capture/i/s/manifest.json", written_but_reset)
    ref = commit(store, "capture/i/s", staged(tmp_path, "first"), Kind.SHARD)
    assert (left, ref) == ([0], find(store, "capture/i/s"))


def entry(letter):
    return Entry(drafter=f"export/{letter}", drafter_manifest_sha256=letter * 64, report=f"report/{letter}",
                 report_manifest_sha256=letter * 64, summary="", at="now", by="me", why="better")  # fmt: skip


@pytest.mark.parametrize("bucket", [True, False])
def test_of_two_that_challenge_one_champion_at_once_the_second_has_not_met_the_new_one(store, tmp_path, bucket):
    place = store if bucket else open_store(str(tmp_path / "root"))
    first, second, third = (entry(letter) for letter in "abc")
    assert point(place, "demo", first, None) is None
    meanwhile = lambda: point(place, "demo", second, first.drafter_manifest_sha256)  # noqa: E731
    why = point(Pausing(place, 0, meanwhile), "demo", third, first.drafter_manifest_sha256)
    assert why == "export/b became the champion while this run was judged; run again to challenge it"
    values = json.loads(place.read_bytes("releases/demo.json"))
    assert (values["current"], values["history"]) == (second.model_dump(), [first.model_dump()])


# ------------------------------------------------------------------------------- stores without conditional writes
def test_a_store_that_does_not_heed_the_condition_is_refused_before_a_manifest(store, server, tmp_path):
    def heedless(environ, start_response):
        return server._app({k: v for k, v in environ.items() if k != "HTTP_IF_NONE_MATCH"}, start_response)

    server.fault = lambda request, environ: heedless if "HTTP_IF_NONE_MATCH" in environ else None
    with pytest.raises(InputError, match=r"in spite of If-None-Match.*use a store that heeds it"):
        commit(store, "capture/i/s", staged(tmp_path, "first"), Kind.SHARD)
    assert find(store, "capture/i/s") is None


def test_a_store_that_does_not_know_the_condition_is_refused(store, server, tmp_path):
    def unknown(_environ, start_response):
        body = b"<Error><Code>NotImplemented</Code><Message>A header you provided is not.</Message></Error>"
        start_response("501 Not Implemented", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
        return [body]

    server.fault = lambda request, environ: unknown if "HTTP_IF_NONE_MATCH" in environ else None
    with pytest.raises(InputError, match=r"knows no conditional writes \(IfNoneMatch\)"):
        commit(store, "capture/i/s", staged(tmp_path, "first"), Kind.SHARD)


def conflict(_environ, start_response):
    body = b"<Error><Code>ConditionalRequestConflict</Code><Message>Again.</Message></Error>"
    start_response("409 Conflict", [("Content-Type", "application/xml"), ("Content-Length", str(len(body)))])
    return [body]


def test_a_conflict_of_writers_is_tried_again_and_ends(store, server, tmp_path):
    server.once("PUT /bucket/some/prefix/capture/i/s/manifest.json", conflict, times=3)
    ref = commit(store, "capture/i/s", staged(tmp_path, "first"), Kind.SHARD)
    assert find(store, "capture/i/s") == ref
    server.fault = lambda request, _: conflict if "manifest.json" in request and "PUT" in request else None
    with pytest.raises(StoreUnreachableError, match="in conflict; try again"):
        commit(store, "capture/i/other", staged(tmp_path, "second"), Kind.SHARD)


# ----------------------------------------------------------------------------------------------------------- claims
@pytest.fixture
def elsewhere(store, monkeypatch, tmp_path):
    """Return the same root as another machine sees it."""
    monkeypatch.setenv("EAGLE3_S3_CACHE", str(tmp_path / "elsewhere"))
    return open_store("s3://bucket/some/prefix")


def test_a_claim_holds_against_other_machines_and_ends_with_the_block(store, elsewhere):
    with store.claim("capture/i/s") as ours:
        assert ours
        with elsewhere.claim("capture/i/s") as theirs:
            assert not theirs
        with elsewhere.claim("capture/i/t") as theirs:
            assert theirs
    with elsewhere.claim("capture/i/s") as theirs:
        assert theirs
    assert store.list_keys("claims") == []


def test_who_holds_what_is_told_on_every_machine(store, elsewhere, monkeypatch):
    assert store.claimed() == {}
    with store.claim("capture/i/s"), elsewhere.claim("plan_capture"):
        me = f"process {os.getpid()} on {socket.gethostname()}"
        assert store.claimed() == elsewhere.claimed() == {"capture-i-s": me, "plan_capture": me}
        monkeypatch.setattr("eagle3_core.storage.claims.EXPIRY_S", -1.0)
        assert store.claimed() == {}
    assert store.claimed() == {}


def test_who_waits_gets_the_claim_after_the_other(store, elsewhere, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.claims.LOOK_S", 0.05)
    order, waits = [], threading.Event()

    def wait_for_it():
        with elsewhere.claim("capture/i/s", waits.set) as theirs:
            order.append(theirs)

    with store.claim("capture/i/s"):
        other = threading.Thread(target=wait_for_it)
        other.start()
        assert waits.wait(20)
        order.append("first")
    other.join()
    assert order == ["first", True]


@pytest.fixture
def killed_owner(store):
    """Return once a process of this machine was killed that held a claim."""
    code = (
        "import time; from eagle3_core.storage import open_store\n"
        "with open_store('s3://bucket/some/prefix').claim('capture/i/s') as ours:\n"
        "    print(ours, flush=True); time.sleep(60)\n"
    )
    owner = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=os.environ.copy())
    assert owner.stdout.readline() == "True\n"
    owner.kill()
    owner.communicate()


def test_a_killed_owners_claim_is_free_at_once_on_its_machine_and_elsewhere_once_it_expired(
    killed_owner, store, elsewhere, monkeypatch
):
    with elsewhere.claim("capture/i/s") as theirs:
        assert not theirs
    with store.claim("capture/i/s") as ours:
        assert ours
    monkeypatch.setattr("eagle3_core.storage.claims.EXPIRY_S", -1.0)
    with elsewhere.claim("capture/i/s") as theirs:
        assert theirs


def test_a_claim_is_renewed_while_it_is_held(store, server, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.claims.BEAT_S", 0.05)
    renewed = threading.Event()

    def count(request, _environ):
        puts = [one for one in server.requests if one.startswith("PUT /bucket/some/prefix/claims/capture-i-s/000000")]
        if len(puts) >= 3:
            renewed.set()

    server.requests.clear()
    server.fault = count
    with store.claim("capture/i/s"):
        assert renewed.wait(20)


def test_a_beat_that_the_store_refuses_is_not_the_last(store, server, monkeypatch):
    monkeypatch.setattr("eagle3_core.storage.claims.BEAT_S", 0.05)
    beats, renewed = [], threading.Event()

    def refuse_two(request, _environ):
        if not request.startswith("PUT /bucket/some/prefix/claims/capture-i-s/000000"):
            return None
        beats.append(request)
        if len(beats) >= 4:
            renewed.set()
        return conflict if len(beats) in (2, 3) else None

    server.fault = refuse_two
    with store.claim("capture/i/s"):
        assert renewed.wait(20)


def test_a_disk_that_is_full_leaves_no_machine_without_a_name(store, elsewhere):
    with no_room(), store.claim("capture/i/s") as ours, elsewhere.claim("capture/i/s") as theirs:
        assert (ours, theirs) == (True, False)


def test_an_owner_that_was_only_slow_does_not_end_its_successors_claim(store, elsewhere, monkeypatch):
    with store.claim("capture/i/s"), monkeypatch.context() as patch:
        patch.setattr("eagle3_core.storage.claims.EXPIRY_S", -1.0)
        successor = elsewhere.claim("capture/i/s")
        assert successor.__enter__()
    with store.claim("capture/i/s") as again:
        assert not again
    successor.__exit__(None, None, None)
    with store.claim("capture/i/s") as again:
        assert again


def test_in_a_directory_of_many_that_swap_what_they_saw_each_change_is_kept(tmp_path):
    store = open_store(str(tmp_path))
    assert store.swap("list", b"", None)

    def add(who):
        for number in range(20):
            while True:
                seen = store.read_bytes("list")
                if store.swap("list", seen + f"{who}-{number} ".encode(), seen):
                    break

    threads = [threading.Thread(target=add, args=(who,)) for who in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(store.read_bytes("list").split())) == 80
