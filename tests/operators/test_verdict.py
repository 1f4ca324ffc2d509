"""The last task of a night: what the triggered run came to, on the night's own page."""

from unittest.mock import MagicMock

import pytest
from airflow.sdk.exceptions import AirflowFailException, AirflowSkipException

from eagle3_core.artifacts import Kind, Ref
from operators.stages import VerdictOperator

REPORT = "report/0123456789abcdef"


def night(outcome, published, **missing):
    """Execute the task on what publish left; return its answer and what it pushed."""
    facts = {"outcome": outcome, "published": published, "said": f"{outcome}: because"}
    release = Ref(kind=Kind.RELEASE, key="publish/a", manifest_sha256="0" * 64, facts=facts).model_dump(mode="json")
    left = {"verdict": facts["said"], "report": REPORT, "return_value": release, **missing}
    ti = MagicMock()
    ti.xcom_pull.side_effect = lambda task_ids, dag_id, run_id, key: (
        left[key] if (task_ids, dag_id, run_id) == ("publish", "train_drafter", "tonight") else None
    )
    task = VerdictOperator(task_id="verdict", dag_id="train_drafter", run_id="tonight")
    try:
        return task.execute({"ti": ti}), {call.kwargs["key"]: call.kwargs["value"] for call in ti.xcom_push.mock_calls}
    except AirflowSkipException as skipped:
        return skipped, {call.kwargs["key"]: call.kwargs["value"] for call in ti.xcom_push.mock_calls}


def test_a_new_champion_is_a_green_night():
    answer, pushed = night("published", True)
    assert answer == "published: because"
    assert pushed == {"verdict": "published: because", "report": REPORT}


@pytest.mark.parametrize(("outcome", "published"), [("kept", False), ("refused", False), ("unchanged", True)])
def test_a_night_that_changed_nothing_is_skipped_with_the_reason_and_still_links_its_report(outcome, published):
    answer, pushed = night(outcome, published)
    assert isinstance(answer, AirflowSkipException)
    assert str(answer) == f"{outcome}: because"
    assert pushed["report"] == REPORT


@pytest.mark.parametrize("gone", ["verdict", "report", "return_value"])
def test_a_run_without_a_verdict_is_no_quiet_success(gone):
    with pytest.raises(AirflowFailException, match="tonight: expected the verdict of its task publish, found none"):
        night("published", True, **{gone: None})
