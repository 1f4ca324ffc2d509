"""What the demo shows of a DAG run."""

import json

import pytest

from eagle3_core.cli.follow import failure, newest_job, stage_views
from eagle3_core.pipeline import STAGES


def instance(task, state, index=-1):
    return {"task_id": task, "state": state, "map_index": index, "end_date": "2026-01-01", "try_number": 1}


def view(name, instances):
    return next(item for item in stage_views(instances) if item.name == name)


def test_every_stage_is_shown_in_order_even_before_it_exists():
    views = stage_views([instance("configure", "running")])
    assert [item.name for item in views] == list(STAGES)
    assert {item.state for item in views} == {"waiting"}


def test_a_mapped_stage_counts_its_elements():
    shards = [instance("capture", "success", 0), instance("capture", "running", 1), instance("capture", None, 2)]
    capture = view("capture", shards)
    assert (capture.state, capture.count()) == ("running", "1 of 3 shards done")
    assert capture.running() == [1]


@pytest.mark.parametrize(
    ("states", "shown"),
    [
        (["success", "skipped"], "success"),
        (["skipped"], "skipped"),
        (["success", None], "waiting"),
        (["success", "up_for_retry"], "up_for_retry"),
        (["running", "failed"], "failed"),
        (["upstream_failed"], "upstream_failed"),
    ],
)
def test_the_state_that_matters_most_is_shown(states, shown):
    found = view("capture", [instance("capture", state, index) for index, state in enumerate(states)])
    assert found.state == shown


def job(directory, name, error=None):
    path = directory / name
    path.mkdir()
    (path / "command.json").write_text("{}")
    if error:
        (path / "error.json").write_text(json.dumps(error))
    return path


def test_a_failed_run_names_the_task_the_error_and_the_log(tmp_path):
    job(tmp_path, "capture-00001-aaaaaaaaaaaa")
    error = {"type": "EngineDiedError", "message": "the server died"}
    failed = job(tmp_path, "capture-00002-bbbbbbbbbbbb", error)
    instances = [
        instance("capture", "success", 1),
        instance("capture", "failed", 2),
        instance("seal", "upstream_failed"),
    ]
    why = failure(None, "run", instances, tmp_path, tmp_path)
    assert (why.task, why.line, why.log) == (
        "capture 2", "[EngineDiedError] the server died", str(failed / "log")
    )  # fmt: skip


def test_the_newest_job_of_a_stage_is_followed(tmp_path):
    import os

    old, new = job(tmp_path, "train-aaaaaaaaaaaa"), job(tmp_path, "train-bbbbbbbbbbbb")
    os.utime(old / "command.json", (1, 1))
    assert newest_job(tmp_path, "train", -1) == new
    assert newest_job(tmp_path, "export", -1) is None
