"""The line between machines: who is missing is said, who cannot take part is named, who is lost is noticed at once."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
import time

import pytest

from eagle3_core.config import TrainingConfig
from eagle3_core.errors import ConfigError, WorkerDiedError
from eagle3_core.train import node, nodes
from eagle3_core.train.nodes import Company, Line, endpoint


@pytest.fixture
def where():
    with socket.create_server(("127.0.0.1", 0)) as free:
        return f"127.0.0.1:{free.getsockname()[1]}"


def call(where, *answers):
    """Return a thread that rings until somebody listens, hears the task, and gives each answer in turn."""

    def ring():
        for answer in answers:
            line = node._connect(where, None)
            line.hear()
            line.say(**answer) if isinstance(answer, dict) else line._connection.sendall(answer)
            line.hear()
            line.close()

    thread = threading.Thread(target=ring, daemon=True)
    thread.start()
    return thread


def gather(where, told, count=2):
    return Company.gather(where, count, "train/abc", {"what": "task"}, told.append)


def test_machines_that_do_not_come_are_counted_with_what_to_run(where, monkeypatch):
    monkeypatch.setattr(nodes, "GATHERING_S", 0.3)
    told = []
    with pytest.raises(WorkerDiedError, match=rf"expected 3 machines .* found 1; run `eagle3 train-node {where}`"):
        gather(where, told, 3)
    assert told == [f"waiting for 2 of 3 machines at {where}"]


def test_a_stranger_that_rings_and_resets_the_line_is_named_and_stops_nobody(where, monkeypatch):
    real, resets = socket.socket.accept, []

    def accept(listener):
        connection, address = real(listener)
        if not resets:
            resets.append(stranger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0)))
            stranger.close()
        return connection, address

    monkeypatch.setattr(socket.socket, "accept", accept)
    stranger, told = socket.socket(), []

    def ring():
        while stranger.connect_ex(endpoint(where)):
            time.sleep(0.01)
        call(where, {"ready": True})

    threading.Thread(target=ring, daemon=True).start()
    company = gather(where, told)
    assert told[1:] == [f"waiting for 1 of 2 machines at {where} (127.0.0.1: hung up)"]
    company.dismiss()


def test_a_stranger_that_says_nothing_is_named_and_keeps_nobody_out(where, monkeypatch):
    monkeypatch.setattr(nodes, "SILENT_S", 0.0)
    told, strangers, gathered = [], [], []
    named = f"waiting for 1 of 2 machines at {where} (127.0.0.1: connected, and has not said that it is ready)"

    def arrive():
        while not strangers:
            with contextlib.suppress(OSError):
                strangers.append(socket.create_connection(endpoint(where)))
        while named not in told:
            time.sleep(0.05)
        call(where, {"ready": True})

    threading.Thread(target=arrive, daemon=True).start()
    leader = threading.Thread(target=lambda: gathered.append(gather(where, told)), daemon=True)
    leader.start()
    leader.join(60)
    assert len(gathered[0].lines) == 1
    strangers[0].settimeout(60)
    assert strangers[0].makefile().read().startswith('{"task"')  # and then it was hung up on
    strangers[0].close()
    gathered[0].dismiss()


def test_who_was_connected_is_named_when_too_few_came(where, monkeypatch):
    monkeypatch.setattr(nodes, "SILENT_S", 0.0)
    monkeypatch.setattr(nodes, "GATHERING_S", 3.0)
    strangers = []

    def arrive():
        while not strangers:
            with contextlib.suppress(OSError):
                strangers.append(socket.create_connection(endpoint(where)))

    threading.Thread(target=arrive, daemon=True).start()
    with pytest.raises(
        WorkerDiedError, match=r"found 1 \(127.0.0.1: connected, and has not said that it is ready\); run"
    ):
        gather(where, [])
    strangers[0].close()


def test_a_machine_too_many_is_sent_away_to_wait_for_the_next_attempt(where):
    lines = []

    def arrive():
        while len(lines) < 3:
            with contextlib.suppress(OSError):
                lines.append(Line(socket.create_connection(endpoint(where)), "127.0.0.1"))
                lines[-1].say(ready=True)

    threading.Thread(target=arrive, daemon=True).start()
    company = gather(where, [])
    assert len(company.lines) == 1
    company.begin(lambda: None)
    heard = []
    for line in lines:
        while (said := line.hear(60)) is not None and "task" in said:
            pass
        heard.append(said)
    assert heard.count({"go": True}) == 1
    assert heard.count(None) == len(lines) - 1
    company.dismiss()
    for line in lines:
        line.close()


def test_a_machine_that_rings_somewhere_else_says_so_and_tries_again(where, monkeypatch, caplog):
    monkeypatch.setattr(node, "GREETING_S", 0.1)
    with socket.create_server(endpoint(where)):
        line = node._connect(where, None)
        assert node._attempt(line, where, None) is None
        line.close()
    assert f"{where} hung up or said nothing for 0.1 s: is that the train stage?" in caplog.text


def test_a_machine_that_cannot_take_part_is_named_and_another_may_come(where):
    told = []
    thread = call(where, b"GET / HTTP/1.1\r\n\r\n", {"refused": "no such root"}, {"ready": True})
    company = gather(where, told)
    assert len(company.lines) == 1
    assert told[1:] == [f"waiting for 1 of 2 machines at {where} (127.0.0.1: hung up)",
                        f"waiting for 1 of 2 machines at {where} (127.0.0.1: no such root)"]  # fmt: skip
    assert company.meeting.arguments()[-1] == "127.0.0.1"
    company.dismiss()
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(("answer", "ends", "cause"), [
    (None, True, "the machine 127.0.0.1 was lost"),
    ({"stopped": True}, False, "the machine 127.0.0.1 was stopped by SIGTERM"),
    ({"code": 1, "cause": "rank 1: it broke", "reports": [{"rank": 1}]}, True,
     "the ranks of 127.0.0.1 ended: rank 1: it broke"),
    ({"code": 0}, False, ""),
])  # fmt: skip
def test_the_end_of_another_machine_is_noticed_and_its_ranks_own_words_are_kept(where, answer, ends, cause):
    here = socket.create_server(("127.0.0.1", 0))
    there = Line(socket.create_connection(here.getsockname()), "127.0.0.1")
    company, ended = Company(None, [Line(here.accept()[0], "127.0.0.1")]), threading.Event()
    company.begin(ended.set)
    assert there.hear() == {"go": True}
    there.close() if answer is None else there.say(**answer)
    company.last_words()
    assert ended.is_set() is ends
    assert company.lost == cause
    assert company.reports == ((answer or {}).get("reports") or [])
    company.dismiss()
    assert there.hear() is None if answer else True
    there.close()
    here.close()


def test_a_place_that_is_taken_or_is_none_is_named(where):
    with socket.create_server(("", endpoint(where)[1])), pytest.raises(WorkerDiedError, match="cannot listen there"):
        gather(where, [])
    for text in ("host", "host:0", ":29400", "host:65535", "my host:1"):
        with pytest.raises(ConfigError, match=r"training.rdzv_endpoint: expected HOST:PORT with a port of 1 to 65534"):
            endpoint(text)


def test_several_nodes_need_an_endpoint():
    with pytest.raises(ConfigError, match="nodes 2 needs"):
        TrainingConfig.parse({"nodes": 2}, "training")


def test_a_machine_that_lacks_what_is_needed_says_so_and_ends(where, tmp_path):
    heard = []

    def lead():
        with socket.create_server(endpoint(where)) as listener:
            line = Line(listener.accept()[0], "127.0.0.1")
            line.say(task={"root": str(tmp_path)})
            heard.append(line.hear())
            line.close()

    thread = threading.Thread(target=lead)
    thread.start()
    with pytest.raises(ConfigError, match="run"):
        node.take_part(where, tmp_path)
    thread.join()
    assert "run" in heard[0]["refused"]
