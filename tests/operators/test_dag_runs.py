"""Whole DAG runs through Airflow's own machinery on an empty database; only the stages' work is a stand-in."""

from pathlib import Path

import pytest

from eagle3_core.pipeline import STAGES

DAGS = Path(__file__).resolve().parents[2] / "dags"


@pytest.fixture(scope="module")
def database():
    from airflow.models.pool import Pool
    from airflow.utils import db

    db.initdb()
    Pool.create_or_update_pool("engine", 1, "", include_deferred=True)


@pytest.fixture
def run(database, engine):
    from airflow.dag_processing.dagbag import DagBag

    bag = DagBag(str(DAGS), bundle_name="dags-folder")

    def start(dag_id, conf):
        result = bag.dags[dag_id].test(run_conf=conf)
        return result, {(task.task_id, task.map_index): task for task in result.get_task_instances()}

    return start


def states(tasks):
    return {f"{name}[{index}]" if index >= 0 else name: str(task.state) for (name, index), task in tasks.items()}


def test_train_drafter_runs_every_stage_once_and_a_second_run_computes_nothing(run, engine, target):
    engine.fail_once("capture", "CaptureMismatchError", "rows 7, tokens 8")
    result, tasks = run("train_drafter", target)
    assert result.state == "success", states(tasks)
    # One of the three shards failed once and was retried alone.
    calls = engine.calls()
    assert sorted({call.split()[0] for call in calls}) == sorted(STAGES)
    assert sorted(call for call in calls if call.startswith("capture")) == [
        "capture 0", "capture 0", "capture 1", "capture 2"
    ]  # fmt: skip
    assert sorted(call for call in calls if call.startswith("evaluate")) == [f"evaluate {index}" for index in range(5)]
    assert tasks["capture", 1].rendered_map_index == "shard 1: samples 32..63, 1,001 tokens"
    assert [tasks["evaluate", index].rendered_map_index for index in range(5)] == [
        "baseline", "3/1/4", "5/1/6", "7/1/8", "5/4/16"
    ]  # fmt: skip
    report = tasks["report", -1].xcom_pull(task_ids="report")
    assert report["facts"]["acceptance_length"] == 2.5

    again, tasks = run("train_drafter", target)
    assert again.state == "success", states(tasks)
    assert engine.calls()[len(calls) :] == ["preflight None"]
    assert tasks["report", -1].xcom_pull(task_ids="report") == report


def test_a_wrong_target_fails_at_once_and_starts_no_job(run, engine, target):
    result, tasks = run("train_drafter", {**target, "target.model": "/nowhere"})
    assert result.state == "failed"
    assert tasks["configure", -1].try_number == 1
    assert engine.calls() == []


def test_repair_captures_exactly_what_is_bad_and_seals_again(run, engine, target):
    _, trained = run("train_drafter", target)
    before = engine.calls()
    shard = trained["capture", 1].xcom_pull(task_ids="capture", map_indexes=1)
    (engine.root / shard["key"] / "manifest.json").unlink()
    (engine.directory / "bad").write_text("[1]")
    result, tasks = run("repair_capture", {"features": trained["seal", -1].xcom_pull(task_ids="seal")["key"]})
    assert result.state == "success", states(tasks)
    assert engine.calls()[len(before) :] == ["capture 1"]
    assert tasks["capture", 0].rendered_map_index == "shard 1: samples 32..63, 1,001 tokens"
    assert tasks["seal", -1].xcom_pull(task_ids="seal") == trained["seal", -1].xcom_pull(task_ids="seal")

    (engine.directory / "bad").write_text("[]")
    result, tasks = run("repair_capture", {})
    assert result.state == "success", states(tasks)
    assert str(tasks["capture", -1].state) == "skipped"
    assert str(tasks["seal", -1].state) == "success"


def test_repair_without_any_plan_says_so(run, engine, target):
    result, tasks = run("repair_capture", {})
    assert result.state == "failed"
    assert tasks["find_plan", -1].try_number == 1
