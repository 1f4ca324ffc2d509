"""A night's retry goes on with the run that the attempt before had triggered."""

from unittest.mock import MagicMock

import pytest
from airflow.sdk.api.datamodels._generated import DagRunState
from airflow.sdk.exceptions import DagRunTriggerException, TaskDeferred

from operators.triggered import TriggerOnceOperator

NAME = "nightly__scheduled__2026-12-01T02:00:00+00:00"


def attempt(state):
    """Execute the task where the run it names is in `state`, told as Airflow tells a task; None: there is none."""
    told, ti = state and DagRunState(state), MagicMock()
    ti.get_dr_count.side_effect = lambda dag_id, run_ids: int(
        state is not None and (dag_id, run_ids) == ("train_drafter", [NAME])
    )
    ti.get_dagrun_state.side_effect = lambda dag_id, run_id: {("train_drafter", NAME): told}[dag_id, run_id]
    task = TriggerOnceOperator(
        task_id="train_drafter", trigger_dag_id="train_drafter", trigger_run_id=NAME, poke_interval=7,
        conf={"recipe": "rendered"},
    )  # fmt: skip
    task.execute({"ti": ti, "params": {"recipe": "of the night", "training.epocs": 3}})
    return ti


def test_the_first_attempt_triggers_the_run_under_its_name():
    with pytest.raises(DagRunTriggerException) as asked:
        attempt(None)
    assert (asked.value.dag_run_id, asked.value.reset_dag_run) == (NAME, False)
    # What the form does not know goes on, to be refused by name.
    assert asked.value.conf == {"recipe": "rendered", "training.epocs": 3}
    assert asked.value.wait_for_completion
    assert asked.value.deferrable


@pytest.mark.parametrize("state", ["queued", "running"])
def test_a_retry_waits_for_a_run_that_goes_on(state):
    with pytest.raises(TaskDeferred) as waiting:
        attempt(state)
    trigger = waiting.value.trigger
    assert (trigger.dag_id, trigger.run_ids, trigger.poll_interval) == ("train_drafter", [NAME], 7)
    assert trigger.states == ["success", "failed"]
    assert waiting.value.method_name == "execute_complete"


def test_a_retry_is_content_with_a_run_that_has_succeeded_meanwhile():
    attempt("success").get_dagrun_state.assert_called_once_with("train_drafter", NAME)


def test_a_retry_goes_on_with_a_run_that_has_failed():
    with pytest.raises(DagRunTriggerException) as asked:
        attempt("failed")
    assert (asked.value.dag_run_id, asked.value.reset_dag_run) == (NAME, True)
