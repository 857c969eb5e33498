"""Avoidance of nodes on which a request's job has just failed to start, while it could run elsewhere."""

from __future__ import annotations

from resource_manager.core.changes import Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import avoided_until
from resource_manager.core.models import Request, has_stored_job
from resource_manager.scheduling.placement.gang_slots import could_ever_take


def avoided(cluster: ClusterState, request: Request, at: float) -> dict[str, Released]:
    """Return the nodes on which the request is not placed at that time, each with its last failed start.

    There are none if the inventory could never satisfy the request without them, and somebody counts its
    tries: that of a stored job would be granted again and again.
    """
    entries = cluster.failed_starts.get(request.lease_id, ())
    found = {node: entry for entry in entries if at < avoided_until(entry) for node in entry.failed_nodes}
    if not found or has_stored_job(request.labels) or could_ever_take(cluster, request, without=found):
        return found
    return {}
