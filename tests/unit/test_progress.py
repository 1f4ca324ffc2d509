"""What a stage says of its progress."""

import json
import time

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


def test_figures_are_read_without_powers_of_ten():
    state = {"stage": "train", "done": 1, "total": 2, "unit": "steps", "rate": None, "eta_s": 7.6,
             "detail": {"tokens_per_s": 101912.4, "loss": 2.34567, "mfu": 0.64321, "skipped": 2}}  # fmt: skip
    assert describe(state) == "train: 1/2 steps, ETA 8 s, tokens_per_s 101,912, loss 2.346, mfu 0.6432, skipped 2"
