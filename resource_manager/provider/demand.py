"""What a task asks for, in the words of an operator, and the lease that it gets for it."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

from airflow.sdk.exceptions import AirflowException, AirflowFailException

from resource_manager import reconcile
from resource_manager.client import ServiceClient, ServiceError
from resource_manager.errors import DuplicateTaskError, InvalidRequestError, ResourceManagerError
from resource_manager.models import MILLI_PER_GPU
from resource_manager.provider.hook import Manager
from resource_manager.requests import share_advice
from resource_manager.task_identity import TaskIdentity

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
    """GPUs and CPUs of one server, and where in the queue."""

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
        """The task's lease (state RUNNING) or place in the queue (WAITING); the one it has, if it has one.

        A lease of another shape, of a try before the task was changed, is ended first. Raises
        `AirflowFailException` for what can never be granted, `AirflowException` for what may work later.
        """
        try:
            arguments = self._arguments(identity)
            if isinstance(manager, ServiceClient):  # whose token it is says who owns the lease
                del arguments["owner"]
            try:
                status = manager.submit(identity.lease_id, **arguments)
            except (DuplicateTaskError, ServiceError) as error:
                if isinstance(error, ServiceError) and error.status != 409:
                    raise
                end_lease(manager, identity.lease_id)
                status = manager.submit(identity.lease_id, **arguments)
            if not isinstance(manager, ServiceClient) and status.get("owner", "") != self.owner:
                # Its owner could end it under a job that trusts it.
                raise AirflowException(
                    f"the lease {identity.lease_id!r} belongs to {status.get('owner')!r}, not to "
                    f"{self.owner!r}; it was not made by this task: release it"
                )
            if status.get("quarantined"):  # nobody watched for a while; it is alive again
                status = manager.renew(identity.lease_id, fencing_token=status["fencing_token"])
        except InvalidRequestError as error:
            raise AirflowFailException(error.named(OWN_NAMES)) from None
        except ResourceManagerError as error:
            raise AirflowException(str(error)) from error
        return status

    def shape(self) -> dict[str, Any]:
        """What decides where it fits, as arguments of the manager; raises `InvalidRequestError`."""
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


def end_lease(manager: Manager, lease_id: str, outcome: str = "CANCELLED") -> None:
    """Ends what the task holds or waits for; raises `AirflowException` where its job may still run."""
    entry = manager.status_of(lease_id)
    if entry is None:
        return
    done = reconcile.end(manager, entry, outcome)
    if done.action == "kept":
        raise AirflowException(f"{done.task_id}: {done.detail}; its GPUs stay held until it is gone")


def team_of(operator: Any, team: str | None) -> str:
    """The team that was named, else the task's pool."""
    if team is not None:
        return str(team)
    return "" if operator.pool == DEFAULT_POOL else str(operator.pool)


def launcher_labels(launcher: str, conn_id: str | None) -> dict[str, str]:
    """Labels by which anyone finds the lease's job again."""
    labels = {"launcher": launcher}
    if conn_id:
        labels["launcher_conn_id"] = conn_id
    if launcher == "local":
        labels["host"] = socket.gethostname()
    return labels


def _whole(name: str, value: int | str) -> int:
    """A template gives text, or with native rendering whatever it likes."""
    try:
        number = int(value)
    except (TypeError, ValueError):
        number = None
    if number is None or (number != value and not isinstance(value, str)):
        advice = share_advice(value) if name == "gpus" else ""
        raise InvalidRequestError(f"{name} must be a whole number, got {value!r}{advice}", field=name)
    return number


def as_server(server: int | str | None) -> int | str | None:
    """A template gives text: no server, its id, or its name."""
    if isinstance(server, str):
        server = server.strip()
        return None if server in ("", "None") else server
    return server


def _names(names: str | Sequence[str] | None) -> list[str]:
    if names is None:  # an empty template, rendered natively
        return []
    if isinstance(names, str):
        names = names.split(",")
    return [name.strip() for name in names if name.strip()]
