"""JobOperator: start or re-join a job and follow it. StageOperator: the job is one stage of the pipeline."""

from __future__ import annotations

import time
import urllib.error
import urllib.request
from collections.abc import Collection, Mapping, Sequence
from typing import Any, ClassVar

from airflow.sdk import BaseOperator, BaseOperatorLink, conf
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from eagle3_core import jobs
from eagle3_core.artifacts import Ref
from eagle3_core.errors import Eagle3Error, JobFencedError, Remedy
from eagle3_core.pipeline import Stage
from eagle3_core.storage import ObjectStore, open_store
from operators import settings
from operators.links import JobLink, job_url

JOINED_LOG_BYTES = 8192
"""How much of an already running job's log a re-joining task repeats."""


class JobOperator(BaseOperator):
    """Start or re-join a supervised job, follow it to its end.

    The job outlives this task: a retry after a crash of the worker, the scheduler or the host re-joins it or, where it
    is gone, starts another attempt that continues its partial work. Only a kill by the user ends it.
    """

    operator_extra_links: Collection[BaseOperatorLink] = (JobLink(),)
    ui_color = "#dbe9f6"

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._job: jobs.Job | None = None
        self._owner = ""

    def run_job(self, context: Any, spec: jobs.JobSpec) -> tuple[jobs.Job, jobs.JobState]:
        """Return the job and how it ended; its log goes to the task's log, line by line."""
        self.push_link(context, spec)
        self._owner = f"{context['ti'].id} try {context['ti'].try_number}"
        self._job = jobs.start_or_join(spec, self._owner, always=True)
        self.log.info("%s job %s", "re-joined" if self._job.joined else "started", spec.directory)
        return self._job, self._follow(self._job)

    def push_link(self, context: Any, spec: jobs.JobSpec) -> None:
        """Push the address of the job's page: Airflow pushes links when a task ends, this one is wanted before."""
        context["ti"].xcom_push(key=JobLink().xcom_key, value=job_url(spec.directory.name))

    def _follow(self, job: jobs.Job) -> jobs.JobState:
        started, offset = time.monotonic(), job.log_start
        if job.joined:
            offset = max(offset, job.log_size() - JOINED_LOG_BYTES)
        while True:
            state = job.state()
            lines, offset = job.log_since(offset)
            for line in lines:
                self.log.info("%s", line)
            if state.name != "running":
                return state
            job.renew()
            # Short jobs are looked at more often.
            time.sleep(min(1.0, 0.1 + (time.monotonic() - started) / 20))

    def on_kill(self) -> None:
        """End the job, unless another attempt owns it by now or Airflow itself is what fails."""
        if self._job is None:
            return
        if not _airflow_answers():
            self.log.warning("Airflow's API does not answer; the job stays, bounded by its lease")
            return
        try:
            jobs.kill(self._job.directory, self._owner)
        except JobFencedError as error:
            self.log.info("%s", error)


class StageOperator(JobOperator):
    """Run one stage of the pipeline in the engine environment; return the reference of its output.

    Args:
        run_key: Key of the frozen run configuration below the root.
        inputs: Input name to reference, as the upstream tasks returned them.
        index: Element of a fanned-out stage.
    """

    stage: ClassVar[Stage]
    template_fields: Sequence[str] = ("run_key", "inputs", "index")

    def __init__(
        self, *, run_key: Any, inputs: Mapping[str, Any] | None = None, index: Any = None, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.run_key = run_key
        self.inputs = dict(inputs or {})
        self.index = index

    def execute(self, context: Any) -> dict[str, Any]:
        """Return the output's reference.

        Raises:
            AirflowFailException: only a change by the user helps; no retry is spent.
            AirflowException: a retry may help.
        """
        try:
            store = open_store(settings.root())
            refs = {name: Ref.parse(value, f"input {name}") for name, value in self.inputs.items()}
            context["map_name"] = self.map_name(store, refs)
            return self._run(context, store, refs).model_dump(mode="json")
        except Eagle3Error as error:
            raise as_airflow(error) from None

    def map_name(self, store: ObjectStore, refs: Mapping[str, Ref]) -> str:
        """Return the readable name of this element; overridden by fanned-out stages."""
        return self.stage.name

    def _run(self, context: Any, store: ObjectStore, refs: Mapping[str, Ref]) -> Ref:
        spec = jobs.stage_job(store.root, self.run_key, self.stage.name, refs, self.index)
        if not self.stage.always and (done := jobs.committed_result(spec, store)) is not None:
            self.push_link(context, spec)
            self.log.info("committed already: %s", done.key)
            return done
        return jobs.outcome(*self.run_job(context, spec))


def as_airflow(error: Eagle3Error) -> AirflowException:
    """Return the error as Airflow's: without retries where only a change by the user helps."""
    kind = AirflowFailException if error.remedy is Remedy.FIX else AirflowException
    return kind(f"[{type(error).__name__}] {error}")


def _airflow_answers() -> bool:
    """Tell a kill by the user from a supervisor that gave up because the API server is away."""
    default = f"{conf.get('api', 'base_url', fallback='http://localhost:8080').rstrip('/')}/execution/"
    url = conf.get("core", "execution_api_server_url", fallback=default)
    try:
        with urllib.request.urlopen(f"{url.rstrip('/')}/health", timeout=3):
            return True
    except (urllib.error.URLError, OSError):
        return False
