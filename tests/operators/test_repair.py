"""Finding the plan to repair."""

import pytest
from airflow.sdk.exceptions import AirflowFailException

from operators.repair import FindPlanOperator


def test_a_root_without_plans_is_one_line_and_no_retry(engine, context):
    with pytest.raises(AirflowFailException, match="expected any plan among 0 made here, found none"):
        FindPlanOperator(task_id="find", key="", known=list(context["params"])).execute(context)


def test_a_key_that_does_not_exist_is_one_line(engine, context):
    with pytest.raises(AirflowFailException, match="expected a committed artifact, found none"):
        FindPlanOperator(task_id="find", key="seal/0123456789abcdef", known=list(context["params"])).execute(context)
