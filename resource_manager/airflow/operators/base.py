"""Base of the operators that hold a lease: the request as arguments, and the wait for the grant."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import timedelta
from typing import Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException

from resource_manager.airflow.demand import Demand, is_of, team_of
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook, Manager
from resource_manager.airflow.links import ConsoleLink
from resource_manager.airflow.triggers import GrantTrigger, TriggerState, identity_of
from resource_manager.airflow.wait_log import describe_wait, describe_waiting
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.jobs.task_identity import TaskIdentity


class GPUOperator(BaseOperator):
    """Request GPUs and CPUs of one server, and wait for them in the triggerer.

    :param gpus: whole GPUs, all of one server.
    :param cpus: CPUs of the same server.
    :param prefer_server: name or id of the server to try first.
    :param server: name or id of the required server.
    :param gpu_type: accepted type of GPU, or several.
    :param gpu_milli: GPU fraction in thousandths of one GPU, instead of whole GPUs.
    :param priority: higher values start first if the queue order uses priorities; the task's
        `priority_weight` if None.
    :param team: team whose share of the cluster is charged; if None, Airflow's team of the DAG, else the
        task's pool.
    :param max_wait: longest wait for the grant before the task fails; unlimited if None.
    :param expected_runtime: used to estimate when pending requests start, and to let this task fill gaps if
        the queue order backfills; if None, the runtimes of earlier runs of the task are used.
    :param ttl: lifetime of the lease without renewal.
    :param gpu_conn_id: connection of type `gpu_manager`.
    """

    template_fields: Sequence[str] = ("gpus", "cpus", "prefer_server", "server", "gpu_type", "team")
    operator_extra_links = (ConsoleLink(),)

    def __init__(
        self,
        *,
        gpus: int | str,
        cpus: int | str = 1,
        prefer_server: int | str | None = None,
        server: int | str | None = None,
        gpu_type: str | Sequence[str] = (),
        gpu_milli: int = MILLI_PER_GPU,
        priority: int | None = None,
        team: str | None = None,
        max_wait: timedelta | None = None,
        expected_runtime: timedelta | None = None,
        ttl: timedelta,
        gpu_conn_id: str = DEFAULT_CONNECTION,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.gpus = gpus
        self.cpus = cpus
        self.prefer_server = prefer_server
        self.server = server
        self.gpu_type = gpu_type
        self.gpu_milli = gpu_milli
        self.priority = priority
        self.team = team
        self.max_wait = max_wait
        self.expected_runtime = expected_runtime
        self.ttl = ttl
        self.gpu_conn_id = gpu_conn_id

    @property
    def manager(self) -> Manager:
        """Manager behind the connection."""
        return GPUManagerHook(self.gpu_conn_id).get_conn()

    def lease(
        self,
        context: Any,
        manager: Manager,
        *,
        labels: Mapping[str, str],
        quarantine: bool = True,
        server: int | str | None = None,
    ) -> dict[str, Any]:
        """Return this task's allocation; defer while it is pending, which does not return."""
        identity, plain_identity = identity_of(context)
        demand = Demand(
            self.gpus,
            self.cpus,
            self.prefer_server,
            self.gpu_type,
            self.gpu_milli,
            self.priority_weight if self.priority is None else self.priority,
            team_of(self, self.team, context),
            self.owner,
            self.ttl,
            self.expected_runtime,
            quarantine,
            labels,
            self.server if server is None else server,
        )
        status = demand.submit(manager, identity)
        if status["state"] == "WAITING":
            self.log.info("%s", describe_waiting(status))
            max_wait_s = None if self.max_wait is None else self.max_wait.total_seconds()
            self.defer(
                trigger=GrantTrigger(plain_identity, self.gpu_conn_id, max_wait_s),
                method_name="execute_granted",
            )
        return status

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the wait: the repeated request returns the granted lease."""
        self.fail_if_overdue(context, event)
        return self.execute(context)

    def fail_if_overdue(self, context: Any, event: dict[str, Any]) -> None:
        """Log the wait; cancel the request and raise `AirflowException` if it exceeded `max_wait`."""
        identity, _ = identity_of(context)
        self.log.info("%s", describe_wait(event["waited_s"], event["reasons"]))
        if event["state"] == TriggerState.MAX_WAIT_EXCEEDED and self._cancel(identity):
            why = f": {event['reasons'][-1]}" if event["reasons"] else ""
            raise AirflowException(f"no GPUs within max_wait = {self.max_wait}{why}")

    def _cancel(self, identity: TaskIdentity) -> bool:
        """Cancel this task's own pending request; return False if it is gone."""
        manager = self.manager
        entry = manager.status_of(identity.lease_id)
        if entry is None or entry["state"] != "WAITING" or not is_of(entry, identity):
            return False
        return manager.cancel(identity.lease_id, sequence=entry["sequence"])
