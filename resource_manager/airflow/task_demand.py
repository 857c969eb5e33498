"""Request of a task, by an operator's parameters, and the lease granted for it."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from datetime import datetime, timedelta
from typing import Any, TypeVar

from airflow.sdk import Param

from resource_manager import errors
from resource_manager.airflow.version_compat import AirflowException, AirflowFailException
from resource_manager.core.changes import Outcome
from resource_manager.jobs import reconcile
from resource_manager.jobs.reconcile import Action, ActionKind
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.demand import KINDS, Demand, from_texts, given_value
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.requests import check_limits
from resource_manager.manager.results import Submission
from resource_manager.rest.client_errors import ServiceError

logger = logging.getLogger(__name__)

DEFAULT_POOL = "default_pool"
FIELDS = tuple(name for name in Demand.model_fields if name not in ("lease_id", "owner"))
"""Fields of a `Demand` that are parameters of an operator; the rest are its identity and owner."""

ATTRIBUTES = {name: name for name in FIELDS} | {"resources": "further_resources"}
"""Parameter -> attribute of an operator, all of them templated; `resources` of an operator are Airflow's."""

RUN_TIMES = {"DagRunLogicalDateDeadline": "logical_date", "DagRunQueuedAtDeadline": "start_date"}
"""Reference of a deadline of Airflow -> attribute of the run: a worker does not know when it was queued."""

Init = TypeVar("Init", bound=Callable[..., None])


def takes_demand(init: Init) -> Init:
    """Add the fields of a `Demand` to the signature of an operator's `__init__`, which Airflow reads."""
    signature = inspect.signature(init)
    own = list(signature.parameters.values())
    asked = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if Demand.model_fields[name].is_required() else None,
        )
        for name in FIELDS
        if name not in signature.parameters
    ]
    init.__signature__ = signature.replace(parameters=[*own[:-1], *asked, own[-1]])  # type: ignore[attr-defined]
    return init


def check_at_parse(operator: str, given: Mapping[str, Any]) -> None:
    """Raise `InvalidRequestError` for a wrong field, where its value is known while the DAG is parsed.

    Templates, and what other tasks return, are known in the task alone. `operator` begins the error.
    """
    known = {name: value for name, value in given.items() if value is not None and is_literal(value)}
    try:
        if "team" in known:
            known["team"] = str(known["team"])  # as `team_of` does
        demand = Demand.of(**from_texts({"gpus": 1, **known, "lease_id": operator}))
        if "preempt_grace" in known or given.get("preempt_grace") is None:
            check_limits(demand)
    except errors.InvalidRequestError as error:
        raise errors.InvalidRequestError("{}: {}", operator, error.words, field=error.field) from None


def check_partial(arguments: Mapping[str, Any]) -> None:
    """Check the fields of a demand among the arguments of an operator's `partial`."""
    # By attribute: what `partial` calls resources are Airflow's.
    asked = {field: arguments[name] for field, name in ATTRIBUTES.items() if name in arguments}
    operator = str(arguments.get("task_id", "partial"))
    check_at_parse(operator, asked)
    check_duration(operator, "max_wait", arguments.get("max_wait"))


class TakesDemand:
    """Methods of an operator whose parameters and attributes are the fields of a `Demand`."""

    def __init__(self, **kwargs: Any) -> None:
        # A mapped function of `@task.gpu` gives them by attribute.
        given = {name: kwargs.pop(field, kwargs.pop(name, None)) for field, name in ATTRIBUTES.items()}
        super().__init__(**kwargs)
        vars(self).update(given)

    @classmethod
    def partial(cls, **arguments: Any) -> Any:
        """Return the mapped form of the operator, as of Airflow's, with its arguments checked."""
        check_partial(arguments)
        return super().partial(**arguments)  # type: ignore[misc]

    def given_fields(self) -> dict[str, Any]:
        """Return the fields that the author gave, rendered; None where one was left out."""
        return {name: given_value(getattr(self, attribute)) for name, attribute in ATTRIBUTES.items()}


def check_duration(operator: str, name: str, value: timedelta | None, *, none: bool = True) -> None:
    """Raise `TypeError` for anything but a `timedelta` or, where that is allowed, None."""
    if not (none and value is None) and not isinstance(value, timedelta):
        raise TypeError(f"{operator}: {name} must be a timedelta, got {value!r}")


def is_literal(value: Any) -> bool:
    """Return whether the value is plain, without a template in it."""
    if isinstance(value, str):
        return not any(mark in value for mark in ("{{", "{%", "{#"))
    if isinstance(value, Mapping):
        return all(is_literal(part) for pair in value.items() for part in pair)
    if isinstance(value, (list, tuple)):
        return all(map(is_literal, value))
    return isinstance(value, (int, float, timedelta, datetime))


def owner_of(operator: Any, context: Any) -> str:
    """Return who triggered the DAG run, where Airflow (3.1 or later) knows it, else the task's owner."""
    user = getattr(context.get("dag_run"), "triggering_user_name", None)
    return str(user or operator.owner)


def demand_of(operator: Any, given: Mapping[str, Any], context: Any, lease_id: str, **instead: Any) -> Demand:
    """Return the demand of an operator whose templates are rendered; raises `AirflowFailException`.

    `given` are the fields that its author gave, `instead` those that replace them.
    """
    priority = operator.priority_weight if given["priority"] is None else given["priority"]
    own = {"priority": priority, "team": team_of(operator, given["team"], context)}
    own["owner"] = owner_of(operator, context)
    if given["deadline"] is None:
        own["deadline"] = deadline_of_run(context)
    try:
        return Demand.of(**from_texts({**given, **own, **instead, "lease_id": lease_id}))
    except errors.InvalidRequestError as error:
        raise AirflowFailException(str(error)) from None


def deadline_of_run(context: Any) -> datetime | None:
    """Return the first deadline that the DAG states for this run, as far as a worker knows them.

    Airflow has them from 3.1 on; that of an average runtime is in its database alone.
    """
    run, found = context.get("dag_run"), []
    for alert in getattr(context.get("dag"), "deadline", None) or ():
        kind = type(alert.reference).__name__
        begin = getattr(alert.reference, "_datetime", None)
        if kind in RUN_TIMES:
            begin = getattr(run, RUN_TIMES[kind], None)
        if begin is not None and isinstance(alert.interval, timedelta):
            found.append(begin + alert.interval)
    return min(found, default=None)


def demand_params(**defaults: Any) -> dict[str, Param]:
    """Return the parameters of a trigger form that asks for all of a `Demand`; the given ones come first."""
    schema, kinds = Demand.model_json_schema()["properties"], {int: "integer", bool: "boolean"}
    return {
        name: Param(
            defaults.get(name, True if KINDS[name] is bool else None),
            type=[kinds.get(KINDS[name], "string"), "null"],  # type: ignore[arg-type]
            title=name,
            description=Demand.model_fields[name].description,
            section=None if name in defaults else "More",
            **{key: schema[name][key] for key in ("minimum", "maximum") if key in schema[name]},
        )
        for name in sorted(FIELDS, key=lambda name: name not in defaults)
    }


def demand_templates() -> dict[str, str]:
    """Return an operator's arguments that take the values of `demand_params`."""
    return {name: f"{{{{ params.{name} }}}}" for name in FIELDS}


def submit(
    manager: LeaseService, demand: Demand, identity: TaskIdentity, *, is_weight: bool = False
) -> Submission:
    """Return the task's lease (state RUNNING) or its pending request (WAITING), an existing one if any.

    If the priority `is_weight`, Airflow's own, it is cut to the highest that the cluster allows.
    A lease of another shape, left by a try before the task was changed, is ended first, and so is a revoked
    one. Raises `AirflowFailException` for a request that can never be granted, `AirflowException` for an
    error that may pass.
    """
    owner = demand.owner
    demand = demand.model_copy(update={"owner": manager.stated_owner(owner) or ""})
    try:
        try:
            status = manager.submit(demand)
        except errors.PriorityError as error:
            if not is_weight:
                raise
            return submit(manager, cut(demand, error).model_copy(update={"owner": owner}), identity)
        except (errors.DuplicateTaskError, ServiceError) as error:
            if isinstance(error, ServiceError) and error.status != 409:
                raise
            end_lease(manager, identity, owner)
            status = manager.submit(demand)
        # Another owner could end it while this task's job runs under it.
        _require_owner(manager, status, owner)
        if status["state"] == "ERROR":  # it was not renewed for a while, but its task continues
            status = manager.renew(demand.lease_id, fencing_token=status["fencing_token"])
    except errors.ResourceManagerError as error:
        if isinstance(error, errors.InvalidRequestError) and not isinstance(error, errors.NoServersError):
            raise AirflowFailException(str(error)) from None
        raise AirflowException(str(error)) from error
    return status


def cut(demand: Demand, error: errors.PriorityError) -> Demand:
    """Return the demand of a task with the highest priority that the cluster allows, and log it."""
    logger.warning("priority_weight %d is cut to %d: %s", demand.priority, error.most, error)
    return demand.model_copy(update={"priority": error.most})


def end_lease(manager: LeaseService, identity: TaskIdentity, owner: str) -> int:
    """End the task's lease or pending request; return the fencing token of the lease, 0 if there is none.

    Raises `AirflowException` if it is not the task's own, or if its job may still run.
    """
    entry = manager.status_of(identity.lease_id)
    if entry is None:
        return 0
    _require_owner(manager, entry, owner)
    if not is_of(entry, identity):
        raise AirflowException(
            f"lease {name_in_words(entry)} names another task in its labels; it was not requested by this "
            "task: release it"
        )
    end_entry(manager, entry, Outcome.CANCELLED)
    return 0 if entry["state"] == "WAITING" else entry["fencing_token"]


def _require_owner(manager: LeaseService, entry: Mapping[str, Any], owner: str) -> None:
    """Raise `AirflowException` if the lease is of another owner; the service itself compares its callers."""
    if manager.stated_owner(owner) not in (None, entry.get("owner", "")):
        raise AirflowException(
            f"lease {name_in_words(entry)} belongs to owner {entry.get('owner')!r}, not to {owner!r}; "
            "it was not requested by this task: release it"
        )


def is_of(entry: Mapping[str, Any], identity: TaskIdentity) -> bool:
    """Return whether the lease or pending request says that it is of this task instance."""
    return all(entry["labels"].get(name) == value for name, value in identity.labels.items())


def end_entry(manager: LeaseService, entry: Mapping[str, Any], outcome: Outcome | None) -> Action:
    """End a lease or pending request; raises `AirflowException` if it is another's or its job may run."""
    try:
        done = reconcile.end(manager, entry, outcome)
    except errors.ResourceManagerError as error:
        raise AirflowException(str(error)) from error
    if done.action is ActionKind.KEPT:
        raise AirflowException(f"{done.name}: {done.detail}; its GPUs stay allocated until it is gone")
    return done


def team_of(operator: Any, team: str | None, context: Mapping[str, Any]) -> str:
    """Return the given team, else Airflow's, else the task's pool; empty for Airflow's default pool."""
    if team is not None:
        return str(team)
    if of_airflow := getattr(context.get("dag_run"), "team_name", None):
        return str(of_airflow)
    return "" if operator.pool == DEFAULT_POOL else str(operator.pool)
