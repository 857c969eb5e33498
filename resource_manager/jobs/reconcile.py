"""End leases whose tasks have ended: first their jobs, then the leases once the jobs are gone."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from functools import cache
from typing import Any, Protocol

from resource_manager.core.changes import Drained, JobEnd, Outcome
from resource_manager.core.search import is_unsearched
from resource_manager.errors import JobPlacedError, LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs.gang_job import GangJob, Stopped, asking_silent_places_once
from resource_manager.jobs.job_preemption import STEP_S, grace_of, queue_again, waits_again
from resource_manager.jobs.launchers import LauncherError
from resource_manager.jobs.running_job import is_remainder
from resource_manager.jobs.searching import jobs_on
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.answer_words import name_in_words
from resource_manager.manager.cluster_results import ServerSummary
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import Allocation, ReleaseResult, Submission

logger = logging.getLogger(__name__)

RUN_SCOPE = "run"
"""Label `scope` of a lease that lives, once it is granted, until its whole DAG run has ended."""

PROCESS_SCOPE = "process"
"""Label `scope` of a lease that a process uses and renews; it expires only after that process is gone."""


ENDING_S = 12.0
"""Longest life of the process of a task that Airflow or a user ended: to its supervisor's next heartbeat,
then SIGTERM and after 5 s SIGKILL."""

NOT_TO_RUN = "its task will not run"

OPERATOR_TIMEOUT_S = 30.0
"""Time after the end of a preemption from which the reconciler ends the job, as its operator has not."""


class TaskStates(Protocol):
    """States of task instances and DAG runs in Airflow, which need not exist."""

    def unfinished(self, identities: Iterable[TaskIdentity]) -> set[TaskIdentity]:
        """Return the task instances among these that exist and have not ended."""

    def run_is_unfinished(self, dag_id: str, run_id: str) -> bool:
        """Return whether the DAG run exists and has not ended."""


class ActionKind(StrEnum):
    """Kind of an `Action`: what happened to the lease or pending request, or to a server after a restore."""

    RELEASED = "released"
    CANCELLED = "cancelled"
    RENEWED = "renewed"
    STOPPED = "stopped"
    KEPT = "kept"
    PARTLY_RELEASED = "partly released"
    GONE_BEFORE = "gone before"
    QUEUED_AGAIN = "queued again"
    OPENED = "opened"
    KEPT_CLOSED = "kept closed"
    WITHDRAWN = "withdrawn"


@dataclass(frozen=True, slots=True)
class Action:
    """Action on one lease or pending request, or on a server, which has no `task_id`; and its reason."""

    task_id: str
    name: str
    action: ActionKind
    detail: str = ""

    @property
    def problem(self) -> str:
        """Sentence that says whose job may still run; empty if nobody's may."""
        if self.action is ActionKind.KEPT:
            return f"{self.name} keeps its lease: {self.detail}"
        if self.action is ActionKind.PARTLY_RELEASED:
            return f"{self.name} is {self.action}: {self.detail}"
        return ""


def _action(entry: Mapping[str, Any], action: ActionKind, detail: str = "") -> Action:
    return Action(entry["task_id"], name_in_words(entry), action, detail)


def end(
    manager: LeaseService,
    entry: Mapping[str, Any],
    outcome: Outcome | None = Outcome.CANCELLED,
    *,
    reason: str = "",
    failed_nodes: Collection[str] = (),
) -> Action:
    """End one lease (its job first) or pending request, given as an entry of `leases()` or `queue()`.

    Whose it is comes first: the owner never changes within a fencing token or a sequence, so the job
    stopped, the lease released and the entry cancelled are those that were asked about, or gone. Raises
    `ResourceManagerError` for those of others. The lease is kept if the job cannot be stopped: GPUs that a
    job may still use must not become free. Of a gang the members that could be stopped are released. `reason`
    and `failed_nodes` tell that its job could not be started.
    """
    task_id = entry["task_id"]
    manager.require_owner(entry)
    if entry["state"] == "WAITING":
        if manager.cancel(task_id, sequence=entry["sequence"]):
            return _action(entry, ActionKind.CANCELLED, "it was pending")
        if (granted := _as_it_is(manager, entry)) is None:
            return _action(entry, ActionKind.GONE_BEFORE, "it was pending")
        if task_of(granted) != task_of(entry):  # other tasks may use it since its own was looked at
            return _action(entry, ActionKind.KEPT, "it was granted meanwhile, to all tasks of its run")
        return end(manager, granted, outcome, reason=reason, failed_nodes=failed_nodes)
    if entry["labels"].get("scope") == PROCESS_SCOPE:  # which may outlive the end of its task in Airflow
        return _action(entry, ActionKind.KEPT, "its process may still run; the lease expires after it")
    job, detail, known = GangJob.of(entry), "it had no job", JobEnd.UNKNOWN
    if job is not None:
        stopped = job.stop()
        if stopped.left:
            return _end_those_stopped(manager, entry, stopped, outcome)
        detail, known = "its job was stopped" if stopped.ran else "its job was over already", JobEnd.ENDED
    try:
        result = manager.release(
            task_id,
            fencing_token=entry["fencing_token"],
            outcome=outcome or "",
            job_end=known,
            reason=reason,
            failed_nodes=failed_nodes,
        )
    except JobPlacedError:
        if (placed := _as_it_is(manager, entry)) is None or job is not None:
            raise
        return end(manager, placed, outcome, reason=reason, failed_nodes=failed_nodes)
    kind = ActionKind.RELEASED if result is ReleaseResult.RELEASED else ActionKind.GONE_BEFORE
    return _action(entry, kind, detail)


def may_be_in_use(manager: LeaseService, entry: Mapping[str, Any]) -> bool:
    """Return whether processes of tasks that no agent sees may use a lease for `ENDING_S` after its run."""
    if entry["labels"].get("scope") != RUN_SCOPE or entry["state"] == "WAITING":
        return False
    watched = {server["server_name"] for server in manager.servers() if server["watched"]}
    return not watched.issuperset(member["server_name"] for member in entry["members"])


def _as_it_is(manager: LeaseService, entry: Mapping[str, Any]) -> Submission | None:
    """Return an entry as it is now: granted, or its job placed, since it was read; None if it has ended."""
    found = manager.status_of(entry["task_id"])
    return found if found is not None and found["short_id"] == entry["short_id"] else None


def _end_those_stopped(
    manager: LeaseService, entry: Mapping[str, Any], stopped: Stopped, outcome: Outcome | None
) -> Action:
    """Release the members whose jobs are gone; the rest, if not all, becomes a quarantined remainder."""
    task_id, error = entry["task_id"], next(iter(stopped.left.values()))
    if not stopped.ranks:
        return _action(entry, ActionKind.KEPT, f"its job may still run: {error}")
    done = manager.release_members(
        task_id,
        stopped.ranks,
        fencing_token=entry["fencing_token"],
        outcome=outcome or "",
        job_end=JobEnd.ENDED,
    )
    kind = ActionKind.PARTLY_RELEASED if done is ReleaseResult.RELEASED else ActionKind.GONE_BEFORE
    return _action(entry, kind, f"its job may still run: {error}")


def stop_job(entry: Mapping[str, Any]) -> Action:
    """Stop the job of a lease whose GPU failed; its task sees that, fails the try and ends the lease."""
    job = GangJob.of(entry)
    why = f"one of its GPUs failed: {entry['gpu_failed']}"
    if job is None:
        return _action(entry, ActionKind.KEPT, f"{why}; it has no job that could be stopped here")
    stopped = job.stop()
    if stopped.left:
        error = next(iter(stopped.left.values()))
        return _action(entry, ActionKind.KEPT, f"{why}; its job may still run: {error}")
    return _action(entry, ActionKind.STOPPED, why)


def task_of(entry: Mapping[str, Any]) -> TaskIdentity | None:
    """Return the task instance that ends with its lease; None if there is none, or it is a whole run's.

    A request that is pending is its own task's: nobody else would take the lease over.
    """
    is_of_run = entry["labels"].get("scope") == RUN_SCOPE and entry["state"] != "WAITING"
    return None if is_of_run else TaskIdentity.from_labels(entry["labels"])


@dataclass(frozen=True, slots=True)
class Reconciliation:
    """Actions of one comparison, and the number of entries of other Airflow instances, left unchanged."""

    actions: list[Action]
    other_instances: int


@asking_silent_places_once()
def reconcile(manager: LeaseService, states: TaskStates, instance: str) -> Reconciliation:
    """Compare the leases and pending requests of the Airflow with this instance id with its task instances.

    The leases are read before the tasks: a task that has ended after its lease was read will not use it
    again. What is left of a gang, whose lease id may have been granted again, and a lease that was released
    by force end once their jobs can be stopped, whatever the task does. Leases of other Airflow instances,
    whose tasks `states` cannot see, are only counted. Leases of no Airflow task (of `gpu-manager run`, REST,
    Python) have their TTL; one whose job was placed ends here once that job is seen to be over. Servers of a
    restored state are searched for jobs of leases that it does not know. A place that gives no answer is
    asked once: else leases there would take the time of all others.
    """
    entries: list[Submission] = [*manager.leases(), *manager.queue(estimated=False)]
    of_tasks = [
        (entry, identity)
        for entry in entries
        if (identity := TaskIdentity.from_labels(entry["labels"])) is not None
    ]
    owned = [(entry, identity) for entry, identity in of_tasks if identity.instance == instance]
    unfinished = states.unfinished({identity for _, identity in owned})
    run_is_unfinished = cache(states.run_is_unfinished)
    actions, of_ended_runs = [], []
    for entry in entries:
        if entry["state"] == "ERROR" and TaskIdentity.from_labels(entry["labels"]) is None:
            actions += _end_if_over(manager, entry)
    for entry, identity in owned:
        if task_of(entry) is not None:
            # The entries before may have taken minutes: it may have been cleared meanwhile.
            is_wanted = identity in unfinished or identity in states.unfinished({identity})
            actions += _settle(manager, entry, is_wanted=is_wanted)
        elif run_is_unfinished(identity.dag_id, identity.run_id):
            actions += _settle(manager, entry, is_wanted=True)
        else:
            of_ended_runs.append((entry, identity))
    actions += _search(manager)
    actions += _withdraw(manager, states, instance, run_is_unfinished)
    if any(may_be_in_use(manager, entry) for entry, _ in of_ended_runs):
        logger.info("waiting %g s for the processes of runs that have ended", ENDING_S)
        time.sleep(ENDING_S)
        run_is_unfinished.cache_clear()  # one may have been cleared meanwhile, and goes on under its lease
    for entry, identity in of_ended_runs:
        is_wanted = run_is_unfinished(identity.dag_id, identity.run_id)
        actions += _settle(manager, entry, is_wanted=is_wanted)
    for action in actions:
        logger.info("%s %s: %s", action.action, action.name, action.detail)
    return Reconciliation(actions, len(of_tasks) - len(owned))


def _settle(manager: LeaseService, entry: Submission, *, is_wanted: bool) -> list[Action]:
    """Do what a lease or pending request of a task needs, whose task or run `is_wanted` or has ended."""
    try:
        if not is_wanted or is_remainder(entry) or entry.get("revoked"):
            return [end(manager, entry)]
        if entry.get("gpu_failed"):
            manager.require_owner(entry)
            return [stop_job(entry)]
        if is_overdue(entry):
            return [_preempt(manager, entry)]
        if entry["state"] == "ERROR":
            manager.renew(entry["task_id"], fencing_token=entry["fencing_token"])
            return [_action(entry, ActionKind.RENEWED, "it was quarantined, but its task is unfinished")]
        return []
    except LeaseNotFoundError:
        return [_action(entry, ActionKind.GONE_BEFORE)]
    except ResourceManagerError as error:
        return [_action(entry, ActionKind.KEPT, str(error))]
    except Exception as error:  # the other entries must not wait for this one
        logger.exception("%s cannot be reconciled", name_in_words(entry))
        return [_action(entry, ActionKind.KEPT, f"{type(error).__name__}: {error}")]


def _withdraw(
    manager: LeaseService, states: TaskStates, instance: str, run_is_unfinished: Callable[[str, str], bool]
) -> list[Action]:
    """Withdraw what is announced of tasks that will not run: of a skipped branch, or of a deleted DAG."""
    announced = [
        (each, identity)
        for each in manager.coming()
        if (identity := TaskIdentity.from_labels(each["labels"])) is not None
        and identity.instance == instance
    ]
    unfinished = states.unfinished({identity for each, identity in announced if each["copies"] == 1})
    gone = [
        each
        for each, identity in announced
        if identity not in unfinished
        and (each["copies"] == 1 or not run_is_unfinished(identity.dag_id, identity.run_id))
    ]
    if gone:
        manager.withdraw([each["task_id"] for each in gone], reason=NOT_TO_RUN)
    return [Action(each["task_id"], each["name"], ActionKind.WITHDRAWN, NOT_TO_RUN) for each in gone]


def _search(manager: LeaseService) -> list[Action]:
    """Look at the servers without an agent that are closed until they were searched; open those that may."""
    waiting = [
        server
        for server in manager.servers()
        if server["drained"]
        and not server["watched"]
        and is_unsearched(Drained(server["server_name"], 0.0, server["drain_reason"]))
    ]
    if not waiting:
        return []
    leases, stated = manager.leases(), manager.cluster()["sections"].get("servers", [])
    with_agents = {each["name"] for each in stated if "job_user" in each}
    return [_searched(manager, server, leases, server["server_name"] in with_agents) for server in waiting]


def _searched(
    manager: LeaseService, server: ServerSummary, leases: Iterable[Allocation], has_agent: bool
) -> Action:
    name, began = server["server_name"], time.monotonic()
    try:
        jobs = jobs_on(server, leases, has_agent=has_agent)
        after = manager.searched(name, jobs, age_s=time.monotonic() - began)
    except ResourceManagerError as error:
        return Action("", name, ActionKind.KEPT_CLOSED, f"it cannot be searched from here: {error}")
    except Exception as error:  # the other servers must not wait for this one
        logger.exception("%s cannot be searched", name)
        return Action("", name, ActionKind.KEPT_CLOSED, f"{type(error).__name__}: {error}")
    closed = Drained(name, 0.0, after["drain_reason"])
    if after["drained"] and is_unsearched(closed):
        return Action("", name, ActionKind.KEPT_CLOSED, closed.reason)
    return Action("", name, ActionKind.OPENED, f"every job on it has a lease: {len(jobs)}")


def _end_if_over(manager: LeaseService, entry: Mapping[str, Any]) -> list[Action]:
    """End a quarantined lease of no task if its placed job is known to be over; else leave it."""
    gang = GangJob.of(entry)
    try:
        if gang is None or gang.is_running():
            return []
        manager.require_owner(entry)
        return [end(manager, entry, Outcome.FAILED)]
    except ResourceManagerError as error:  # out of reach from here, or another's
        logger.info("%s stays quarantined: %s", name_in_words(entry), error)
    except Exception:  # the other entries must not wait for this one
        logger.exception("%s stays quarantined", name_in_words(entry))
    return []


def is_overdue(entry: Mapping[str, Any]) -> bool:
    """Return True for a lease that is still there after its preemption: its operator did not end it."""
    if entry["state"] == "WAITING" or entry["preempted_by"] is None:
        return False
    return bool(time.time() > entry["until"] + OPERATOR_TIMEOUT_S)


def _preempt(manager: LeaseService, entry: Mapping[str, Any]) -> Action:
    """End the jobs of a preempted lease and queue its request again, as the operator does."""
    gang = GangJob.of(entry)
    if gang is None:
        return _action(entry, ActionKind.KEPT, "it is held beyond its preemption, and has no job to end")
    manager.require_owner(entry)
    try:
        done = gang.preempt(grace_of(entry), entry["preempt_signal"], STEP_S)
        if done.left:
            raise next(iter(done.left.values()))
        if not done.is_over:
            return _action(entry, ActionKind.KEPT, "its job was told that it is preempted")
        if done.has_succeeded or done.has_failed:
            return _action(entry, ActionKind.KEPT, "its job had ended by itself, which its task will see")
        queued = queue_again(manager, entry, gang)
    except LauncherError as error:
        return _action(entry, ActionKind.KEPT, f"its job may still run: {error}")
    kind = ActionKind.QUEUED_AGAIN if waits_again(entry) else ActionKind.RELEASED
    return _action(entry, kind if queued else ActionKind.GONE_BEFORE, f"it was {entry['reason']}")
