"""`with_gpus`: any operator, run under a lease on GPUs."""

from __future__ import annotations

import copyreg
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timedelta
from functools import partial
from types import new_class
from typing import Any, ClassVar, TypeVar, cast

from airflow.sdk import BaseOperator

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.in_worker import TRY_LABEL, RunsInWorker, outcome_of, reason_of, try_of
from resource_manager.airflow.leased_operators.kinds import Kind, KindElsewhere, kind_of
from resource_manager.airflow.leased_operators.lease_keeping import ENDS_WITHIN, LeaseKeepingTrigger
from resource_manager.airflow.links import ConsoleLink
from resource_manager.airflow.operators.base import HoldsLease
from resource_manager.airflow.outages import outlasting_outages
from resource_manager.airflow.task_demand import FIELDS, check_at_parse, check_duration, is_literal
from resource_manager.airflow.task_state import identity_of
from resource_manager.airflow.task_trigger.base import handover_s
from resource_manager.airflow.version_compat import AirflowException, TaskDeferred
from resource_manager.core.changes import Outcome
from resource_manager.core.identifiers import as_reason
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.cluster_file.durations import seconds_of
from resource_manager.manager.demand import given_value
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import Allocation

Op = TypeVar("Op", bound=BaseOperator)

_made: dict[tuple[type, str], Any] = {}


class LeasedOperator(RunsInWorker):
    """Steps that `with_gpus` adds: wait for GPUs, fill the operator in, run its `execute`, end the lease."""

    default_ttl = timedelta(minutes=2)
    name_in_errors = "with_gpus runs one operator"
    gpu_kind: ClassVar[Kind]
    own_execute: ClassVar[Callable[..., Any]]
    gpu_defaults: ClassVar[Mapping[str, Any]]
    """What the class asks for, but for templates, as values of JSON."""
    gpu_demand: Mapping[str, Any]
    made_by: ClassVar[partial[Any]]
    task_id: str

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        """Return the mapped form of the operator, as of Airflow's, which tells what its class asks for."""
        asked = {name: value for name, value in cls.made_by.keywords.items() if name in FIELDS}
        _with_own(str(arguments.get("task_id", "partial")), asked, arguments.get("gpu_demand"))
        if "start_from_trigger" in arguments:
            arguments["start_from_trigger"] = False
        known = {**cls.gpu_defaults, "gpu_conn_id": cls.gpu_conn_id}
        return cast(Any, super()).partial(gpu_defaults=known, **arguments)

    def given_fields(self) -> dict[str, Any]:
        return {name: given_value(self.gpu_demand.get(name)) for name in FIELDS}

    def work(self, context: Any) -> Any:
        return self.own_execute(context)

    def end_earlier_try(self, manager: LeaseService, identity: TaskIdentity, status: Allocation) -> None:
        """End the lease of an earlier try if its job is gone; else defer until it is, or the lease is."""
        if not status["job_places"] or not self.gpu_kind.end(self, manager, status, Outcome.FAILED):
            super().end_earlier_try(manager, identity, status)

    def run_under_lease(
        self, context: Any, manager: LeaseService, allocation: Allocation, work: Callable[[], Any]
    ) -> Any:
        """Return what the work returns; if it defers, the lease goes on in the trigger."""
        context["gpu_lease"] = allocation
        allocation = self.gpu_kind.prepare(self, manager, allocation)
        leaving: TaskDeferred | None = None
        try:
            try:
                with self.with_devices(
                    manager,
                    allocation,
                    ends_in_time=not isinstance(self.gpu_kind, KindElsewhere),
                    stop=partial(self.gpu_kind.stop, self, allocation),
                    tell=partial(self.gpu_kind.tell, self),
                ):
                    result = work()
            except TaskDeferred as deferred:
                leaving = self._deferred(context, manager, allocation, deferred)
        except BaseException as error:
            self.gpu_kind.end(self, manager, allocation, outcome_of(error), reason_of(error))
            raise
        if leaving is not None:
            raise leaving
        reason = "exit code 0" if self.gpu_kind.has_exit_code else ""
        self.gpu_kind.end(self, manager, allocation, Outcome.SUCCESS, reason)
        return result

    def _deferred(
        self, context: Any, manager: LeaseService, allocation: Allocation, deferred: TaskDeferred
    ) -> TaskDeferred:
        """Return the deferral in which the operator's trigger runs inside ours, which renews the lease."""
        identity = identity_of(context)
        try:
            manager.renew(identity.lease_id, fencing_token=allocation["fencing_token"], for_s=handover_s())
        except ResourceManagerError as error:  # the trigger finds out
            self.log.warning("the lease could not be renewed for the time until a triggerer does: %s", error)
        classpath, arguments = deferred.trigger.serialize()
        timeout_s = None if deferred.timeout is None else seconds_of(deferred.timeout)  # of sensors a number
        trigger = LeaseKeepingTrigger(
            identity,
            allocation["fencing_token"],
            seconds_of(self._ttl),
            classpath,
            dict(arguments),
            until=None if timeout_s is None else time.time() + timeout_s,
            gpu_conn_id=self.gpu_conn_id,
        )
        step = {"method": deferred.method_name, "arguments": deferred.kwargs or {}}
        return TaskDeferred(
            trigger=trigger,
            method_name="execute_resumed",
            kwargs=step,
            timeout=None if timeout_s is None else timedelta(seconds=timeout_s) + ENDS_WITHIN,
        )

    def execute_resumed(
        self, context: Any, event: dict[str, Any], method: str, arguments: dict[str, Any]
    ) -> Any:
        """Go on with the operator's own method after its trigger fired, under the same lease."""
        step: dict[str, Any] = {"method": method, "arguments": arguments}
        with outlasting_outages(self, "execute_resumed", event, **step):
            manager = self.manager
            # Its label may name an earlier try, which was cleared while it waited.
            allocation = self._lease_of_task(context, manager)
        if allocation is None or allocation["fencing_token"] != event["fencing_token"]:
            why = event.get("error", {}).get("error", "")
            raise AirflowException(
                "the lease ended while the task was deferred: it expired before a worker went on with "
                f"it (ttl = {self._ttl}), or another client ended it" + (f"; {why}" if why else "")
            )
        if "error" in event:
            self.gpu_kind.end(self, manager, allocation, Outcome.FAILED, _reason_of(event["error"]))
            return super().resume_execution("__fail__", event["error"], context)
        arguments = {**arguments, "event": event["event"]}
        resume = super().resume_execution
        return self.run_under_lease(context, manager, allocation, lambda: resume(method, arguments, context))

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Any) -> Any:
        """End the lease of a deferral that timed out or whose trigger failed; else resume."""
        if next_method == "__fail__":
            try:
                manager = self.manager
                allocation = self._lease_of_task(context, manager)
                if allocation is not None and allocation["labels"].get(TRY_LABEL) == try_of(context):
                    reason = _reason_of(next_kwargs or {})
                    self.gpu_kind.end(self, manager, allocation, Outcome.FAILED, reason)
            except Exception as error:  # the task has failed for another reason
                self.log.warning("the lease was not released and will expire: %s", error)
        return super().resume_execution(next_method, next_kwargs, context)

    def _lease_of_task(self, context: Any, manager: LeaseService) -> Allocation | None:
        entry = manager.status_of(identity_of(context).lease_id)
        return None if entry is None or entry["state"] == "WAITING" else entry


def _reason_of(error: Mapping[str, Any]) -> str:
    """Return why a deferral failed: the class of its trigger's error, else Airflow's word for it."""
    lines = error.get("traceback") or ()
    return as_reason(str(lines[-1]).partition(":")[0] if lines else error.get("error", ""))


OWN_NAMES = {"gpu_conn_id", "made_by", "wait_limit", *LeasedOperator.__annotations__} - {"task_id"} | {
    name
    for steps in (LeasedOperator, RunsInWorker, HoldsLease)
    for name in vars(steps)
    if not hasattr(BaseOperator, name)
}
"""Names that an operator must not use for something else."""


def with_gpus(
    operator: type[Op],
    *,
    max_wait: timedelta | None = None,
    gpu_conn_id: str = DEFAULT_CONNECTION,
    **demand: Any,
) -> type[Op]:
    """Return a subclass of the operator that waits for GPUs in the triggerer and runs under their lease.

    Its tasks take the operator's own arguments, and `gpu_demand` with fields that replace those given here.
    The lease is also in `context["gpu_lease"]`; `quarantine` has no effect on it. Raises `TypeError` or
    `ValueError` for wrong arguments.

    :param operator: class of an operator or sensor.
    :param max_wait: longest wait for the grant before the task fails; unlimited if None.
    :param gpu_conn_id: connection of type `gpu_manager`.
    :param demand: fields of a `Demand`, such as `gpus=2`; all of them are templates.
    """
    if not (isinstance(operator, type) and issubclass(operator, BaseOperator)):
        raise TypeError(f"with_gpus: operator must be the class of an operator, got {operator!r}")
    if issubclass(operator, HoldsLease):
        raise TypeError(f"with_gpus: {operator.__name__} asks for GPUs itself")
    for base in operator.__mro__:
        _check_names(operator, vars(base) if base not in BaseOperator.__mro__ else ())
    if unknown := sorted(demand.keys() - set(FIELDS)):
        from difflib import get_close_matches  # no call that goes well needs it

        near = get_close_matches(unknown[0], FIELDS, 1)
        meant = f": did you mean {near[0]}?" if near else ""
        raise TypeError(f"with_gpus: {', '.join(unknown)}: no field of a demand{meant}")
    if not demand.keys() & {"gpus", "gpu_milli"}:
        raise TypeError("with_gpus: gpus is missing")
    check_duration("with_gpus", "max_wait", max_wait)
    check_at_parse("with_gpus", demand)
    if isinstance(demand.get("nodes"), int):
        LeasedOperator.require_one_server(demand["nodes"])
    given = {**demand, "max_wait": max_wait, "gpu_conn_id": gpu_conn_id}
    key = (operator, repr(sorted(given.items())))
    made = _made.get(key)
    if made is None or made.made_by.keywords != given:  # outputs of tasks of several DAGs may read alike
        made = _made[key] = _subclass(operator, demand, max_wait, gpu_conn_id)
    return made


def _check_names(operator: type, names: Iterable[str]) -> None:
    """Raise `TypeError` if the operator itself has one of the names that `with_gpus` gives it."""
    if clash := OWN_NAMES.intersection(names):
        raise TypeError(f"with_gpus: {operator.__name__} has its own {', '.join(sorted(clash))}")


def _with_own(operator: str, demand: Mapping[str, Any], own: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the demand of a class with the fields that a task replaces, checked."""
    if not isinstance(own or {}, Mapping):
        raise TypeError(f"{operator}: gpu_demand must be a dictionary, got {own!r:.100}")
    given = {**demand, **(own or {})}
    check_at_parse(operator, given)
    return given


def _as_json(value: Any) -> Any:
    """Return a time as a value of JSON: Airflow 3.0 makes one text of a dictionary with any other."""
    if isinstance(value, timedelta):
        return value.total_seconds()
    return value.isoformat() if isinstance(value, datetime) else value


def _subclass(
    operator: type[Op], demand: dict[str, Any], max_wait: timedelta | None, gpu_conn_id: str
) -> type[Op]:
    def __init__(
        self: Any, *, gpu_demand: Mapping[str, Any] | None = None, gpu_defaults: Any = None, **kwargs: Any
    ) -> None:
        try:
            operator.__init__(self, **kwargs)
        except TypeError as error:
            if name := next((name for name in kwargs if name in FIELDS and f"'{name}'" in str(error)), ""):
                raise TypeError(
                    f"{kwargs.get('task_id')}: {name} is an argument of with_gpus: with_gpus("
                    f"{operator.__name__}, {name}=…)(…), or gpu_demand={{'{name}': …}} for this task alone"
                ) from error
            raise
        _check_names(operator, vars(self))
        self.start_from_trigger = False  # the lease comes first
        given = _with_own(self.task_id, demand, gpu_demand)
        self.gpu_demand = {name: _as_json(value) for name, value in given.items()}

    kind = kind_of(operator)
    members = {
        "__init__": __init__,
        "__module__": __name__,
        "__doc__": operator.__doc__,
        "start_from_trigger": False,  # of mapped tasks, which have no instance where Airflow looks
        "template_fields": (*operator.template_fields, "gpu_demand", "gpu_conn_id"),
        "template_fields_renderers": {**operator.template_fields_renderers, "gpu_demand": "json"},
        "operator_extra_links": (*operator.operator_extra_links, ConsoleLink()),
        "custom_operator_name": f"{getattr(operator, 'custom_operator_name', operator.__name__)} with GPUs",
        "gpu_defaults": {name: _as_json(value) for name, value in demand.items() if is_literal(value)},
        "gpu_kind": kind,
        "on_worker": kind.on_worker,
        "own_execute": operator.execute,
        "wait_limit": max_wait,
        "gpu_conn_id": gpu_conn_id,
        "made_by": partial(with_gpus, operator, max_wait=max_wait, gpu_conn_id=gpu_conn_id, **demand),
    }
    if isinstance(kind, KindElsewhere):
        members["lease_labels"] = {"launcher": kind.launcher}
    bases = (LeasedOperator, operator)
    return new_class(f"{operator.__name__}WithGPUs", bases, exec_body=lambda names: names.update(members))


def _pickled(operator: type) -> str | tuple[Any, ...]:
    """Return what a class of operators is pickled as: its name, or the call of `with_gpus` that makes it."""
    return (made_by, ()) if (made_by := vars(operator).get("made_by")) else operator.__qualname__


copyreg.pickle(type(BaseOperator), _pickled)
