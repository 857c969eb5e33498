"""Recorded events of leases and servers as the changes that they make in a replay."""

from __future__ import annotations

import math
from dataclasses import replace

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    GpuCleaned,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Released,
    Renewed,
    TeamsChanged,
    new_released,
)
from resource_manager.core.lease_limits import LIMITS
from resource_manager.scheduling import lease_steps
from simulator.replay.job_courses import JobCourses
from simulator.replay.workload import ExternalEvent, LeaseChange


def changes_of(event: ExternalEvent, courses: JobCourses, now: float) -> list[Change]:
    """Return the changes that a recorded event makes here; none if it is about what is not so here."""
    match event:
        case Released() | Expired() | MembersReleased() | Renewed() | Quarantined():
            return _lease_changes(event, courses, now)
        case Preempting() if event.preemptor in LIMITS:
            return _lease_changes(event, courses, now)
        case GpuCleaned():
            token = courses.tokens.get(event.fencing_token)
            if token is None or token in courses.cleaned_here or event.node not in courses.cluster.by_name:
                return []
            return [replace(event, fencing_token=token)]
        case Preempting(lease_id=lease_id, preemptor=by):
            lease = courses.cluster.leases.get(lease_id)
            if lease is None or lease.preempted_by or by not in courses.cluster.pending:
                return []
            return [replace(event, fencing_token=lease.fencing_token)]
        case Cancelled(lease_id=lease_id):
            if lease_id in courses.cluster.pending:
                return [event]
            lease = courses.cluster.leases.get(lease_id)
            if lease is None:
                return []
            return [new_released(lease_id, lease.fencing_token, now), *courses.clean_later(lease, now)]
        case TeamsChanged(teams=rules):
            return [TeamsChanged(rules, now)]
    node = getattr(event, "node", None)
    return [event] if node is None or node in courses.cluster.by_name else []


def _lease_changes(event: LeaseChange, courses: JobCourses, now: float) -> list[Change]:
    """Return the changes of an event of a recorded lease, none if no lease follows it."""
    if isinstance(event, Released | Expired | MembersReleased):
        courses.begun_to_end.add(event.fencing_token)
    job_run = courses.job_runs.get(event.lease_id)
    lease = courses.lease(event.lease_id)
    part = None if job_run is None else job_run.follows
    if job_run is None or lease is None or part is None:
        return []
    if part.lease.fencing_token != event.fencing_token:
        return []
    token = lease.fencing_token
    if isinstance(event, Renewed):
        return [replace(event, fencing_token=token, expires_at=math.inf)]
    if isinstance(event, Quarantined | Preempting):
        return [replace(event, fencing_token=token)]
    if not (isinstance(event, Released) and part.waits_again):
        ended: list[Change] = [replace(event, fencing_token=token)]
    elif event.outcome in (Outcome.PREEMPTED, Outcome.IDLE) and lease.preempt_until == math.inf:
        job_run.follows = None  # it was not preempted here: it runs on
        courses.run_on(job_run, lease, lease.granted_at)
        return []
    else:
        there = [name for name in event.failed_nodes if name in courses.cluster.by_name]
        ended = lease_steps.release(
            courses.cluster, lease.lease_id, now, outcome=event.outcome, failed_nodes=there
        )
    is_there = part.lease.members == job_run.members
    return ended if is_there else [*ended, *courses.clean_later(lease, now)]
