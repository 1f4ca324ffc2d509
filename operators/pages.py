"""The pages the plugin adds: a run's report, and a job's progress and log. Airflow's API server alone imports them."""

from __future__ import annotations

import html
import re
from pathlib import Path

from airflow.api_fastapi.core_api.security import get_user
from airflow.models.xcom import XComModel
from airflow.utils.session import create_session
from fastapi import Depends, FastAPI, HTTPException
from fastapi.responses import FileResponse, HTMLResponse, RedirectResponse
from sqlalchemy import select

from eagle3_core import jobs
from eagle3_core.artifacts import Kind
from eagle3_core.errors import Eagle3Error
from eagle3_core.jobs.files import PROGRESS, read_json
from eagle3_core.progress import describe
from eagle3_core.storage import load, open_store
from operators import settings
from operators.links import REPORT_KEY, report_url

JOB_NAME = re.compile(r"[a-z_]+(-[0-9]{5})?-[0-9a-f]{12}")
REPORT_DIGEST = re.compile(r"[0-9a-f]{8,64}")
LOG_LINES = 400
_PAGE = """<!doctype html><html lang="en"><meta charset="utf-8"><meta http-equiv="refresh" content="{refresh}">
<title>{title}</title><style>body{{font:14px system-ui,sans-serif;margin:1.5rem;background:#fff;color:#111}}
pre{{background:#f4f4f4;padding:1rem;overflow-x:auto;font-size:12px}}progress{{width:24rem}}
@media(prefers-color-scheme:dark){{body{{background:#111;color:#eee}}pre{{background:#222}}}}</style>
<h1>{title}</h1><p>{state}</p>{progress}<pre>{log}</pre></html>"""


def report_page(digest: str) -> FileResponse:
    """Serve report.html of a committed report below the root, and nothing else."""
    if not REPORT_DIGEST.fullmatch(digest):
        raise HTTPException(404, "no such report")
    try:
        artifact = load(open_store(settings.root()), f"report/{digest}")
        artifact.ref.expect(Kind.EVAL_REPORT)
        return FileResponse(artifact.verified_path("report.html"), media_type="text/html")
    except Eagle3Error as error:
        raise HTTPException(404, str(error)) from None


def run_page(dag_id: str, run_id: str) -> RedirectResponse:
    """Find the report that a DAG run made, or, of a nightly run, the one of the run it triggered."""
    named = select(XComModel.value).where(
        XComModel.dag_id == dag_id, XComModel.run_id == run_id, XComModel.key == REPORT_KEY
    )
    with create_session() as session:
        key = session.scalars(named).first()
    if key is None:
        raise HTTPException(404, "this run has made no report yet")
    # The table may hold it as JSON text.
    return RedirectResponse(report_url(str(key).strip('"')))


def job_page(name: str) -> HTMLResponse:
    """Show one job: state, progress, the end of its log; renewed every few seconds while it runs."""
    directory = jobs.jobs_directory(open_store(settings.root()).root) / name
    if not JOB_NAME.fullmatch(name) or not directory.is_dir():
        raise HTTPException(404, "no such job")
    state = jobs.directory_state(directory)
    return HTMLResponse(
        _PAGE.format(
            refresh=3 if state.name == "running" else 3600,
            title=html.escape(name),
            state=html.escape(state.name + (f": {state.error['message']}" if state.error else "")),
            progress=_progress(directory),
            log=html.escape("\n".join(jobs.log_tail(directory, LOG_LINES))),
        )
    )


def _progress(directory: Path) -> str:
    progress = read_json(directory / PROGRESS)
    if progress is None:
        return ""
    done, total = progress.get("done"), progress.get("total")
    bar = f'<progress value="{done}" max="{total}"></progress> ' if done is not None and total else ""
    return f"<p>{bar}{html.escape(describe(progress))}</p>"


def build() -> FastAPI:
    """Return the app; Airflow mounts plugin apps without its login, so this one asks for it itself."""
    app = FastAPI(title="eagle3", dependencies=[Depends(get_user)], docs_url=None, redoc_url=None, openapi_url=None)
    app.get("/report/{digest}", response_model=None)(report_page)
    app.get("/run", response_model=None)(run_page)
    app.get("/job/{name}", response_model=None)(job_page)
    return app
