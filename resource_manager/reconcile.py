"""Ends leases whose tasks are over: their jobs first, and the leases once the jobs are really gone."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any, Protocol

from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.launchers import JobState, Launcher, LauncherError, job_key, open_launcher
from resource_manager.task_identity import TaskIdentity

logger = logging.getLogger(__name__)

RUN_SCOPE = "run"
"""Label `scope` of a lease that lives until its whole DAG run is over, not only its task."""

PROCESS_SCOPE = "process"
"""Label `scope` of a lease that a process uses, renews, and lets run out only once it is gone."""


class Manager(Protocol):
    """What is needed of a `GPUResourceManager` or a `ServiceClient`."""

    def leases(self) -> list[dict[str, Any]]: ...
    def queue(self) -> list[dict[str, Any]]: ...
    def cancel(self, task_id: str) -> bool: ...
    def release_resources(
        self, task_id: str, *, fencing_token: int | None = None, outcome: str = ""
    ) -> bool: ...
    def renew(self, task_id: str, *, fencing_token: int | None = None) -> dict[str, Any]: ...


class TaskStates(Protocol):
    """What Airflow knows; both may be asked about anything."""

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        """Those of the task instances that exist and have not ended."""

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        """Whether the DAG run exists and has not ended."""


@dataclass(frozen=True, slots=True)
class RunningJob:
    """Where a lease's job runs; all of it follows from the lease, so that anyone can find the job."""

    key: str
    task_id: str
    fencing_token: int
    launcher: str
    address: str = ""
    conn_id: str | None = None

    @classmethod
    def of(cls, allocation: Mapping[str, Any]) -> RunningJob | None:
        """The job of an allocation, or None for a lease without a launcher."""
        labels = allocation["labels"]
        launcher = labels.get("launcher")
        if launcher is None:
            return None
        return cls(
            key=job_key(allocation["task_id"], allocation["fencing_token"]),
            task_id=allocation["task_id"],
            fencing_token=allocation["fencing_token"],
            launcher=launcher,
            address=labels.get("host", "") if launcher == "local" else allocation["address"],
            conn_id=labels.get("launcher_conn_id"),
        )

    def open(self) -> Launcher:
        """Its launcher; raises `LauncherError`."""
        return open_launcher(self.launcher, self.address, self.conn_id)


@dataclass(frozen=True, slots=True)
class Action:
    """What was done about one lease or waiting request, and why."""

    task_id: str
    action: str
    detail: str = ""


def end(manager: Manager, entry: Mapping[str, Any], outcome: str = "CANCELLED") -> Action:
    """Ends one lease (its job first) or waiting request, as `leases()` or `queue()` has it.

    The lease stays where the job cannot be stopped: held is safe, free is not.
    """
    task_id = entry["task_id"]
    if entry["state"] == "WAITING":
        done = manager.cancel(task_id)
        return Action(task_id, "cancelled" if done else "gone before", "it waited for GPUs")
    if entry["labels"].get("scope") == PROCESS_SCOPE:  # a task that is over in Airflow is still being ended
        return Action(task_id, "kept", "its process may still run, and the lease runs out after it")
    job, detail = RunningJob.of(entry), "it had no job"
    if job is not None:
        try:
            with closing(job.open()) as launcher:
                was = launcher.status(job.key).state
                launcher.stop(job.key)
        except LauncherError as error:
            return Action(task_id, "kept", f"its job may still run: {error}")
        detail = "its job was stopped" if was is JobState.RUNNING else "its job was gone"
    released = manager.release_resources(task_id, fencing_token=entry["fencing_token"], outcome=outcome)
    return Action(task_id, "released" if released else "gone before", detail)


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """The actions of one comparison, and how many leases and requests of other Airflows were left alone."""

    actions: list[Action]
    other_instances: int


def reconcile(manager: Manager, states: TaskStates, instance: str) -> Reconciliation:
    """Compare what the Airflow with that instance id holds and waits for with its task instances.

    Reads the leases before the tasks: a task seen as over after its lease was seen will not use it again.
    Leases of other Airflows, whose tasks `states` cannot know, are only counted. Leases of nobody in Airflow
    (asked for through REST or Python) are left to their time to live.
    """
    entries = [*manager.leases(), *manager.queue()]
    of_tasks = [
        (entry, identity)
        for entry in entries
        if (identity := TaskIdentity.from_labels(entry["labels"])) is not None
    ]
    owned = [(entry, identity) for entry, identity in of_tasks if identity.instance == instance]
    unfinished = states.unfinished({identity for _, identity in owned})
    run_is_unfinished = _once(states.run_is_unfinished)
    actions = []
    for entry, identity in owned:
        if entry["labels"].get("scope") == RUN_SCOPE:
            wanted = run_is_unfinished(identity.dag_id, identity.run_id)
        else:
            wanted = identity in unfinished
        try:
            if not wanted:
                actions.append(end(manager, entry))
            elif entry.get("quarantined"):
                manager.renew(entry["task_id"], fencing_token=entry["fencing_token"])
                actions.append(Action(entry["task_id"], "renewed", "nobody did, but its task goes on"))
        except LeaseNotFoundError:
            actions.append(Action(entry["task_id"], "gone before"))
        except ResourceManagerError as error:
            actions.append(Action(entry["task_id"], "kept", str(error)))
    for action in actions:
        logger.info("%s %s: %s", action.action, action.task_id, action.detail)
    return Reconciliation(actions, len(of_tasks) - len(owned))


def _once(ask: Callable[[str, str], bool]) -> Callable[[str, str], bool]:
    known: dict[tuple[str, str], bool] = {}

    def answer(dag_id: str, run_id: str) -> bool:
        if (dag_id, run_id) not in known:
            known[dag_id, run_id] = ask(dag_id, run_id)
        return known[dag_id, run_id]

    return answer
