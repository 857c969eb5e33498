"""Airflow's task instances over its REST API: their states, and the end of one."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import timedelta
from functools import partial
from typing import Any
from urllib.parse import quote

import httpx

from resource_manager.errors import InvalidRequestError, ResourceManagerError
from resource_manager.jobs.airflow_instance import VARIABLE, instance_in_variable
from resource_manager.jobs.http_client import HttpClient
from resource_manager.jobs.task_identity import TaskIdentity, runs_and_tasks
from resource_manager.manager.answer_words import duration

ENDED_TASK_STATES = frozenset({"success", "failed", "skipped", "upstream_failed", "removed"})
ENDED_RUN_STATES = frozenset({"success", "failed"})
TIMEOUT_S = 30.0
MAX_KNOWN = 1000
TASK_LIST = "/api/v2/dags/~/dagRuns/~/taskInstances/list"
PAGE = 100
"""Number of task instances that Airflow lists at once."""

_quote = partial(quote, safe="")

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
        if user is not None and password is None:
            raise InvalidRequestError("{airflow_password} is missing: {airflow_user} is {!r}", user)
        self._http = HttpClient(base_url=url.rstrip("/"), timeout=TIMEOUT_S)
        self._login = None if user is None else {"username": user, "password": password}
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
        identities = set(identities)
        listed: dict[tuple[str, str, str, int], str | None] = {}
        for dag_id, run_ids, task_ids in runs_and_tasks(identities):
            if len(run_ids) * len(task_ids) > 1:
                listed |= self._listed(dag_id, run_ids, task_ids)
        found = set()
        for each in identities:
            key = each.dag_id, each.run_id, each.task_id, each.map_index
            # One that is not listed may be gone, be on a later page, or not be shown to this user.
            task = {"state": listed[key]} if key in listed else self._get(_task(each), "state")
            if task is not None and task["state"] not in ENDED_TASK_STATES:
                found.add(each)
        return found

    def _listed(
        self, dag_id: str, run_ids: Sequence[str], task_ids: Sequence[str]
    ) -> dict[tuple[str, str, str, int], str | None]:
        """Return states by DAG, run, task and map index, as many as if no task were mapped."""
        body = {"dag_ids": [dag_id], "dag_run_ids": run_ids, "task_ids": task_ids, "page_limit": PAGE}
        found = {}
        for offset in range(0, len(run_ids) * len(task_ids), PAGE):
            page = self._get(
                TASK_LIST, "task_instances", none_for=(403, 404), body={**body, "page_offset": offset}
            )
            for task in (page or {}).get("task_instances", ()):
                key = task["dag_id"], task["dag_run_id"], task["task_id"], task["map_index"]
                found[key] = task["state"]
        return found

    def has(self, identity: TaskIdentity) -> bool:
        return self._get(_task(identity), "state") is not None

    def next_try(self, identity: TaskIdentity) -> str:
        """Return in words what Airflow does once the task's try has failed."""
        task = self._get(_task(identity), "try_number")
        delay = (self._get(_task_of_dag(identity), "retry_delay") or {}).get("retry_delay") or {}
        if task is None or task["try_number"] > task["max_tries"]:
            return "Airflow does not try it again"
        delay_s = timedelta(delay.get("days", 0), delay.get("seconds", 0)).total_seconds()
        return f"Airflow tries it again in {duration(delay_s)}" if delay_s else "Airflow tries it again"

    def owner_of(self, identity: TaskIdentity) -> str:
        """Return who triggered the task's run, else its owner, as its lease has it; empty if it is gone."""
        run = self._get(_run(identity.dag_id, identity.run_id), "state") or {}
        if user := run.get("triggering_user_name"):
            return str(user)
        return str((self._get(_task_of_dag(identity), "owner") or {}).get("owner") or "")

    def end_task(self, identity: TaskIdentity, instance: str | None = None) -> None:
        """Set an unfinished task instance to failed, which Airflow does not try again.

        `instance` is the id of this Airflow, asked for if None. Raises `AirflowUnavailableError`, also if it
        is another Airflow than the task's.
        """
        own = instance or self.instance()
        if own != identity.instance:
            raise AirflowUnavailableError(
                f"the task is of the Airflow {identity.instance!r}; {self._http.base_url} is "
                + (f"{own!r}" if own else "none that tells this user its instance id")
            )
        if not self.unfinished([identity]):
            return
        answer = self._request("PATCH", _task(identity), json={"new_state": "failed"})
        if answer.is_error:
            raise AirflowUnavailableError(
                f"Airflow at {self._http.base_url} refused with status {answer.status_code} to end the task: "
                "this user may not edit task instances, or it has no such task"
            )

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

    def _get(
        self, path: str, key: str, none_for: Collection[int] = (404,), body: Mapping[str, Any] | None = None
    ) -> dict[str, Any] | None:
        """Return the object there, which has that key, or None for a status in `none_for`.

        A list is asked for by a `body`. Raises `AirflowUnavailableError`.
        """
        method, content = ("GET", {}) if body is None else ("POST", {"json": body})
        answer = self._request(method, path, **content)
        if answer.status_code == 401 and self._login is not None:  # the token expired
            self._log_in()
            answer = self._request(method, path, **content)
        # A 404 of a proxy or of a wrong address must not be taken for a task that is gone.
        is_json = answer.headers.get("content-type", "").startswith("application/json")
        if answer.status_code in none_for and is_json:
            return None
        if answer.is_error:
            raise AirflowUnavailableError(
                f"Airflow at {self._http.base_url} answered {answer.status_code} to {method} {path}"
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


class NextTries:
    """What Airflow does after the tries that hold leases, asked once a lease or pending request."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, int | None, int | None], str] = {}

    def of(
        self, entry: Mapping[str, Any], identity: TaskIdentity, api: Callable[[], AirflowTaskStates]
    ) -> str:
        """Return it in words, also where Airflow does not say it."""
        key = entry["task_id"], entry.get("fencing_token"), entry.get("sequence")  # it has one of them
        if key not in self._known:
            if len(self._known) >= MAX_KNOWN:
                self._known.clear()
            try:
                self._known[key] = api().next_try(identity)
            except AirflowUnavailableError:
                self._known[key] = "Airflow tries its task again if it has tries left"
        return self._known[key]


def _run(dag_id: str, run_id: str) -> str:
    return f"/api/v2/dags/{_quote(dag_id)}/dagRuns/{_quote(run_id)}"


def _task_of_dag(identity: TaskIdentity) -> str:
    return f"/api/v2/dags/{_quote(identity.dag_id)}/tasks/{_quote(identity.task_id)}"


def _task(identity: TaskIdentity) -> str:
    path = f"{_run(identity.dag_id, identity.run_id)}/taskInstances/{_quote(identity.task_id)}"
    return path if identity.map_index < 0 else f"{path}/{identity.map_index}"
