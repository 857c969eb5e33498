"""End leases when Airflow reports that their task or DAG run has ended, ahead of the reconciler.

Airflow calls these hooks in workers, the API server and the scheduler. A separate thread ends the leases,
so that none of them waits. Safety does not depend on it: the reconciler ends every lease that it misses.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from airflow.listeners import hookimpl
from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

from resource_manager.airflow.announcing import announce, connections_of, tasks_to_come
from resource_manager.airflow.hook import DEFAULT_CONNECTION, GPUManagerHook
from resource_manager.airflow.task_results import drop_collected, drop_end
from resource_manager.core.announced import run_of
from resource_manager.errors import ResourceManagerError
from resource_manager.jobs import reconcile
from resource_manager.jobs.airflow_api import ENDED_RUN_STATES
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.task_identity import TaskIdentity, task_as_caller
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.lease_service import LeaseService

logger = logging.getLogger(__name__)

NOT_RELEASED = "the GPUs were not released here; the reconciler will release them"
NOT_ANNOUNCED = "what the tasks of a DAG run will ask for is not announced"


@hookimpl
def on_starting(component: Any) -> None:
    """Prepare a triggerer, whose process has no other sign of what it will be."""
    if sys.argv[1:2] == ["triggerer"]:
        from resource_manager.airflow.execution_api import build_execution_api

        build_execution_api()


@hookimpl
def on_task_instance_running(previous_state: Any, task_instance: Any) -> None:
    """Make the process of a task in a `gpu_lease` known by its lease; a DAG with one has the module."""
    lease = sys.modules.get("resource_manager.airflow.operators.lease")
    if lease is not None and isinstance(task_instance, RuntimeTaskInstance):
        try:
            lease.join_lease(task_instance)
        except Exception as error:  # the task goes on, and so do the listeners of others
            logger.warning("the process of this task is not known as one of its gpu_lease: %s", error)


@hookimpl
def on_task_instance_success(previous_state: Any, task_instance: Any) -> None:
    _drop_kept(task_instance, once_ended=True)
    _task_ended(task_instance)


@hookimpl
def on_task_instance_failed(previous_state: Any, task_instance: Any, error: Any) -> None:
    if task_instance.state == "failed":  # in a worker of Airflow 3.0 it is running
        _drop_kept(task_instance, once_ended=False)  # it ends there after this process
    if task_instance.state != "up_for_retry":
        _task_ended(task_instance)


@hookimpl
def on_task_instance_skipped(previous_state: Any, task_instance: Any) -> None:
    _task_ended(task_instance)


@hookimpl
def on_dag_run_running(dag_run: Any, msg: str) -> None:
    """Announce what its tasks will ask for; a run that was cleared begins again, too."""
    try:
        tasks = tasks_to_come(dag_run)
    except Exception as error:  # the scheduler goes on
        logger.warning("%s: %s", NOT_ANNOUNCED, error)
        return
    dag_id, run_id = dag_run.dag_id, dag_run.run_id
    if tasks:
        _thread().submit(
            _safely, lambda manager: announce(manager, instance_id(), dag_id, run_id, tasks), NOT_ANNOUNCED
        )


@hookimpl
def on_dag_run_success(dag_run: Any, msg: str) -> None:
    _run_ended(dag_run)


@hookimpl
def on_dag_run_failed(dag_run: Any, msg: str) -> None:
    _run_ended(dag_run)


def _drop_kept(task_instance: Any, *, once_ended: bool) -> None:
    """Drop what was kept of a training that ends in this worker: Airflow has it, or no try will collect it.

    A DAG with a training has its module.
    """
    training = sys.modules.get("resource_manager.airflow.operators.training")
    if training is None or not isinstance(task_instance, RuntimeTaskInstance):
        return
    if isinstance(task_instance.task, training.GPUTrainingOperator):
        drop_collected(task_instance, once_ended=once_ended)


def _task_ended(task_instance: Any) -> None:
    """End the lease of a task ended from outside; a task that ends in its worker has released its GPUs."""
    if isinstance(task_instance, RuntimeTaskInstance):
        return
    # The instance id is read in the other thread: this one may be inside a database session of the scheduler.
    identity, row_id = TaskIdentity.of(task_instance, ""), str(task_instance.id)

    def end(manager: LeaseService) -> None:
        from airflow.models.taskinstance import TaskInstance  # with what workers do not load

        ended = replace(identity, instance=instance_id())
        entry = manager.status_of(ended.lease_id)
        stored_id = _stored(TaskInstance.id, _columns_of(identity))
        if stored_id is not None and str(stored_id) != row_id:
            return  # it was cleared meanwhile, by which it got another id: its new try has lease and job
        if entry is not None and reconcile.task_of(entry) == ended:
            _end(manager, entry, ended.by)
        drop_end(ended)  # no try will collect it

    _thread().submit(_safely, end, NOT_RELEASED, lambda: [_connection_of(identity)])


def _connection_of(identity: TaskIdentity) -> str:
    """Return the connection by which the task's newest try asked; the default one for a task without any."""
    from airflow.models.renderedtifields import RenderedTaskInstanceFields

    rendered = _stored(RenderedTaskInstanceFields.rendered_fields, _columns_of(identity)) or {}
    return rendered.get("gpu_conn_id") or DEFAULT_CONNECTION


def _columns_of(identity: TaskIdentity) -> dict[str, Any]:
    return {name: value for name, value in asdict(identity).items() if name != "instance"}


def _stored(column: Any, of: Mapping[str, Any]) -> Any:
    from airflow.utils.session import create_session
    from sqlalchemy import select

    with create_session() as session:
        return session.scalar(select(column).filter_by(**of))


def _run_ended(dag_run: Any) -> None:
    if str(dag_run.state) not in ENDED_RUN_STATES:  # a user has marked it, and teardowns are left
        return
    dag_id, run_id, has_succeeded = dag_run.dag_id, dag_run.run_id, str(dag_run.state) == "success"
    clears, dag = dag_run.clear_number, dag_run.dag

    def end(manager: LeaseService) -> None:
        from airflow.models.dagrun import DagRun

        if _stored(DagRun.clear_number, {"dag_id": dag_id, "run_id": run_id}) not in (clears, None):
            return  # it was cleared meanwhile, and its tasks go on under its lease
        errors = []
        for entry in [*manager.leases(), *manager.queue(estimated=False)]:
            labels = entry["labels"]
            names = tuple(labels.get(name) for name in ("instance", "dag_id", "run_id"))
            if names != (instance_id(), dag_id, run_id) or labels.get("scope") != reconcile.RUN_SCOPE:
                continue
            try:
                # What is in use is ended by the reconciler.
                if has_succeeded or not reconcile.may_be_in_use(manager, entry):
                    _end(manager, entry, task_as_caller(instance_id(), dag_id))
            except ResourceManagerError as error:  # that of another connection's caller, maybe
                errors.append(error)
        with asked_by(task_as_caller(instance_id(), dag_id)):
            run = run_of(TaskIdentity(instance_id(), dag_id, run_id, "any").lease_id)
            manager.withdraw(run=run, reason="the run has ended")
        for each in errors:
            raise each

    _thread().submit(_safely, end, NOT_RELEASED, lambda: sorted({DEFAULT_CONNECTION, *connections_of(dag)}))


def _end(manager: LeaseService, entry: Mapping[str, Any], by: str) -> None:
    with asked_by(by):
        done = reconcile.end(manager, entry)
    logger.info("%s %s: %s", done.action, done.name, done.detail)


def finish() -> None:
    """Wait for the work that was submitted so far, and drop the managers: the next event opens others."""
    _thread().submit(_hook.cache_clear).result()


def _safely(
    act: Callable[[LeaseService], None],
    missed: str = NOT_RELEASED,
    over: Callable[[], Iterable[str]] = lambda: [DEFAULT_CONNECTION],
) -> None:
    """Act over each connection that `over` finds."""
    try:
        for conn_id in over():
            _ask(conn_id, act, missed)
    except Exception as error:
        logger.warning("%s: %s", missed, error)


def _ask(conn_id: str, act: Callable[[LeaseService], None], missed: str) -> None:
    try:
        _hook(conn_id).ask(act)
    except Exception as error:  # the other connections are asked all the same
        logger.warning("%s: %s", missed, error)


@cache
def _thread() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(max_workers=1, thread_name_prefix="gpu-leases")


@cache
def _hook(conn_id: str) -> GPUManagerHook:
    return GPUManagerHook(conn_id)
