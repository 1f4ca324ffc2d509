"""Talk to the local Airflow as its UI does."""

from __future__ import annotations

import contextlib
import time
from typing import Any

import httpx

from eagle3_core.cli.airflow_local import AirflowError, LocalAirflow


class Api:
    """Airflow's REST API, signed in as the user of the UI."""

    def __init__(self, airflow: LocalAirflow) -> None:
        """Sign in; any request may raise as this does.

        Raises:
            AirflowError: the API does not answer or refuses the login.
            AirflowStoppedError: it was stopped on purpose.
        """
        self._airflow, self._login = airflow, airflow.login
        self._client = httpx.Client(base_url=airflow.url, timeout=30)
        self._sign_in()

    def _sign_in(self) -> None:
        user, password = self._login
        token = self._request("POST", "/auth/token", json={"username": user, "password": password})["access_token"]
        self._client.headers["Authorization"] = f"Bearer {token}"

    def get(self, path: str, **params: Any) -> Any:
        """Return what lies at `path` below /api/v2."""
        return self._request("GET", f"/api/v2/{path}", params=params)

    def find(self, path: str) -> Any:
        """Return what lies at `path`, or None if nothing does."""
        with contextlib.suppress(NotFoundError):
            return self.get(path)
        return None

    def post(self, path: str, values: dict[str, Any]) -> Any:
        """Create something."""
        return self._request("POST", f"/api/v2/{path}", json=values)

    def patch(self, path: str, values: dict[str, Any]) -> Any:
        """Change something."""
        return self._request("PATCH", f"/api/v2/{path}", json=values)

    def _request(self, method: str, path: str, **arguments: Any) -> Any:
        """Send, waiting out a busy or restarting server and an expired token."""
        problem = ""
        for _ in range(20):
            try:
                answer = self._client.request(method, path, **arguments)
            except httpx.TransportError as error:
                self._airflow.raise_if_stopped()
                problem = str(error) or type(error).__name__
                time.sleep(1)
                continue
            if answer.status_code < 400:
                return answer.json() if answer.content else None
            problem = f"{answer.status_code} {answer.text[:300]}"
            if answer.status_code == 404:
                raise NotFoundError(f"{method} {path}: {problem}")
            if answer.status_code == 401 and path != "/auth/token":
                self._sign_in()
            elif answer.status_code < 500:
                break
            else:
                time.sleep(1)
        raise AirflowError(f"Airflow: {method} {path}: {problem}")


class NotFoundError(AirflowError):
    """There is nothing at this address."""
