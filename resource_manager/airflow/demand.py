"""Request of a task, by an operator's parameters, and the lease granted for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager.airflow.hook import Manager
from resource_manager.core.changes import Outcome
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.errors import DuplicateTaskError, InvalidRequestError, ResourceManagerError
from resource_manager.jobs import reconcile
from resource_manager.jobs.reconcile import ActionKind
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.demand import fraction_advice
from resource_manager.rest.client import ServiceClient, ServiceError

DEFAULT_POOL = "default_pool"
OWN_NAMES = {
    "required_gpus": "gpus",
    "required_cpus": "cpus",
    "prefer_server_id": "prefer_server",
    "gpu_types": "gpu_type",
    "ttl_s": "ttl",
    "expected_runtime_s": "expected_runtime",
}
"""The manager's name of a parameter -> an operator's."""


@dataclass(frozen=True, slots=True)
class Demand:
    """GPUs and CPUs of one server, the request's rank in the queue, and the properties of its lease."""

    gpus: int | str
    cpus: int | str = 1
    prefer_server: int | str | None = None
    gpu_type: str | Sequence[str] = ()
    gpu_milli: int = MILLI_PER_GPU
    priority: int = 0
    team: str = ""
    owner: str = ""
    ttl: timedelta = timedelta(minutes=2)
    expected_runtime: timedelta | None = None
    quarantine: bool = True
    labels: Mapping[str, str] = field(default_factory=dict)
    server: int | str | None = None

    def submit(self, manager: Manager, identity: TaskIdentity) -> dict[str, Any]:
        """Return the task's lease (state RUNNING) or its pending request (WAITING), an existing one if any.

        A lease of another shape, left by a try before the task was changed, is ended first. Raises
        `AirflowFailException` for a request that can never be granted, `AirflowException` for an error that
        may pass.
        """
        try:
            arguments = self._arguments(identity)
            if isinstance(manager, ServiceClient):  # the service takes the owner from the token
                del arguments["owner"]
            try:
                status = manager.submit(identity.lease_id, **arguments)
            except (DuplicateTaskError, ServiceError) as error:
                if isinstance(error, ServiceError) and error.status != 409:
                    raise
                end_lease(manager, identity, self.owner)
                status = manager.submit(identity.lease_id, **arguments)
            # Another owner could end it while this task's job runs under it.
            _require_owner(manager, status, self.owner)
            if status.get("quarantined"):  # it was not renewed for a while, but its task continues
                status = manager.renew(identity.lease_id, fencing_token=status["fencing_token"])
        except InvalidRequestError as error:
            raise AirflowFailException(error.named(OWN_NAMES)) from None
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        return status

    def shape(self) -> dict[str, Any]:
        """Return the manager's arguments that decide the placement; raises `InvalidRequestError`."""
        return {
            "gpus": _whole("gpus", self.gpus),
            "cpus": _whole("cpus", self.cpus),
            "prefer_server": as_server(self.prefer_server),
            "server": as_server(self.server),
            "gpu_milli": self.gpu_milli,
            "gpu_types": _names(self.gpu_type),
        }

    def _arguments(self, identity: TaskIdentity) -> dict[str, Any]:
        return {
            **self.shape(),
            "priority": self.priority,
            "team": self.team,
            "owner": self.owner,
            "ttl_s": self.ttl.total_seconds(),
            "expected_runtime_s": self.expected_runtime.total_seconds() if self.expected_runtime else None,
            "quarantine": self.quarantine,
            "labels": {**identity.labels, **self.labels},
        }


def end_lease(
    manager: Manager, identity: TaskIdentity, owner: str, outcome: Outcome | None = Outcome.CANCELLED
) -> None:
    """End the task's lease or pending request, with outcome None if it is unknown.

    Raises `AirflowException` if it is not the task's own, or if its job may still run.
    """
    entry = manager.status_of(identity.lease_id)
    if entry is None:
        return
    _require_owner(manager, entry, owner)
    if not is_of(entry, identity):
        raise AirflowException(
            f"lease {identity.lease_id!r} names another task in its labels; it was not requested by this "
            "task: release it"
        )
    end_entry(manager, entry, outcome)


def _require_owner(manager: Manager, entry: Mapping[str, Any], owner: str) -> None:
    """Raise `AirflowException` if the lease is of another owner; the service itself compares its callers."""
    if not isinstance(manager, ServiceClient) and entry.get("owner", "") != owner:
        raise AirflowException(
            f"lease {entry['task_id']!r} belongs to owner {entry.get('owner')!r}, not to {owner!r}; "
            "it was not requested by this task: release it"
        )


def is_of(entry: Mapping[str, Any], identity: TaskIdentity) -> bool:
    """Return whether the lease or pending request says that it is of this task instance."""
    return all(entry["labels"].get(name) == value for name, value in identity.labels.items())


def end_entry(manager: Manager, entry: Mapping[str, Any], outcome: Outcome | None) -> None:
    """End a lease or pending request; raises `AirflowException` if it is another's or its job may run."""
    try:
        done = reconcile.end(manager, entry, outcome)
    except ResourceManagerError as error:
        raise AirflowException(str(error)) from error
    if done.action is ActionKind.KEPT:
        raise AirflowException(f"{done.task_id}: {done.detail}; its GPUs stay allocated until it is gone")


def team_of(operator: Any, team: str | None, context: Mapping[str, Any]) -> str:
    """Return the given team, else Airflow's, else the task's pool; empty for Airflow's default pool."""
    if team is not None:
        return str(team)
    if of_airflow := getattr(context.get("dag_run"), "team_name", None):
        return str(of_airflow)
    return "" if operator.pool == DEFAULT_POOL else str(operator.pool)


def launcher_labels(launcher: str, conn_id: str | None) -> dict[str, str]:
    """Return the labels by which any process finds the lease's job."""
    labels = {"launcher": launcher}
    if conn_id:
        labels["launcher_conn_id"] = conn_id
    if launcher == "local":
        labels["host"] = socket.gethostname()
    return labels


def _whole(name: str, value: int | str) -> int:
    """Return the value as an integer; a template gives text, or any type with native rendering.

    Raises `InvalidRequestError`.
    """
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or (number != value and not isinstance(value, str)):
        advice = fraction_advice(value) if name == "gpus" else ""
        raise InvalidRequestError(f"{name} must be a whole number, got {value!r}{advice}", field=name)
    return number


def as_server(server: int | str | None) -> int | str | None:
    """Return a server's id or name, or None; a template gives text, which may be empty or "None"."""
    if isinstance(server, str):
        server = server.strip()
        return None if server in ("", "None") else server
    return server


def _names(names: str | Sequence[str] | None) -> list[str]:
    if names is None:  # native rendering of an empty template
        return []
    if isinstance(names, str):
        names = names.split(",")
    return [name.strip() for name in names if name.strip()]
