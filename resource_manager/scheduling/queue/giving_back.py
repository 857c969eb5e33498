"""Leases that are given back before their jobs began: where their requests wait again."""

from __future__ import annotations

import math
from dataclasses import replace

from resource_manager.core.changes import Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.scheduling.queue.runtime_limits import (
    PREEMPTED_AFTER,
    RUNTIME_USED,
    count_of,
    longest_runtime_s,
    whole_limit_s,
)

SOON_S = 60.0
"""Time after its grant within which a lease may be given back for its old place in the queue."""

GIVEN_BACK = "given_back_count"
"""Label of a request: how often its lease was given back before its job began."""


def given_back(cluster: ClusterState, lease: Lease, now: float) -> list[Queued]:
    """Return the change that queues a request again whose lease is given back before its job began.

    That is the caller's word, so the old place is kept once, and soon after the grant; later the request
    waits at the end. It is always kept where the job would run into maintenance. The time for which the lease
    was held counts for its longest runtime: if that is over, the request does not wait again.
    """
    request = lease.request
    labels = dict(request.labels)
    times = count_of(request.labels, GIVEN_BACK)
    keeps_place = maintenance_met(cluster, lease, now) is not None
    if not keeps_place:
        keeps_place = times == 0 and now - lease.granted_at <= SOON_S
        labels[GIVEN_BACK] = str(times + 1)
    longest_s = longest_runtime_s(cluster.ledger, request)
    if longest_s < math.inf:
        used_s = count_of(request.labels, RUNTIME_USED) + math.ceil(now - lease.granted_at)
        if used_s >= longest_s:
            return []
        labels[RUNTIME_USED] = str(used_s)
    if not keeps_place:
        labels.pop(PREEMPTED_AFTER, None)  # it arrives again
    request = replace(request, labels=labels)
    if keeps_place:
        return [Queued(request, lease.arrived_at, lease.sequence, now)]
    return [Queued(request, now, cluster.sequence + 1, now)]


def maintenance_met(cluster: ClusterState, lease: Lease, now: float) -> tuple[float, float] | None:
    """Return begin and end of a window that the job, begun now, would meet, or None.

    One of unknown runtime meets only an open one.
    """
    stated_s = lease.request.expected_runtime_s or 0.0
    runtime_s = min(stated_s, whole_limit_s(cluster.ledger, lease.request))
    nodes = {member.node for member in lease.members}
    crossed = (
        window.crossed(now, runtime_s) for window in cluster.windows if nodes.intersection(window.servers)
    )
    return next(filter(None, crossed), None)
