from __future__ import annotations

import pytest

from eagle3_core.engine.log import OpenLog, last_reason, phases

LOG = """\
[2026-01-01 10:00:00] server_args={...}
[2026-01-01 10:00:01] Load weight begin. avail mem=20.59 GB
[2026-01-01 10:00:02] Scheduler hit an exception: Traceback (most recent call last):
  File "scheduler.py", line 1, in run
    raise ValueError("x")
ValueError: expected 8 heads, found 7

[2026-01-01 10:00:03] SIGQUIT received. It usually means one child failed.
"""


def test_the_last_error_is_the_reason_not_the_noise_after_it():
    assert last_reason(LOG) == "ValueError: expected 8 heads, found 7"


def test_without_an_error_the_last_telling_line_is_the_reason():
    assert last_reason("[2026-01-01] Load weight begin.\n\n   \n") == "[2026-01-01] Load weight begin."
    assert last_reason("") == "its log is empty"


def test_last_words_are_this_starts_own_and_outlive_the_file_and_its_watch(tmp_path):
    path = tmp_path / "log"
    path.write_text("RuntimeError: of an earlier start\n", encoding="utf-8")
    log = OpenLog(path)
    assert log.last_words() == f"last log line: its log is empty [{path}]"
    with path.open("a", encoding="utf-8") as writer:
        writer.write("Load weight begin.\n")
        path.unlink()
        writer.write(LOG)
    said = f"last log line: ValueError: expected 8 heads, found 7 [{path}, which was removed]"
    assert log.last_words() == said
    log.close()
    assert log.last_words() == said


@pytest.mark.parametrize(("text", "count"), [("", 0), (LOG, 1), (LOG + "Uvicorn running on", 2)])
def test_phases_appear_as_the_log_grows(text, count):
    assert len(phases(text)) == count
