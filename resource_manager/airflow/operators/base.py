"""Base of the operators that hold a lease: the request as arguments, and the wait for the grant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, cast

from airflow.sdk import BaseOperator

from resource_manager.airflow import task_demand
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.late_start import late_start
from resource_manager.airflow.links import ConsoleLink, console_url
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.resuming import Resumes
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.events import GrantEvent, GrantState
from resource_manager.airflow.task_trigger.waits import GrantTrigger
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.wait_log import describe_wait, describe_waiting
from resource_manager.core.changes import Outcome
from resource_manager.jobs.job_preemption import queue_again
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.demand import Demand
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.recorded_changes import ended_by_others
from resource_manager.manager.results import Allocation, Submission


class HoldsLease(Resumes):
    """Methods of an operator that requests GPUs and waits for them in the triggerer."""

    preemptible_by_default: ClassVar[bool] = True
    default_ttl: ClassVar[timedelta]
    wait_limit: timedelta | None
    gpu_conn_id: str
    owner: str
    log: Any
    defer: Callable[..., NoReturn]
    execute_request: Callable[..., Any]
    given_fields: Callable[[], dict[str, Any]]

    @property
    def manager(self) -> LeaseService:
        """Manager behind the connection."""
        task = cast(BaseOperator, self)
        return GPUManagerHook(self.gpu_conn_id, task=task).get_conn()

    @property
    def _ttl(self) -> float | str | timedelta:
        """`ttl`, or the operator's own default where a template left it out."""
        ttl: float | str | timedelta | None = self.given_fields()["ttl"]
        return self.default_ttl if ttl is None else ttl

    def request(
        self, context: Any, manager: LeaseService, *, labels: Mapping[str, str], **instead: Any
    ) -> tuple[Demand, Submission]:
        """Submit this task's demand; return it, and the task's lease or pending request.

        `instead` are fields of the demand that replace those of the parameters.
        """
        identity, asked = identity_of(context), self.given_fields()
        if asked["quarantine"] is None:
            instead.setdefault("quarantine", True)
        if asked["preemptible"] is None:
            instead["preemptible"] = self.preemptible_by_default
        instead["ttl"] = self._ttl
        demand = task_demand.demand_of(self, asked, context, identity.lease_id, **instead)
        demand = demand.model_copy(update={"labels": {**demand.labels, **identity.labels, **labels}})
        status = task_demand.submit(manager, demand, identity, is_weight=self.has_weight)
        self.log.info("GPU console: %s", console_url(identity.lease_id))
        if status["state"] == "WAITING":
            self.log.info("%s", describe_waiting(status))
        return demand, status

    @property
    def has_weight(self) -> bool:
        """Return whether the request has Airflow's own priority."""
        return self.given_fields()["priority"] is None

    @property
    def max_wait_s(self) -> float | None:
        return None if self.wait_limit is None else self.wait_limit.total_seconds()

    def lease(
        self, context: Any, manager: LeaseService, *, labels: Mapping[str, str], **instead: Any
    ) -> Allocation:
        """Return this task's allocation; defer while it is pending, which does not return."""
        _, status = self.request(context, manager, labels=labels, **instead)
        if status["state"] == "WAITING":
            self.defer(
                trigger=GrantTrigger(identity_of(context), self.max_wait_s, gpu_conn_id=self.gpu_conn_id),
                method_name="execute_granted",
            )
        return status

    def gives_back(self, manager: LeaseService, allocation: Allocation) -> bool:
        """Queue the request again if it would run into maintenance; return False if it may begin."""
        why = late_start(manager.maintenance(), allocation)
        if not why:
            return False
        self.log.warning("%s", why)
        queue_again(manager, allocation, None, Outcome.NOT_STARTED)
        return True

    def execute(self, context: Any) -> Any:
        """Take the first step, which may return only after a wait."""
        return self.execute_request(context, {})

    def execute_granted(self, context: Any, event: dict[str, Any]) -> Any:
        """Continue after the wait: the repeated request returns the granted lease."""
        with outlasting_outages(self, "execute_granted", event):
            self.fail_if_overdue(context, event)
            return self.execute(context)

    def fail_if_overdue(self, context: Any, event: dict[str, Any]) -> None:
        """Log the wait; raise `AirflowException` if it exceeded `max_wait`, or somebody ended the request."""
        identity = identity_of(context)
        wait = GrantEvent.model_validate(event)
        self.log.info("%s", describe_wait(wait.waited_s, wait.reasons))
        if wait.state is GrantState.MAX_WAIT_EXCEEDED and self._cancel(identity):
            raise AirflowException(self.too_long(wait.reasons))
        manager = self.manager
        is_gone = manager.status_of(identity.lease_id) is None
        if is_gone and (who := ended_by_others(manager, identity.lease_id)):
            raise AirflowException(who)

    def too_long(self, reasons: Sequence[str]) -> str:
        """Return why a wait beyond `max_wait` fails the task."""
        why = f": {reasons[-1]}" if reasons else ""
        return f"no GPUs within max_wait = {self.wait_limit}{why}"

    def _cancel(self, identity: TaskIdentity) -> bool:
        """Cancel this task's own pending request; return False if it is gone."""
        manager = self.manager
        entry = manager.status_of(identity.lease_id)
        if entry is None or entry["state"] != "WAITING" or not task_demand.is_of(entry, identity):
            return False
        return manager.cancel(identity.lease_id, sequence=entry["sequence"])


class GPUOperator(task_demand.TakesDemand, HoldsLease, BaseOperator):
    """Request GPUs and CPUs of one server, or of `nodes` servers, and wait for them in the triggerer.

    The fields of `Demand` are parameters, except `lease_id`; all of them are templates. As text, lists are
    separated by commas and pairs are `NAME=VALUE`; durations are seconds, texts such as `2h`
    or `timedelta`. What differs here:

    :param priority: the task's `priority_weight` if None, cut to the highest that the cluster allows.
    :param team: if None, Airflow's team of the DAG, else the task's pool.
    :param expected_runtime: if None, the runtimes of earlier runs of the task are used.
    :param quarantine: True if None.
    :param max_wait: longest wait for the grant before the task fails; unlimited if None.
    :param gpu_conn_id: connection of type `gpu_manager`.
    """

    template_fields: Sequence[str] = (*task_demand.ATTRIBUTES.values(), "gpu_conn_id")
    """What a scheduler knows of a task; it announces no demand of another connection."""
    operator_extra_links = (ConsoleLink(),)
    gpu_milli: Any
    nodes: Any
    server: Any

    @task_demand.takes_demand
    def __init__(
        self, *, max_wait: timedelta | None = None, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any
    ) -> None:
        super().__init__(**kwargs)
        self.max_wait = self.wait_limit = max_wait
        self.gpu_conn_id = gpu_conn_id
        task_demand.check_at_parse(self.task_id, self.given_fields())
        task_demand.check_duration(self.task_id, "max_wait", max_wait)
