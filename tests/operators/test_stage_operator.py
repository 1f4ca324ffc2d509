"""StageOperator, against the real entry point and real processes; only the stages' work is a stand-in."""

import json
import threading
import time

import pytest
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from eagle3_core.artifacts import Ref
from eagle3_core.config.recipes import load_recipe
from eagle3_core.jobs.processes import members
from eagle3_core.runner import freeze
from eagle3_core.storage import open_store
from operators import base, stages


@pytest.fixture
def run_key(engine, target):
    return freeze(open_store(str(engine.root)), load_recipe("demo", target))


@pytest.fixture
def make(run_key):
    def operator(kind, **arguments):
        return kind(task_id=kind.stage.name, run_key=run_key, **arguments)

    return operator


@pytest.fixture
def plan(make, context):
    prompt_set = make(stages.PrepareOperator).execute(context)
    corpus = make(stages.RegenerateOperator, inputs={"prompt_set": prompt_set}).execute(context)
    return make(stages.PlanCaptureOperator, inputs={"corpus": corpus}).execute(context)


def jobs_of(engine):
    return sorted((engine.root / "jobs").iterdir())


def until(condition):
    while not condition():
        time.sleep(0.02)


def test_it_returns_the_reference_of_what_the_stage_committed(make, context, engine):
    value = make(stages.PrepareOperator).execute(context)
    assert Ref.parse(value, "xcom").key.startswith("prepare/")
    assert len(json.dumps(value)) < 1024


def test_a_committed_output_is_returned_without_running_the_stage(make, context, engine):
    first = make(stages.PrepareOperator).execute(context)
    assert make(stages.PrepareOperator).execute(context) == first
    assert engine.calls() == ["prepare None"]


def test_an_output_that_was_quarantined_is_made_again(make, context, engine):
    value = make(stages.PrepareOperator).execute(context)
    (engine.root / value["key"] / "manifest.json").unlink()
    assert make(stages.PrepareOperator).execute(context) == value
    assert engine.calls() == ["prepare None"] * 2


def test_the_preflight_is_made_anew_each_time(make, context, engine):
    make(stages.PreflightOperator).execute(context)
    make(stages.PreflightOperator).execute(context)
    assert engine.calls() == ["preflight None"] * 2


def test_an_error_that_only_the_user_can_cure_spends_no_retry(make, context, engine):
    engine.fail_once("prepare", "TargetError", "no chat template")
    with pytest.raises(AirflowFailException, match=r"\[TargetError\] no chat template"):
        make(stages.PrepareOperator).execute(context)


def test_an_error_that_a_retry_may_cure_is_retried_and_the_retry_finishes(make, context, engine):
    engine.fail_once("prepare", "EngineDiedError", "gone")
    operator = make(stages.PrepareOperator)
    with pytest.raises(AirflowException, match="EngineDiedError") as raised:
        operator.execute(context)
    assert not isinstance(raised.value, AirflowFailException)
    assert operator.execute(context)["key"].startswith("prepare/")


def test_a_wrong_input_fails_before_any_job_starts(make, context, engine):
    prompt_set = make(stages.PrepareOperator).execute(context)
    with pytest.raises(AirflowFailException, match="expected a corpus reference, found prompt_set"):
        make(stages.BuildVocabOperator, inputs={"corpus": prompt_set}).execute(context)
    assert len(jobs_of(engine)) == 1


def start_held(make, context, engine):
    engine.hold("prepare")
    operator = make(stages.PrepareOperator)
    results = []
    thread = threading.Thread(target=lambda: results.append(outcome(operator, context)))
    thread.start()
    until(lambda: engine.calls())
    return operator, thread, results


def outcome(operator, context):
    try:
        return operator.execute(context)
    except AirflowException as error:
        return error


def test_a_second_attempt_joins_the_running_job_of_the_first(make, context, engine):
    _, first, results = start_held(make, context, engine)
    second = threading.Thread(target=lambda: results.append(outcome(make(stages.PrepareOperator), context)))
    second.start()
    time.sleep(0.5)
    engine.release("prepare")
    first.join()
    second.join()
    assert results[0] == results[1]
    assert engine.calls() == ["prepare None"]


def test_a_kill_by_the_user_ends_every_process_of_the_job(make, context, engine, monkeypatch):
    operator, thread, results = start_held(make, context, engine)
    monkeypatch.setattr(base, "_airflow_answers", lambda: True)
    operator.on_kill()
    thread.join()
    assert isinstance(results[0], AirflowException)
    assert members(jobs_of(engine)[0]) == []


def test_a_stale_attempt_cannot_kill_the_job_of_the_next(make, context, engine, monkeypatch):
    stale, thread, _ = start_held(make, context, engine)
    (jobs_of(engine)[0] / "owner").write_text("ti-2 try 2")
    monkeypatch.setattr(base, "_airflow_answers", lambda: True)
    stale.on_kill()
    assert members(jobs_of(engine)[0])
    engine.release("prepare")
    thread.join()


def test_a_supervisor_that_lost_the_api_server_leaves_the_job_running(make, context, engine, monkeypatch):
    operator, thread, results = start_held(make, context, engine)
    monkeypatch.setenv("AIRFLOW__CORE__EXECUTION_API_SERVER_URL", "http://127.0.0.1:9/execution/")
    operator.on_kill()
    assert members(jobs_of(engine)[0])
    engine.release("prepare")
    thread.join()
    assert results[0]["key"].startswith("prepare/")


def test_a_captured_shard_is_named_by_its_samples_and_tokens(make, context, plan):
    operator = make(stages.CaptureOperator, inputs={"shard_plan": plan}, index=2)
    value = operator.execute(context)
    assert context["map_name"] == "shard 2: samples 64..95, 1,002 tokens"
    assert value["key"].endswith("/00002")


def test_a8_finished_siblings_that_are_cleared_too_return_within_two_seconds_and_start_nothing(
    make, context, plan, engine
):
    shards = [make(stages.CaptureOperator, inputs={"shard_plan": plan}, index=index) for index in range(3)]
    values = [shard.execute(context) for shard in shards]
    (engine.root / values[1]["key"] / "manifest.json").unlink()
    before = engine.calls()
    for index in (0, 2):
        began = time.monotonic()
        assert shards[index].execute(context) == values[index]
        assert time.monotonic() - began < 2.0
    assert engine.calls() == before
    assert shards[1].execute(context) == values[1]
    assert engine.calls() == [*before, "capture 1"]


def test_a_measurement_is_named_by_its_draft_shape(make, run_key, engine):
    store = open_store(str(engine.root))
    names = [make(stages.EvaluateOperator, index=index).map_name(store, {}) for index in (0, 3)]
    assert names == ["baseline", "7/1/8"]


def test_the_address_of_the_job_page_is_pushed_before_the_job_starts(make, context, engine):
    make(stages.PrepareOperator).execute(context)
    pushed = context["ti"].xcom_push.call_args.kwargs
    assert pushed == {"key": "_link_JobLink", "value": f"/eagle3/job/{jobs_of(engine)[0].name}"}
