"""Stored jobs of leases and requests that a commit ends."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.core.changes import Cancelled, Change, Expired, MembersReleased, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import has_stored_job
from resource_manager.storage.jobs import ENDED_S, JobRow, job_name


def ends_of_jobs(cluster: ClusterState, changes: Iterable[Change]) -> list[JobRow]:
    """Return for how long the jobs of leases and requests that these changes end are kept."""
    ended: dict[str, None] = {}
    for change in changes:
        if isinstance(change, Queued):  # it waits again
            ended.pop(change.request.lease_id, None)
        elif isinstance(change, Released | Expired | Cancelled | MembersReleased):
            entry = cluster.leases.get(change.lease_id) or cluster.pending.get(change.lease_id)
            if entry is not None and has_stored_job(entry.request.labels):
                ended[change.lease_id] = None
    return [JobRow(job_name(lease_id), "", "", ENDED_S) for lease_id in ended]
