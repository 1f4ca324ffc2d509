"""Pages inside Airflow's UI, behind Airflow's login. Every Airflow process loads this module."""

from __future__ import annotations

import functools
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from airflow.plugins_manager import AirflowPlugin

from operators.links import PREFIX

_Message = MutableMapping[str, Any]


async def _pages(
    scope: _Message, receive: Callable[[], Awaitable[_Message]], send: Callable[[_Message], Awaitable[None]]
) -> None:
    """ASGI: import and build the real app at the first request."""
    await _built()(scope, receive, send)


@functools.cache
def _built() -> Any:
    from operators.pages import build

    return build()


class Eagle3Plugin(AirflowPlugin):
    """Adds the pages and the Report tab of a run."""

    name = "eagle3"
    fastapi_apps = [{"app": _pages, "url_prefix": PREFIX, "name": "eagle3"}]  # noqa: RUF012
    external_views = [  # noqa: RUF012
        {
            "name": "Report",
            "href": f"{PREFIX}/run?dag_id={{DAG_ID}}&run_id={{RUN_ID}}",
            "destination": "dag_run",
            "url_route": "eagle3_report",
        }
    ]
