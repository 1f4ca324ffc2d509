"""Links on a task's page: what its job is doing, and the report."""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseOperatorLink
from airflow.sdk.execution_time.xcom import XCom

PREFIX = "/eagle3"
REPORT_KEY = "report"
"""XCom of the report's task and of those after it: the report's key."""
VERDICT_KEY = "verdict"
"""XCom: what became of the drafter, in words."""


def job_url(job: str) -> str:
    """Return the page of a job, by the name of its directory."""
    return f"{PREFIX}/job/{job}"


def report_url(key: str) -> str:
    """Return the page of a committed report, by its key."""
    return f"{PREFIX}/{key}"


class JobLink(BaseOperatorLink):
    """Progress and log of the task's job, live; the operator pushes the address before the job starts."""

    name = "Job"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address that the operator pushed."""
        return str(XCom.get_value(key=self.xcom_key, ti_key=ti_key) or "")


class ReportLink(BaseOperatorLink):
    """The HTML report the task wrote, or that it acted upon."""

    name = "Report"

    def get_link(self, operator: Any, *, ti_key: Any) -> str:
        """Return the address of the report that the task named."""
        key = XCom.get_value(key=REPORT_KEY, ti_key=ti_key)
        return report_url(str(key)) if key else ""
