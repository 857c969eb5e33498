"""Requests as an operator makes them, without a running task."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from resource_manager.agent.report_format import read_report
from resource_manager.airflow import GPUAllocateOperator
from resource_manager.airflow.task_demand import ATTRIBUTES, demand_of, submit
from resource_manager.fleet.opening import REPORTS
from resource_manager.fleet.receiving import ReportReceiver
from resource_manager.jobs.task_identity import TaskIdentity
from tests.agent.reporting import as_text, gpu, report


def ask(
    manager: Any,
    task: TaskIdentity,
    gpus: Any,
    cpus: Any = 1,
    labels: Any = None,
    **more: Any,
) -> Any:
    """Submit the request of an operator whose templates gave these values; return its status."""
    operator = GPUAllocateOperator(task_id="t", owner=more.pop("owner", ""), gpus="{{ params.gpus }}")
    values = {"ttl": timedelta(minutes=2), "priority": 0, "gpus": gpus, "cpus": cpus, **more}
    vars(operator).update({ATTRIBUTES[name]: value for name, value in values.items()})
    demand = demand_of(operator, operator.given_fields(), {}, task.lease_id, quarantine=True)
    return submit(manager, demand.model_copy(update={"labels": {**task.labels, **(labels or {})}}), task)


def report_of(manager: Any, **known: Any) -> None:
    """Receive a report of the lease's two GPUs from the server that holds it."""
    text = as_text(report(manager.store.now(), *(gpu(number, **known) for number in range(2))))
    manager.read_reports_by(REPORTS)
    ReportReceiver(manager).receive(read_report(text))
