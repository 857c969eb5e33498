"""When servers are open to the requests of a replay, by maintenance windows and by failed starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import MAINTENANCE_GUARD_S
from resource_manager.core.models import Request
from resource_manager.scheduling.placement.gang_slots import Prospects, slots
from resource_manager.scheduling.placement.node_masks import areas_of, positions
from resource_manager.scheduling.queue.spans import Span, together
from resource_manager.scheduling.queue.windows import open_spans, reach_of


def first_opening(
    cluster: ClusterState, requests: Iterable[Request], now: float, after: float = -math.inf
) -> float:
    """Return the first of the times of one of these requests, which is later than `after`, or infinity."""
    distinct: dict[object, Request] = {}
    for each in requests:
        own = each.lease_id if each.lease_id in cluster.failed_starts else ""
        distinct[each.shape, reach_of(cluster, each, MAINTENANCE_GUARD_S), own] = each
    times = (openings(cluster, each, now) for each in distinct.values())
    return min((next((at for at in each if at > after), math.inf) for each in times), default=math.inf)


def openings(cluster: ClusterState, request: Request, now: float) -> Iterator[float]:
    """Yield the times from `now` on, ascending, at which servers open that take all members, were they empty.

    One at which more servers open to a request that has enough is among them, since those may be taken.
    """
    spans_of: dict[str, list[Span]] = {}
    usable = Prospects.of(cluster).usable(request)
    for value, area in areas_of(cluster, request).items():
        spans = spans_of[value] = []
        for position in positions(usable & area):
            state = cluster.nodes[position]
            count = slots(state.node, request, state.capacity_without_leases)
            always: Span = (now, math.inf, False, count)
            spans += open_spans(cluster, state.name, request, (always,), MAINTENANCE_GUARD_S)
    return together(spans_of, request.nodes)
