"""Stored jobs and orders of leases and requests that a commit ends."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.core.changes import ENDS, Cancelled, Change, Granted, MembersReleased, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import job_key
from resource_manager.core.models import Lease, has_stored_job
from resource_manager.storage.jobs import ENDED_S, JobRow, job_name, order_name


def is_on_agents(lease: Lease) -> bool:
    """Return whether a job of a lease was placed with an agent."""
    return any(place.launcher == "agent" for place in lease.places)


def ends_of_jobs(cluster: ClusterState, changes: Iterable[Change]) -> list[JobRow]:
    """Return for how long the jobs of leases and requests that these changes end are kept, and the orders.

    The end of a gang's remainder is no end of a stored job where its id waits or has a lease again, which has
    another one. Orders are of the jobs of one lease, and of one member.
    """
    ended: dict[str, None] = {}
    orders: list[str] = []
    granted: dict[str, Lease] = {}
    for change in changes:
        if isinstance(change, Queued):  # it waits again
            ended.pop(change.request.lease_id, None)
        elif isinstance(change, Granted):
            lease_id = change.lease.request.lease_id
            granted[lease_id] = change.lease
            ended.pop(lease_id, None)
        elif isinstance(change, Cancelled):
            pending = cluster.pending.get(change.lease_id)
            if pending is not None and has_stored_job(pending.request.labels):
                ended[change.lease_id] = None
        elif isinstance(change, ENDS):
            lease_id, token = change.lease_id, change.fencing_token
            newest = granted.get(lease_id) or cluster.leases.get(lease_id)
            is_newest = newest is not None and newest.fencing_token == token
            lease = newest if is_newest else cluster.holding(lease_id, token)
            if lease is None:
                continue
            has_another = not is_newest and (newest is not None or lease_id in cluster.pending)
            if has_stored_job(lease.request.labels) and not has_another:
                ended[lease_id] = None
            if is_on_agents(lease):
                ranks = [rank for rank, _ in lease.ranked]
                ended_ranks = change.ranks if isinstance(change, MembersReleased) else ranks
                orders += (job_key(lease_id, token, rank, lease.request.nodes) for rank in ended_ranks)
    rows = [JobRow(job_name(name), "", "", ENDED_S) for name in ended]
    return rows + [JobRow(order_name(key), "", "", 0.0) for key in orders]
