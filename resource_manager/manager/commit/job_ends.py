"""Stored jobs and orders of leases and requests that a commit ends."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Granted,
    MembersReleased,
    Queued,
    Released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.identifiers import job_key
from resource_manager.core.models import Lease, has_stored_job
from resource_manager.storage.jobs import ENDED_S, JobRow, job_name, order_name


def is_on_agents(lease: Lease) -> bool:
    """Return whether a job of a lease was placed with an agent."""
    return any(place.launcher == "agent" for place in lease.places)


def ends_of_jobs(cluster: ClusterState, changes: Iterable[Change]) -> list[JobRow]:
    """Return for how long the jobs of leases and requests that these changes end are kept, and the orders.

    The end of a gang's remainder is none where its id waits or has a lease again, which has another job.
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
        elif isinstance(change, Released | Expired | MembersReleased):
            lease = granted.get(change.lease_id) or cluster.leases.get(change.lease_id)
            if lease is None and change.lease_id not in cluster.pending:
                lease = cluster.holding(change.lease_id, change.fencing_token)
            is_its_own = lease is not None and lease.fencing_token == change.fencing_token
            if lease is None or not is_its_own:
                continue
            if has_stored_job(lease.request.labels):
                ended[change.lease_id] = None
            elif not isinstance(change, MembersReleased) and is_on_agents(lease):
                id_and_token = lease.lease_id, lease.fencing_token
                orders += (job_key(*id_and_token, rank, lease.request.nodes) for rank, _ in lease.ranked)
    rows = [JobRow(job_name(name), "", "", ENDED_S) for name in ended]
    return rows + [JobRow(order_name(key), "", "", 0.0) for key in orders]
