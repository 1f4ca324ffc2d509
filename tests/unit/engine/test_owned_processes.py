from __future__ import annotations

import mmap
import os
import signal
import subprocess
import sys
import time
import uuid

from eagle3_core.cli import demo
from eagle3_core.cli.airflow_local import LocalAirflow
from eagle3_core.data.shards import WAITING_BYTES
from eagle3_core.engine import processes
from eagle3_core.engine.spool import CALLERS, make_spool, most_bytes

SLEEP = "import time; time.sleep(600)"


def gone(pid: int, within_s: float = 20.0) -> bool:
    deadline = time.monotonic() + within_s
    while processes.alive(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not processes.alive(pid)


def test_every_marked_process_is_found_and_ended_whatever_its_session():
    mark = uuid.uuid4().hex
    environment = os.environ | {processes.MARK: mark}
    started = [
        subprocess.Popen([sys.executable, "-c", SLEEP], env=environment, start_new_session=session)
        for session in (False, True)
    ]
    deadline = time.monotonic() + 20
    while len(processes.marked(mark)) < 2 and time.monotonic() < deadline:
        time.sleep(0.05)
    assert processes.marked(mark) == sorted(process.pid for process in started)
    assert processes.kill_marked(mark) == []
    assert [process.wait() for process in started] == [-signal.SIGKILL] * 2


def test_a_zombie_counts_as_dead():
    process = subprocess.Popen([sys.executable, "-c", ""])
    assert gone(process.pid)
    process.wait()


def test_the_server_process_dies_with_a_killed_parent():
    """The parent starts a child that ties itself to it, tells its pid, and is then killed the hard way."""
    child = f"import os; from eagle3_core.engine.child import die_with_parent; die_with_parent(os.getppid()); {SLEEP}"
    parent = (
        "import subprocess, sys, time; "
        f"p = subprocess.Popen([sys.executable, '-c', {child!r}]); time.sleep(2); print(p.pid, flush=True); {SLEEP}"
    )
    with subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        pid = int(process.stdout.readline())
        assert processes.alive(pid)
        process.kill()
    assert gone(pid)


def test_a_free_port_is_one_nobody_listens_on():
    assert not processes.listening(processes.free_port())


def test_a_new_spool_removes_those_of_dead_processes_only(tmp_path):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    dead, living = tmp_path / f"eagle3-spool-{ended.pid}-x", tmp_path / f"eagle3-spool-{os.getppid()}-y"
    for directory in (dead, living):
        directory.mkdir()
        (directory / "file").touch()
    spool = make_spool(tmp_path / "no-memory", tmp_path, 0)
    assert sorted(tmp_path.iterdir()) == sorted([spool, living])


def test_of_servers_whose_owner_was_killed_the_memory_is_freed_and_nobody_elses(tmp_path):
    names = ("sglang_loads_killed", "sglang_loads_in-use", "sglang_loads_foreign", "sglang_loads_living", "of-another")
    killed, in_use, foreign, living, another = segments = [tmp_path / name for name in names]
    for segment in segments:
        segment.write_bytes(bytes(4096))
    code = (
        "import sys; from pathlib import Path; from eagle3_core.engine import processes\n"
        "processes.note_shared_memory(Path(sys.argv[1]), {Path(name) for name in sys.argv[2:]})"
    )
    subprocess.run([sys.executable, "-c", code, tmp_path, killed, in_use, another], check=True)
    mine = processes.note_shared_memory(tmp_path, {living})
    with in_use.open("rb") as file, mmap.mmap(file.fileno(), 4096, prot=mmap.PROT_READ):
        processes.free_shared_memory(tmp_path)
    assert sorted(tmp_path.iterdir()) == sorted([in_use, foreign, living, another, mine])


def test_a_stop_frees_the_memory_of_what_it_ended(tmp_path, monkeypatch):
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    (tmp_path / f"eagle3-spool-{ended.pid}-x").mkdir()
    monkeypatch.setattr(demo, "MEMORY", tmp_path)
    monkeypatch.setattr(demo, "local_airflow", lambda: LocalAirflow(tmp_path / "airflow", str(tmp_path / "store")))
    demo.stop()
    assert [path.name for path in tmp_path.iterdir()] == ["airflow"]


def test_a_spool_is_on_disk_where_memory_has_no_room_for_what_may_wait_in_it(tmp_path):
    memory, disk = tmp_path / "memory", tmp_path / "disk"
    memory.mkdir()
    assert make_spool(memory, disk, 0).parent == memory
    assert make_spool(memory, disk, 1 << 60).parent == disk
    # What waits for the writers of shards holds its files in the spool.
    assert most_bytes(0) == CALLERS * WAITING_BYTES
    assert most_bytes(10) > most_bytes(0)
