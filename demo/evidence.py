"""Checks that no GPU was allocated twice or lost, by the manager's history and the jobs' own reports."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from demo.stack import AirflowApi
from demo.timeline import Holding, overlaps


def reports_of(api: AirflowApi, dag_id: str, run_id: str) -> dict[str, dict[str, Any]]:
    """Return the report of each successful job of a run of `train_digits` or `train_gang`, by its name."""
    return {
        f"{dag_id}.{task['task_id']}": api.xcom(dag_id, run_id, task["task_id"])
        for task in api.task_instances(dag_id, run_id)
        if task["state"] == "success"
    }


def problems_of(
    held: Iterable[Holding],
    runs: Iterable[Mapping[str, Mapping[str, Any]]],
    servers: Iterable[Mapping[str, Any]],
) -> Iterator[str]:
    """Yield the problems in the manager's history, the jobs' reports of all runs, and the free capacity.

    A report has the GPUs that a job saw, and its start and end, or those of its `members`, a server each; at
    the end every GPU and CPU must be free.
    """
    held = list(held)
    yield from overlaps(
        [
            (item.name, item.server, item.gpu_ids, item.granted_at, item.released_at or float("inf"))
            for item in held
        ]
    )
    reports = [
        (name, member)
        for run in runs
        for name, report in run.items()
        for member in report.get("members", [report])
    ]
    spans = []
    for name, report in reports:
        gpu_ids = map(int, report["cuda_visible_devices"].split(","))
        spans.append((name, report["server"], gpu_ids, report["started_at"], report["ended_at"]))
    yield from overlaps(spans)
    for name, report in reports:
        server = report["server"]
        granted = {
            ",".join(map(str, item.gpu_ids)) for item in held if (item.name, item.server) == (name, server)
        }
        if report["cuda_visible_devices"] not in granted:
            yield f"{name} saw GPUs {report['cuda_visible_devices']} but was granted {sorted(granted)}"
    for server in servers:
        if any(server[f"available_{what}"] != server[f"total_{what}"] for what in ("gpus", "cpus")):
            yield f"{server['server_name']} is not free again: {server['available_gpus']} GPUs are"
