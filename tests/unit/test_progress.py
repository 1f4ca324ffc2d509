"""What a stage says of its progress."""

import json
import time

from eagle3_core.progress import FILE, Progress


def test_a_count_that_begins_again_has_a_rate_of_its_own(tmp_path, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    progress = Progress("capture", tmp_path)
    for done in (0, 1000, 10, 20):
        progress.update(done, 1000, "tokens")
        now[0] += 2.0
    state = json.loads((tmp_path / FILE).read_text())
    assert (state["rate"], state["eta_s"]) == (5.0, 196.0)
