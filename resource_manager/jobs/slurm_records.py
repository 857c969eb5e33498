"""Jobs on Slurm for those who list them, and the end of those whose tasks have ended."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import closing

from resource_manager.core.models import JobPlace
from resource_manager.errors import InvalidRequestError
from resource_manager.jobs.launchers import LauncherError, NoAnswerError
from resource_manager.jobs.launchers.slurm import SlurmLauncher
from resource_manager.jobs.reconcile import Action, ActionKind, TaskStates
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.slurm_jobs import is_live

KEPT_S = 30 * 86_400.0
"""Time for which jobs that have ended are told of."""

COLLECTABLE_S = 86_400.0
"""Time from a job's end for which it waits for a clear of its task, which goes on with it."""

MAX_REMOVED = 50
"""Jobs whose files are removed at once: there may be hundreds, and who ends live jobs comes again soon."""


def publish(launcher: SlurmLauncher, manager: LeaseService) -> None:
    """Let the manager know of the jobs; raises `LauncherError` or what the manager raises."""
    found = launcher.read_all({}, since=time.time() - KEPT_S)
    manager.keep_slurm_jobs(found.cluster, found.records)


def end_left_behind(manager: LeaseService, states: TaskStates, instance: str) -> list[Action]:
    """End the jobs on Slurm of the Airflow with this id whose tasks have ended; remove old ones' files.

    What the manager was told of jobs is any caller's word: the login node says which there are, and of whom.
    """
    actions = []
    known = manager.slurm_jobs()
    for conn_id in {job["conn_id"] for job in _left_behind(known, states, instance)}:
        kept = ""
        try:
            with closing(SlurmLauncher(JobPlace("slurm", "", conn_id))) as launcher:
                here = launcher.read_all({}, since=time.time() - KEPT_S).records
                left = sorted(_left_behind(here, states, instance), key=is_live, reverse=True)
                for job in left[: MAX_REMOVED + sum(map(is_live, left))]:
                    # Those before may have taken minutes: its task may have been cleared meanwhile.
                    if _left_behind([job], states, instance):
                        actions.append(_end(launcher, job))
                if {job["key"] for job in here}.isdisjoint(job["key"] for job in known):
                    # Another account has a folder of its own: its list would take the place of theirs.
                    kept = "none of its jobs is in this account's folder: run as the user that submits them"
                else:
                    publish(launcher, manager)
        except InvalidRequestError as error:  # of `publish`, as by other clusters that callers told of
            kept = f"its jobs in the list of jobs are not up to date: {error}"
        except LauncherError as error:
            kept = f"its jobs may still run: {error}"
        if kept:
            actions.append(Action("", conn_id or "Slurm", ActionKind.KEPT, kept))
    return actions


def _end(launcher: SlurmLauncher, job: SlurmJob) -> Action:
    """End a job or remove its files; the action says why not, such as a node that is down."""
    what = f"{'job' if is_live(job) else 'files of job'} {job['id']} on Slurm"
    try:
        launcher.stop(job["key"])
    except NoAnswerError:  # the others would wait as long in vain
        raise
    except LauncherError as error:
        return Action(job["task_id"], job["task_id"], ActionKind.KEPT, f"{what}: {error}")
    return Action(job["task_id"], job["task_id"], ActionKind.STOPPED, f"{what}, as its task has ended")


def _left_behind(jobs: Sequence[SlurmJob], states: TaskStates, instance: str) -> list[SlurmJob]:
    """Return the jobs of tasks of that Airflow which have ended: live ones, and old ones nobody collects."""
    oldest = time.time() - COLLECTABLE_S
    there = [
        (identity, job)
        for job in jobs
        if (job["ended_at"] is None or (job.get("uncollected") and job["ended_at"] < oldest))
        and (identity := TaskIdentity.from_labels(job["labels"])) is not None
        and identity.instance == instance
    ]
    unfinished = states.unfinished({identity for identity, _ in there})
    return [job for identity, job in there if identity not in unfinished]
