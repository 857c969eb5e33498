"""Jobs on Slurm for those who list them, and the end of those whose tasks have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing
from typing import Protocol

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.launchers.slurm import Record, SlurmLauncher
from resource_manager.jobs.reconcile import Action, ActionKind, TaskStates
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.slurm_jobs import is_live

KEPT_S = 30 * 86_400.0
"""Time for which jobs that have ended are told of."""


class Manager(Protocol):
    """Methods that this needs of a `GPUResourceManager` or a `ServiceClient`."""

    def slurm_jobs(self) -> list[SlurmJob]: ...
    def keep_slurm_jobs(self, cluster: str, jobs: Sequence[SlurmJob]) -> None: ...


def jobs_of(launcher: SlurmLauncher) -> tuple[str, list[SlurmJob]]:
    """Return the cluster and its jobs; raises `LauncherError`."""
    cluster, records = launcher.records(time.time() - KEPT_S)
    return cluster, [_job_of(cluster, record) for record in records]


def publish(launcher: SlurmLauncher, manager: Manager) -> None:
    """Let the manager know of the jobs; raises `LauncherError` or what the manager raises."""
    cluster, jobs = jobs_of(launcher)
    manager.keep_slurm_jobs(cluster, jobs)


def end_left_behind(manager: Manager, states: TaskStates, instance: str) -> list[Action]:
    """End the jobs on Slurm of the Airflow with this id whose tasks have ended."""
    told = [job for job in manager.slurm_jobs() if is_live(job)]
    ways = {job["conn_id"] for job in told if job["labels"].get("instance") == instance}
    actions: list[Action] = []
    for conn_id in sorted(ways):
        try:
            with closing(SlurmLauncher(JobPlace("slurm", "", conn_id))) as launcher:
                actions += _end_on(launcher, states, instance)
                publish(launcher, manager)
        except LauncherError as error:
            actions.append(
                Action("", conn_id or "Slurm", ActionKind.KEPT, f"its jobs may still run: {error}")
            )
    return actions


def _end_on(launcher: SlurmLauncher, states: TaskStates, instance: str) -> list[Action]:
    by_task = {
        identity: record
        for record in launcher.records()[1]
        if record.ended_at is None
        and (identity := TaskIdentity.from_labels(record.labels)) is not None
        and identity.instance == instance
    }
    wanted = states.unfinished(by_task)
    actions = []
    for identity, record in by_task.items():
        if identity not in wanted:
            launcher.stop(record.key)
            detail = f"job {record.id} on Slurm, as its task has ended"
            actions.append(Action(record.lease_id, record.lease_id, ActionKind.STOPPED, detail))
    return actions


def _job_of(cluster: str, record: Record) -> SlurmJob:
    told = record.model_dump(include=SlurmJob.__annotations__.keys() & Record.model_fields.keys())
    own = {"source": "slurm", "cluster": cluster, "task_id": record.lease_id}
    return {**told, **own, "wait": record.wait, "where": record.where}  # type: ignore[typeddict-item]
