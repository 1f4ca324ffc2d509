from __future__ import annotations

import pytest

from eagle3_core.engine.log import last_reason, phases

LOG = """\
[2026-01-01 10:00:00] server_args={...}
[2026-01-01 10:00:01] Load weight begin. avail mem=20.59 GB
[2026-01-01 10:00:02] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("x")
ValueError: expected 8 heads, found 7

[2026-01-01 10:00:03] SIGQUIT received. It usually means one child failed.
"""


def test_the_last_error_is_the_reason_not_the_noise_after_it(tmp_path):
    path = tmp_path / "log"
    path.write_text(LOG, encoding="utf-8")
    assert last_reason(path) == "ValueError: expected 8 heads, found 7"


def test_without_an_error_the_last_telling_line_is_the_reason(tmp_path):
    path = tmp_path / "log"
    path.write_text("[2026-01-01 10:00:01] Load weight begin.\n\n   \n", encoding="utf-8")
    assert last_reason(path) == "[2026-01-01 10:00:01] Load weight begin."
    assert last_reason(tmp_path / "absent") == "no log was written"


@pytest.mark.parametrize(("text", "count"), [("", 0), (LOG, 1), (LOG + "Uvicorn running on", 2)])
def test_phases_appear_as_the_log_grows(text, count):
    assert len(phases(text)) == count
