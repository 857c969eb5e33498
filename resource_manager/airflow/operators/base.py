"""Base of the operators that hold a lease: the request as arguments, and the wait for the grant."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, ClassVar, NoReturn, cast

from airflow.sdk import BaseOperator

from resource_manager.airflow.demand import (
    ATTRIBUTES,
    asked_by_attributes,
    check_at_parse,
    check_duration,
    check_partial,
    demand_of,
    is_of,
    submit,
    taken,
    takes_demand,
)
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.links import ConsoleLink, console_url
from resource_manager.airflow.outages import outlasts_outages
from resource_manager.airflow.triggers import GrantTrigger, TriggerState, identity_of
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.wait_log import describe_wait, describe_waiting
from resource_manager.core.changes import Outcome
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.preempting import queue_again
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.results import Allocation, WindowView
from resource_manager.manager.service import LeaseService
from resource_manager.scheduling.preemption.preempting import restarts_of


class HoldsLease:
    """Methods of an operator that requests GPUs and waits for them in the triggerer."""

    quarantined_by_default: ClassVar[bool] = True
    preemptible_by_default: ClassVar[bool] = True
    default_ttl: ClassVar[timedelta]
    wait_limit: timedelta | None
    gpu_conn_id: str
    owner: str
    log: Any
    defer: Callable[..., NoReturn]
    execute: Callable[..., Any]

    def asked(self) -> dict[str, Any]:
        """Return the fields of the demand that the author gave, rendered; None where one was left out."""
        return asked_by_attributes(self)

    @property
    def manager(self) -> LeaseService:
        """Manager behind the connection."""
        task = cast(BaseOperator, self)
        return GPUManagerHook(self.gpu_conn_id, task=task).get_conn()

    @property
    def _ttl(self) -> float | str | timedelta:
        """`ttl`, or the operator's own default where a template left it out."""
        ttl: float | str | timedelta | None = self.asked()["ttl"]
        return self.default_ttl if ttl is None else ttl

    def lease(
        self,
        context: Any,
        manager: LeaseService,
        *,
        labels: Mapping[str, str],
        **instead: Any,
    ) -> Allocation:
        """Return this task's allocation; defer while it is pending, which does not return.

        `instead` are fields of the demand that replace those of the parameters.
        """
        identity, plain_identity = identity_of(context)
        asked = self.asked()
        if asked["quarantine"] is None:
            instead["quarantine"] = self.quarantined_by_default
        if asked["preemptible"] is None:
            instead["preemptible"] = self.preemptible_by_default
        instead["ttl"] = self._ttl
        demand = demand_of(self, asked, context, identity.lease_id, **instead)
        demand = demand.model_copy(update={"labels": {**demand.labels, **identity.labels, **labels}})
        is_weight = asked["priority"] is None
        status = submit(manager, demand, identity, is_weight=is_weight)
        self.log.info("GPU console: %s", console_url(identity.lease_id))
        if status["state"] == "WAITING":
            self.log.info("%s", describe_waiting(status))
            max_wait_s = None if self.wait_limit is None else self.wait_limit.total_seconds()
            # A preempted request keeps its time of arrival: its job ran between that and this wait.
            before_s = status["waited_s"] if restarts_of(status["labels"]) else 0.0
            self.defer(
                trigger=GrantTrigger(plain_identity, self.gpu_conn_id, max_wait_s, before_s),
                method_name="execute_granted",
            )
        return status

    def gives_back(self, manager: LeaseService, allocation: Allocation, gang: GangJob | None = None) -> bool:
        """Queue the request again if its job would run into maintenance; return False if it may begin.

        The jobs of a `gang` may have begun before. Raises `LauncherError` if that is unknown.
        """
        window = _window_ahead(manager, allocation)
        if window is None or (gang is not None and not gang.is_absent()):
            return False
        self.log.warning(
            "the job begins too late to end before the maintenance from %s until %s; waiting again",
            window["from"],
            window["until"],
        )
        queue_again(manager, allocation, gang, Outcome.NOT_STARTED)
        return True

    @outlasts_outages
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
            raise AirflowException(f"no GPUs within max_wait = {self.wait_limit}{why}")

    def _cancel(self, identity: TaskIdentity) -> bool:
        """Cancel this task's own pending request; return False if it is gone."""
        manager = self.manager
        entry = manager.status_of(identity.lease_id)
        if entry is None or entry["state"] != "WAITING" or not is_of(entry, identity):
            return False
        return manager.cancel(identity.lease_id, sequence=entry["sequence"])


class GPUOperator(HoldsLease, BaseOperator):
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

    template_fields: Sequence[str] = tuple(ATTRIBUTES.values())
    operator_extra_links = (ConsoleLink(),)
    gpu_milli: Any
    nodes: Any
    server: Any

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        """Return the mapped form of the operator, as of Airflow's, with its arguments checked."""
        check_partial(arguments)
        return super().partial(**arguments)

    @takes_demand
    def __init__(
        self, *, max_wait: timedelta | None = None, gpu_conn_id: str = DEFAULT_CONNECTION, **kwargs: Any
    ) -> None:
        asked = taken(kwargs)
        super().__init__(**kwargs)
        vars(self).update(asked)
        self.max_wait = self.wait_limit = max_wait
        self.gpu_conn_id = gpu_conn_id
        check_at_parse(self.task_id, self.asked())
        check_duration(self.task_id, "max_wait", max_wait)


def _window_ahead(manager: LeaseService, allocation: Allocation) -> WindowView | None:
    """Return the maintenance window that the job would run into if it began now, or None.

    The grant counted the stated runtime from itself, and Airflow may begin the job a while later. A runtime
    that is not stated keeps a job from beginning in an open window only.
    """
    runtime_s = allocation["expected_runtime_s"] or 0.0
    servers = {member["server_name"] for member in allocation["members"]}
    for window in manager.maintenance():
        is_ahead = window["is_open"] or window["begins_in_s"] < runtime_s
        if is_ahead and servers.intersection(window["servers"]):
            return window
    return None
