"""The DAGs against the stage table: what is wired is what the table says."""

import copy
import datetime
import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from airflow.sdk import XComArg
from airflow.sdk.execution_time import macros

from eagle3_core.config.recipes import load_recipe
from eagle3_core.pipeline import STAGES
from operators import settings
from operators.base import StageOperator
from operators.form import run_params
from operators.settings import ENGINE_POOL

DAGS = Path(__file__).resolve().parents[2] / "dags"
NIGHT = datetime.datetime(2026, 12, 1, 2, tzinfo=datetime.UTC)


def kind_of(task):
    kind = getattr(task, "operator_class", type(task))
    return kind if isinstance(kind, type) and issubclass(kind, StageOperator) else None


def argument(task, name):
    return task.partial_kwargs.get(name) if task.is_mapped else getattr(task, name)


def stage_tasks(dag):
    return {task.task_id: task for task in dag.tasks if kind_of(task)}


def test_every_dag_file_parses(bag):
    assert bag.import_errors == {}
    assert set(bag.dags) == {"train_drafter", "repair_capture", "nightly_retrain"}


def test_train_drafter_has_one_task_for_each_stage_of_the_table(bag):
    tasks = stage_tasks(bag.dags["train_drafter"])
    assert {name: kind_of(task).stage for name, task in tasks.items()} == STAGES


@pytest.mark.parametrize("dag_id", ["train_drafter", "repair_capture"])
def test_every_stage_reads_exactly_what_the_table_says_from_the_stage_that_makes_it(bag, dag_id):
    for task in stage_tasks(bag.dags[dag_id]).values():
        stage = kind_of(task).stage
        inputs = argument(task, "inputs") or {}
        assert set(inputs) == {name for name, _ in stage.inputs}, stage.name
        for name, kind in stage.inputs:
            assert isinstance(inputs[name], XComArg)
            maker = kind_of(inputs[name].operator)
            produced = maker.stage.produces if maker else "shard_plan"  # find_plan of repair_capture
            assert produced == kind, f"{stage.name}.{name}"


@pytest.mark.parametrize("dag_id", ["train_drafter", "repair_capture"])
def test_fanned_out_stages_are_mapped_and_no_others(bag, dag_id):
    for task in stage_tasks(bag.dags[dag_id]).values():
        stage = kind_of(task).stage
        assert task.is_mapped == (stage.fan_out is not None)
        if stage.fan_out:
            assert "map_name" in task.map_index_template


@pytest.mark.parametrize("dag_id", ["train_drafter", "repair_capture"])
def test_stages_that_use_the_engine_wait_for_its_pool(bag, dag_id):
    for task in stage_tasks(bag.dags[dag_id]).values():
        assert (task.pool == ENGINE_POOL) == kind_of(task).stage.engine, task.task_id


def test_sealing_waits_for_every_shard_and_the_report_for_every_shape(bag):
    dag = bag.dags["train_drafter"]
    assert "capture" in dag.get_task("seal").upstream_task_ids
    assert {"evaluate", "challenge"} <= dag.get_task("report").upstream_task_ids
    assert "evaluate" in dag.get_task("challenge").upstream_task_ids
    assert "report" in dag.get_task("publish").upstream_task_ids


def test_nothing_but_configure_runs_before_the_preflight(bag):
    dag = bag.dags["train_drafter"]
    before = {task.task_id for task in dag.get_task("prepare").get_flat_relatives(upstream=True)}
    assert before == {"configure", "preflight"}


def test_tasks_are_retried_with_growing_delays(bag):
    for dag in bag.dags.values():
        for task in dag.tasks:
            assert task.retries == 3
            assert task.retry_exponential_backoff


def test_the_nightly_run_is_scheduled_at_two_and_does_not_catch_up(bag):
    dag = bag.dags["nightly_retrain"]
    assert dag.timetable.expression == "0 2 * * *"
    assert not dag.catchup
    trigger = dag.get_task("train_drafter")
    assert trigger.trigger_dag_id == "train_drafter"
    assert trigger.downstream_task_ids == {"verdict"}


def rendered(bag, **params):
    """Return the configuration that a night passes on."""
    dag = bag.dags["nightly_retrain"]
    run = SimpleNamespace(logical_date=NIGHT, run_after=None)
    task = copy.copy(dag.get_task("train_drafter"))
    task.render_template_fields(
        {"params": {**dag.params.dump(), **params}, "dag_run": run, "macros": macros, "run_id": "tonight"},
        dag.get_template_env(),
    )
    return task.conf


def test_every_attempt_of_a_night_names_the_same_run_and_the_verdict_is_of_that_one(bag):
    dag, names = bag.dags["nightly_retrain"], set()
    for task_id, field in (
        ("train_drafter", "trigger_run_id"),
        ("train_drafter", "trigger_run_id"),
        ("verdict", "run_id"),
    ):
        task = copy.copy(dag.get_task(task_id))
        context = {"params": dag.params.dump(), "dag_run": SimpleNamespace(logical_date=None, run_after=NIGHT),
                   "macros": macros, "run_id": "scheduled__2026-12-01T02:00:00+00:00"}  # fmt: skip
        task.render_template_fields(context, dag.get_template_env())
        names.add(getattr(task, field))
    assert names == {"nightly__scheduled__2026-12-01T02:00:00+00:00"}


def test_a_night_starts_from_the_champion_and_leaves_the_rest_to_the_recipe(bag):
    conf = rendered(bag)
    assert conf.pop("training.start_from") == "champion"
    assert {name for name, value in conf.items() if value not in (None, {})} == {"recipe"}


def test_the_window_of_a_night_ends_with_its_own_yesterday_unless_told_otherwise(bag):
    assert rendered(bag)["data.until"] is None
    assert rendered(bag, **{"data.window_days": 7})["data.until"] == "2026-11-30"
    told = {"data.window_days": 7, "data.until": "2026-06-01"}
    assert rendered(bag, **told)["data.until"] == "2026-06-01"


def test_a_night_passes_on_several_numbers_however_they_were_typed(bag):
    key = "evaluation.concurrency"
    for typed, meant in {"8": (8,), "1, 8": (1, 8), "[1, 8]": (1, 8)}.items():
        passed_on = json.loads(json.dumps(rendered(bag, **{key: typed})[key]))
        run_params()[key].resolve(passed_on)
        assert load_recipe("demo", {key: passed_on}).evaluation.concurrency == meant


def test_the_recipe_of_the_night_is_named_once_for_the_installation(monkeypatch):
    assert settings.nightly_recipe() == "demo"
    monkeypatch.setenv("EAGLE3_NIGHTLY_RECIPE", "/recipes/chat.yaml")
    assert run_params(recipe=settings.nightly_recipe())["recipe"].value == "/recipes/chat.yaml"


def test_parsing_the_dags_imports_no_heavy_library():
    code = (
        "import sys; from airflow.dag_processing.dagbag import DagBag; "
        f"bag = DagBag({str(DAGS)!r}, bundle_name='dags-folder'); assert not bag.import_errors; "
        "print([name for name in ('torch', 'transformers', 'sglang', 'numpy', 'boto3', 'safetensors') "
        "if name in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert output.strip().splitlines()[-1] == "[]"
