"""The plugin's pages: behind the login, and no way out of the root."""

import asyncio
import json

import httpx
import pytest
from airflow.plugins_manager import AirflowPlugin

from eagle3_core import jobs
from eagle3_core.artifacts import Kind
from eagle3_core.storage import commit, open_store
from operators import pages
from operators.plugin import Eagle3Plugin

JOB = "prepare-0123456789ab"


@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("EAGLE3_ROOT", str(tmp_path / "root"))
    return open_store(str(tmp_path / "root"))


class Client:
    """A browser in front of the app."""

    def __init__(self, app):
        self._app = app

    def get(self, path):
        async def ask():
            transport = httpx.ASGITransport(self._app)
            async with httpx.AsyncClient(transport=transport, base_url="http://airflow") as client:
                return await client.get(path)

        return asyncio.run(ask())


@pytest.fixture
def client():
    app = pages.build()
    app.dependency_overrides[pages.get_user] = lambda: "somebody"
    return Client(app)


def report(store, tmp_path, kind=Kind.EVAL_REPORT):
    staged = tmp_path / "staged"
    staged.mkdir()
    (staged / "report.html").write_text("<html>figures</html>")
    return commit(store, "report/0123456789abcdef", staged, kind)


def test_a_committed_report_is_shown(store, client, tmp_path):
    report(store, tmp_path)
    answer = client.get("/report/0123456789abcdef")
    assert answer.status_code == 200
    assert "figures" in answer.text


def test_nobody_sees_anything_without_the_login(store, tmp_path):
    report(store, tmp_path)
    client = Client(pages.build())
    for path in ("/report/0123456789abcdef", f"/job/{JOB}", "/run?dag_id=a&run_id=b"):
        assert client.get(path).status_code == 401


@pytest.mark.parametrize("digest", ["..", "%2e%2e%2fsecret", "..%2F..%2Fetc%2Fpasswd", "0123456789abcdeg", "0" * 16])
def test_nothing_but_committed_reports_is_served(store, client, digest):
    assert client.get(f"/report/{digest}").status_code == 404


def test_an_artifact_of_another_kind_is_not_served(store, client, tmp_path):
    report(store, tmp_path, Kind.CORPUS)
    assert client.get("/report/0123456789abcdef").status_code == 404


def test_a_report_that_was_tampered_with_is_not_served(store, client, tmp_path):
    ref = report(store, tmp_path)
    store.local_path(f"{ref.key}/report.html", "").write_text("<html>FIGURES</html>")
    assert client.get("/report/0123456789abcdef").status_code == 404


def test_a_jobs_page_shows_state_progress_and_log_as_text(store, client):
    directory = jobs.jobs_directory(store.root) / JOB
    directory.mkdir(parents=True)
    (directory / "log").write_text("<script>alert(1)</script>\n")
    progress = {"stage": "prepare", "done": 3, "total": 4, "unit": "prompts", "rate": None, "eta_s": None, "detail": {}}
    (directory / "progress.json").write_text(json.dumps(progress))
    page = client.get(f"/job/{JOB}").text
    assert "prepare: 3/4 prompts" in page
    assert "&lt;script&gt;" in page
    assert "<script>" not in page


@pytest.mark.parametrize("name", ["prepare-nothing", "..", "prepare-000000000000"])
def test_no_other_directory_is_shown_as_a_job(store, client, name):
    assert client.get(f"/job/{name}").status_code == 404


def test_the_plugin_is_one_airflow_can_load():
    assert issubclass(Eagle3Plugin, AirflowPlugin)
    assert Eagle3Plugin.fastapi_apps[0]["url_prefix"] == "/eagle3"
