"""Trigger a DAG run once: a retry finds the run that an earlier attempt triggered."""

from __future__ import annotations

from typing import Any

from airflow.providers.standard.operators.trigger_dagrun import TriggerDagRunOperator
from airflow.providers.standard.triggers.external_task import DagStateTrigger
from airflow.sdk.exceptions import DagRunTriggerException
from airflow.utils.state import DagRunState


class TriggerOnceOperator(TriggerDagRunOperator):
    """Trigger a run under the name `trigger_run_id` and wait for it; where it is there already, wait for that one.

    Airflow's own operator names each attempt's run anew, or fails, skips or clears where the name is taken: a retry
    after a lost triggerer would train beside the run that goes on. One that has failed is cleared, and so goes on with
    the parameters it had.
    """

    def __init__(self, *, trigger_run_id: str, **kwargs: Any) -> None:
        super().__init__(trigger_run_id=trigger_run_id, wait_for_completion=True, deferrable=True, **kwargs)

    def execute(self, context: Any) -> None:
        """Trigger, or take up what was triggered before.

        Raises:
            DagRunTriggerException: asks Airflow to create the run, or to clear the one that failed.
            TaskDeferred: it runs already.
        """
        state, run_id = self._state(context["ti"]), str(self.trigger_run_id)
        # What was sent beside the form goes on, to be taken or refused by name.
        self.conf = {**context["params"], **(self.conf or {})}
        self.reset_dag_run = state in self.failed_states
        if self.reset_dag_run:
            self.log.info("%s has failed: clearing it, it goes on with the parameters it had", run_id)
        try:
            super().execute(context)  # leaves the link to the run, in any case
        except DagRunTriggerException:
            if state is None or self.reset_dag_run:
                raise
        if state in self.allowed_states:
            self.log.info("%s has run already: %s", run_id, state)
            return
        self.log.info("%s was triggered before, waiting for it", run_id)
        trigger = DagStateTrigger(
            dag_id=self.trigger_dag_id, states=[*self.allowed_states, *self.failed_states], run_ids=[run_id],
            poll_interval=self.poke_interval,
        )  # fmt: skip
        self.defer(trigger=trigger, method_name="execute_complete")

    def _state(self, ti: Any) -> str | None:
        """Return the state of the run; None: there is none."""
        if not ti.get_dr_count(dag_id=self.trigger_dag_id, run_ids=[self.trigger_run_id]):
            return None
        # An enum of its own, whose text is not its value.
        return DagRunState(ti.get_dagrun_state(self.trigger_dag_id, self.trigger_run_id)).value
