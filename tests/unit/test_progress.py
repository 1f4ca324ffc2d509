"""What a stage says of its progress."""

import contextlib
import json
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from eagle3_core.progress import FILE, Progress, describe


def test_a_count_that_begins_again_has_a_rate_of_its_own(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress("capture", tmp_path)
    for done in (0, 1000, 10, 20):
        progress.update(done, 1000, "tokens")
        now[0] += 2.0
    state = json.loads((tmp_path / FILE).read_text())
    assert (state["rate"], state["eta_s"]) == (5.0, 196.0)


def test_two_threads_that_report_at_once_do_not_take_each_others_file_away(tmp_path, monkeypatch):
    real, meeting = Path.write_text, threading.Barrier(2)

    def write(path, text, **options):
        real(path, text, **options)
        with contextlib.suppress(threading.BrokenBarrierError):
            meeting.wait(0.5)  # both have written now, if nothing keeps one out

    monkeypatch.setattr(Path, "write_text", write)
    progress = Progress("capture", tmp_path)
    with ThreadPoolExecutor(2) as pool:
        for said in [pool.submit(progress.phase, text) for text in ("one", "two")]:
            said.result()


def test_figures_are_read_without_powers_of_ten():
    state = {"stage": "train", "done": 1, "total": 2, "unit": "steps", "rate": None, "eta_s": 7.6,
             "detail": {"tokens_per_s": 101912.4, "loss": 2.34567, "mfu": 0.64321, "skipped": 2}}  # fmt: skip
    assert describe(state) == "train: 1/2 steps, ETA 8 s, tokens_per_s 101,912, loss 2.346, mfu 0.6432, skipped 2"
