"""States of Airflow's task instances over its REST API, for processes outside Airflow."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any
from urllib.parse import quote

import httpx

from resource_manager.errors import InvalidRequestError, ResourceManagerError
from resource_manager.jobs.airflow_instance import VARIABLE, instance_in_variable
from resource_manager.jobs.task_identity import TaskIdentity

ENDED_TASK_STATES = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
ENDED_RUN_STATES = frozenset({"success", "failed"})
TIMEOUT_S = 30.0
RECONCILE_DAG = "gpu_reconcile"
"""Id that `reconcile_dag` has unless another is given."""


class AirflowUnavailableError(ResourceManagerError):
    """Airflow's API does not answer or refuses the login."""


class AirflowTaskStates:
    """`TaskStates` of the Airflow at `url`, with a token, or with user and password."""

    def __init__(
        self, url: str, *, token: str | None = None, user: str | None = None, password: str | None = None
    ) -> None:
        if not url.startswith(("http://", "https://")):
            raise InvalidRequestError("{airflow_url} must begin with http:// or https://, got {!r}", url)
        self._http = httpx.Client(base_url=url.rstrip("/"), timeout=TIMEOUT_S)
        self._login = None if user is None else {"username": user, "password": password or ""}
        if token is not None:
            self._http.headers["Authorization"] = f"Bearer {token}"
        elif self._login is not None:
            self._log_in()

    def _log_in(self) -> None:
        answer = self._request("POST", "/auth/token", json=self._login)
        if answer.is_error:
            raise AirflowUnavailableError(
                f"Airflow at {self._http.base_url} refused the login with status {answer.status_code}"
            )
        self._http.headers["Authorization"] = f"Bearer {self._object(answer, 'access_token')['access_token']}"

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        found = set()
        for identity in identities:
            path = f"{_run(identity.dag_id, identity.run_id)}/taskInstances/{_quote(identity.task_id)}"
            if identity.map_index >= 0:
                path += f"/{identity.map_index}"
            task = self._get(path, "state")
            if task is not None and task["state"] not in ENDED_TASK_STATES:
                found.add(identity)
        return found

    def instance(self) -> str | None:
        """Return this Airflow's instance id; None if it has none or this user may not read it."""
        variable = self._get(f"/api/v2/variables/{VARIABLE}", "value", none_for=(403, 404))
        return None if variable is None else instance_in_variable(str(variable["value"]))

    def health(self) -> dict[str, Any]:
        """Return the states of `scheduler` and `triggerer`, the names of the `plugins`, whether the DAG
        `reconcile` is paused, and the `instance`; None for what is not there or not shown to this user.
        """
        parts = self._get("/api/v2/monitor/health", "scheduler") or {}
        plugins = self._get("/api/v2/plugins?limit=1000", "plugins", none_for=(403,))
        reconcile = self._get(f"/api/v2/dags/{RECONCILE_DAG}", "is_paused", none_for=(403, 404))
        return {
            **{part: (parts.get(part) or {}).get("status") for part in ("scheduler", "triggerer")},
            "plugins": None if plugins is None else [plugin["name"] for plugin in plugins["plugins"]],
            "reconcile": None if reconcile is None else reconcile["is_paused"],
            "instance": self.instance(),
        }

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        run = self._get(_run(dag_id, run_id), "state")
        return run is not None and run["state"] not in ENDED_RUN_STATES

    def _get(self, path: str, key: str, none_for: Collection[int] = (404,)) -> dict[str, Any] | None:
        """Return the object there, which has that key, or None for a status in `none_for`.

        Raises `AirflowUnavailableError`.
        """
        answer = self._request("GET", path)
        if answer.status_code == 401 and self._login is not None:  # the token expired
            self._log_in()
            answer = self._request("GET", path)
        # A 404 of a proxy or of a wrong address must not be taken for a task that is gone.
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if answer.status_code in none_for and is_json:
            return None
        if answer.is_error:
            raise AirflowUnavailableError(
                f"Airflow at {self._http.base_url} answered {answer.status_code} to GET {path}"
            )
        return self._object(answer, key)

    def _object(self, answer: httpx.Response, key: str) -> dict[str, Any]:
        try:
            found = answer.json()
        except ValueError:
            found = None
        if not isinstance(found, dict) or key not in found:
            raise AirflowUnavailableError(
                f"{answer.url} is no page of Airflow's API: its answer has no {key}; correct --airflow-url"
            )
        return found

    def _request(self, method: str, path: str, **content: Any) -> httpx.Response:
        try:
            return self._http.request(method, path, **content)
        except httpx.HTTPError as error:
            raise AirflowUnavailableError(
                f"no answer from Airflow at {self._http.base_url}: {error}"
            ) from error


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{_quote(dag_id)}/dagRuns/{_quote(run_id)}"


def _quote(text: str) -> str:
    return quote(text, safe="")
