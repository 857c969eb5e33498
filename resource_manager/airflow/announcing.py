"""Announce what the tasks of a DAG run will ask for, as the run begins: by its DAG, in the scheduler.

A demand is known then if its values are plain; templates are rendered, and what a `gpu_lease` inside of a
function asks for is known, in the task alone.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from graphlib import TopologicalSorter
from itertools import islice
from typing import Any

from pydantic import TypeAdapter, ValidationError

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.task_demand import ATTRIBUTES, is_literal, owner_of, team_of
from resource_manager.core.announced import MAX_AFTER, MAX_AFTER_BYTES, MAX_OF_RUN
from resource_manager.errors import InvalidRequestError, PriorityError
from resource_manager.jobs.airflow_api import ENDED_TASK_STATES
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.demand import from_texts
from resource_manager.manager.lease_service import LeaseService

logger = logging.getLogger(__name__)

FIELDS = (
    *("gpus", "gpu_milli", "cpus", "resources", "gpu_types", "types", "gpu_memory", "link", "vendor"),
    *("labels_required", "prefer_server", "server", "nodes", "spread", "same", "prefer_same", "team"),
    *("priority", "preemptible", "expected_runtime"),
)
"""Fields of a demand that say how much it takes, where, how long, and whom it may overtake."""

_DURATION = TypeAdapter[Any](float | timedelta)


@dataclass(frozen=True, slots=True)
class TaskToCome:
    """A task of a run that will ask for GPUs, after those of the ids `after`; `copies` as of `announce`."""

    task_id: str
    demand: Mapping[str, Any]
    after: tuple[str, ...]
    copies: int


def tasks_to_come(dag_run: Any) -> list[TaskToCome]:
    """Return the unfinished tasks of the run that ask for GPUs, the next ones first, at most `MAX_OF_RUN`."""
    tasks = {task.task_id: task for task in dag_run.dag.tasks}
    demands = {name: demand for name, task in tasks.items() if (demand := _demand_of(task, dag_run))}
    if not demands:
        return []
    instances = _instances(dag_run)
    found: list[TaskToCome] = []
    before: dict[str, frozenset[str]] = {}
    """The nearest tasks with GPUs before each task."""
    order = TopologicalSorter({name: task.upstream_task_ids for name, task in tasks.items()})
    for name in order.static_order():
        nearest = (
            each
            for other in sorted(tasks[name].upstream_task_ids)
            for each in ((other,) if other in demands else sorted(before[other]))
        )
        before[name] = frozenset(islice(nearest, MAX_AFTER))
        if name in demands and name in instances:
            is_open = tasks[name].get_needs_expansion() and instances[name] == 1
            copies = 0 if is_open else instances[name]
            found.append(TaskToCome(name, demands[name], tuple(sorted(before[name])), copies))
    return found[:MAX_OF_RUN]


def connections_of(dag: Any) -> set[str]:
    """Return the connections by which tasks of a DAG ask, as far as it says; not every event has its DAG."""
    tasks = () if dag is None else dag.tasks
    named = (_arguments_of(task, dag).get("gpu_conn_id") for task in tasks)
    return {each for each in named if isinstance(each, str) and is_literal(each)}


def announce(
    manager: LeaseService, instance: str, dag_id: str, run_id: str, tasks: Iterable[TaskToCome]
) -> None:
    """Announce the tasks; one that is wrong, or too many, is left out."""
    for task in tasks:
        identity = TaskIdentity(instance, dag_id, run_id, task.task_id)
        after = [TaskIdentity(instance, dag_id, run_id, name).lease_id for name in task.after]
        while sum(len(each.encode()) for each in after) > MAX_AFTER_BYTES:  # else nothing would be announced
            after.pop()
        demand = {**task.demand, "owner": manager.stated_owner(task.demand["owner"]) or ""}
        with asked_by(identity.by):
            try:
                _announce(manager, identity, demand, after, task.copies)
            except InvalidRequestError as error:  # the task will say so itself
                logger.info("%s is not announced: %s", identity.lease_id, error)


def _announce(
    manager: LeaseService, identity: TaskIdentity, demand: Mapping[str, Any], after: list[str], copies: int
) -> None:
    try:
        manager.announce(
            identity.lease_id, labels=identity.labels, after=after, copies=copies, **from_texts(demand)
        )
    except PriorityError as error:  # a weight of Airflow's is cut, as when the task asks
        _announce(manager, identity, {**demand, "priority": error.most}, after, copies)


def _demand_of(task: Any, dag_run: Any) -> dict[str, Any] | None:
    """Return the plain values of a task's demand; None if it has none, or if it does not say how much.

    So does a task that asks elsewhere: by another connection, or Slurm. A sensor only looks: it has no
    connection among its templates.
    """
    templated = set(task.template_fields)
    values = _arguments_of(task, dag_run.dag)
    if "gpu_demand" in templated:
        given = values.get("gpu_demand") or {}
        if not isinstance(given, Mapping) or _is_expanded(task, "gpu_demand"):
            return None  # Airflow 3.0 stores what it cannot read as text
        given = {"gpu_conn_id": values.get("gpu_conn_id"), **values.get("gpu_defaults", {}), **given}
    elif templated >= {"gpus", "gpu_conn_id"} and values.get("launcher") != "slurm":
        given = {name: values.get(attribute) for name, attribute in ATTRIBUTES.items()}
        given["gpu_conn_id"] = values.get("gpu_conn_id")
    else:
        return None
    if given["gpu_conn_id"] not in (None, DEFAULT_CONNECTION) or _is_expanded(task, "gpu_conn_id"):
        return None
    demand = {name: given[name] for name in FIELDS if given.get(name) is not None and is_literal(given[name])}
    if not demand.keys() & {"gpus", "gpu_milli"}:
        return None
    if "expected_runtime" in demand:  # a serialised DAG has it as 1:00:00
        with suppress(ValidationError):
            demand["expected_runtime"] = _DURATION.validate_python(demand["expected_runtime"])
    context = {"dag_run": dag_run}
    return {
        "priority": task.priority_weight,
        **demand,
        "team": team_of(task, demand.get("team"), context),
        "owner": owner_of(task, context),
    }


def _arguments_of(task: Any, dag: Any) -> Mapping[str, Any]:
    """Return the arguments of a task; a mapped one gets those of its DAG's `default_args` that it has as it
    runs: of those read here all are templates, so one that is none, as `launcher`, is another operator's.
    """
    if not task.is_mapped:
        return {**vars(task)}
    own = (name for name in task.template_fields if name in dag.default_args)
    given = {name: dag.default_args[name] for name in own if not _is_expanded(task, name)}
    return {**given, **task.partial_kwargs}


def _is_expanded(task: Any, argument: str) -> bool:
    """Return whether copies of a mapped task differ in that argument, as far as the DAG says."""
    given = getattr(task, "expand_input", None)  # of a mapped function None: its own arguments differ
    expanded = () if given is None else given.value
    each = expanded if isinstance(expanded, list) else [expanded]
    return any(argument in arguments for arguments in each if isinstance(arguments, Mapping))


def _instances(dag_run: Any) -> dict[str, int]:
    """Return the number of unfinished instances of each task, by one query."""
    from airflow.models.taskinstance import TaskInstance  # with what workers do not load
    from sqlalchemy import func, or_, select
    from sqlalchemy.orm import object_session

    of_run = (TaskInstance.dag_id == dag_run.dag_id, TaskInstance.run_id == dag_run.run_id)
    is_unfinished = or_(TaskInstance.state.is_(None), TaskInstance.state.not_in(ENDED_TASK_STATES))
    counts = select(TaskInstance.task_id, func.count()).where(*of_run, is_unfinished)
    session: Any = object_session(dag_run)
    with session.no_autoflush:
        return dict(session.execute(counts.group_by(TaskInstance.task_id)).all())
