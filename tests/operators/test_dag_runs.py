"""Whole DAG runs through Airflow's own machinery on an empty database; only the stages' work is a stand-in.

The tests share one root and run in order: each takes up what the one before left.
"""

from collections import Counter
from pathlib import Path

import pytest

from eagle3_core.pipeline import STAGES

DAGS = Path(__file__).resolve().parents[2] / "dags"


@pytest.fixture(scope="module")
def engine(engine_in, tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield engine_in(tmp_path_factory.mktemp("runs"), monkeypatch)


@pytest.fixture(scope="module")
def run(engine):
    from airflow.dag_processing.dagbag import DagBag
    from airflow.models.pool import Pool
    from airflow.utils import db

    db.initdb()
    Pool.create_or_update_pool("engine", 1, "", include_deferred=True)
    bag = DagBag(str(DAGS), bundle_name="dags-folder")

    def start(dag_id, conf):
        result = bag.dags[dag_id].test(run_conf=conf)
        return result, {(task.task_id, task.map_index): task for task in result.get_task_instances()}

    return start


@pytest.fixture(scope="module")
def conf(target):
    shapes = [{"num_steps": 7, "topk": 1, "num_draft_tokens": 8}]
    return {**target, "overrides": {"evaluation.shapes": shapes}}


@pytest.fixture(scope="module")
def trained(run, engine, conf):
    engine.fail_once("capture", "CaptureMismatchError", "rows 7, tokens 8")
    return run("train_drafter", conf)


def states(tasks):
    return {f"{name}[{index}]" if index >= 0 else name: str(task.state) for (name, index), task in tasks.items()}


def test_train_drafter_runs_every_stage_and_retries_a_failed_shard_alone(trained, engine):
    result, tasks = trained
    assert result.state == "success", states(tasks)
    calls = engine.calls()
    assert sorted({call.split()[0] for call in calls}) == sorted(STAGES)
    # Airflow starts mapped tasks in any order, so any one of them may be the first, which fails.
    captured = Counter(call for call in calls if call.startswith("capture"))
    assert set(captured) == {"capture 0", "capture 1", "capture 2"}
    assert sorted(captured.values()) == [1, 1, 2]
    assert sorted(call for call in calls if call.startswith("evaluate")) == ["evaluate 0", "evaluate 1"]


def test_mapped_tasks_have_readable_names(trained):
    _, tasks = trained
    assert tasks["capture", 1].rendered_map_index == "shard 1: samples 32..63, 1,001 tokens"
    assert [tasks["evaluate", index].rendered_map_index for index in range(2)] == ["baseline", "7/1/8"]


def test_a_second_run_computes_nothing_and_looks_at_machine_and_release_alone(run, trained, engine, conf):
    before = engine.calls()
    result, tasks = run("train_drafter", conf)
    assert result.state == "success", states(tasks)
    assert engine.calls()[len(before) :] == ["preflight None", "publish None"]
    report = tasks["report", -1].xcom_pull(task_ids="report")
    assert report == trained[1]["report", -1].xcom_pull(task_ids="report")
    assert report["facts"]["acceptance_length"] == 2.5


def test_a_refused_challenger_is_a_skipped_task_in_a_run_that_went_well_and_says_why(run, trained, engine, conf):
    said = "Kept the champion of demo: Refused for lead over the champion: at 7/1/8 ..."
    engine.says("publish", {"outcome": "kept", "published": False, "said": said})
    before = engine.calls()
    result, tasks = run("train_drafter", conf)
    engine.says("publish", None)
    publish = tasks["publish", -1]
    assert (result.state, str(publish.state)) == ("success", "skipped"), states(tasks)
    assert publish.try_number == 1
    assert engine.calls()[len(before) :].count("publish None") == 1
    assert publish.xcom_pull(task_ids="publish", key="verdict") == said
    assert publish.xcom_pull(task_ids="publish")["facts"]["outcome"] == "kept"
    report = publish.xcom_pull(task_ids="report")["key"]
    assert {publish.xcom_pull(task_ids=name, key="report") for name in ("report", "publish")} == {report}


def test_the_report_tab_finds_the_report_of_a_run_and_of_the_night_that_triggered_it(run, trained, engine):
    from fastapi import HTTPException

    from operators.pages import run_page

    result, tasks = trained
    key = tasks["report", -1].xcom_pull(task_ids="report")["key"]
    assert run_page("train_drafter", result.run_id).headers["location"] == f"/eagle3/{key}"
    with pytest.raises(HTTPException, match="no report yet"):
        run_page("train_drafter", "another run")


def test_repair_captures_exactly_what_is_bad_and_seals_again(run, trained, engine):
    before = engine.calls()
    seal = trained[1]["seal", -1].xcom_pull(task_ids="seal")
    shard = trained[1]["capture", 1].xcom_pull(task_ids="capture", map_indexes=1)
    (engine.root / shard["key"] / "manifest.json").unlink()
    (engine.directory / "bad").write_text("[1]")
    result, tasks = run("repair_capture", {"features": seal["key"]})
    assert result.state == "success", states(tasks)
    assert engine.calls()[len(before) :] == ["capture 1"]
    assert tasks["capture", 0].rendered_map_index == "shard 1: samples 32..63, 1,001 tokens"
    assert tasks["seal", -1].xcom_pull(task_ids="seal") == seal


def test_repair_of_what_is_well_captures_nothing(run, trained, engine):
    (engine.directory / "bad").write_text("[]")
    result, tasks = run("repair_capture", {})
    assert result.state == "success", states(tasks)
    assert str(tasks["capture", -1].state) == "skipped"
    assert str(tasks["seal", -1].state) == "success"


@pytest.mark.parametrize(
    ("dag", "task", "sent"),
    [("train_drafter", "configure", {"data.max_promps": 3}), ("repair_capture", "find_plan", {"feature": "seal/0"})],
)
def test_a_parameter_that_nobody_knows_starts_nothing(run, trained, engine, conf, dag, task, sent):
    before = engine.calls()
    result, tasks = run(dag, sent | (conf if dag == "train_drafter" else {}))
    assert (str(result.state), str(tasks[task, -1].state)) == ("failed", "failed")
    assert engine.calls() == before


def test_a_wrong_target_fails_at_once_and_starts_no_job(run, trained, engine, conf):
    before = engine.calls()
    result, tasks = run("train_drafter", {**conf, "target.model": "/nowhere"})
    assert result.state == "failed"
    assert tasks["configure", -1].try_number == 1
    assert engine.calls() == before
