"""When servers are open to the requests of a replay, by maintenance windows and by failed starts."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator

from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import MAINTENANCE_GUARD_S
from resource_manager.core.failed_starts import AVOIDED_S
from resource_manager.core.models import Request
from resource_manager.scheduling.placement.gang_slots import Prospects, members_on
from resource_manager.scheduling.placement.node_masks import areas_of, positions
from resource_manager.scheduling.queue.spans import Span, together
from resource_manager.scheduling.queue.windows import by_windows, open_spans, reach_of


def first_opening(
    cluster: ClusterState, requests: Iterable[Request], now: float, after: float = -math.inf
) -> float:
    """Return the first time after `after` at which servers open to one of these requests, or infinity."""
    distinct: dict[object, Request] = {}
    for each in requests:
        own = each.lease_id if each.lease_id in cluster.failed_starts else ""
        distinct[each.shape, reach_of(cluster, each, MAINTENANCE_GUARD_S), own] = each
    first, until = math.inf, repeats_by(cluster, max(now, after))
    for each in distinct.values():
        first = next((at for at in openings(cluster, each, now, min(first, until)) if at > after), first)
    return first


def repeats_by(cluster: ClusterState, now: float) -> float:
    """Return by when servers have opened, from now on, in all the ways that only come again later."""
    begun = max([now + AVOIDED_S, *(window.end for window in cluster.windows)])
    return begun + math.lcm(*(math.ceil(window.every_s) for window in cluster.windows if window.every_s))


def openings(cluster: ClusterState, request: Request, now: float, until: float) -> Iterator[float]:
    """Yield the times from `now` to `until`, ascending, at which empty servers open that take all members.

    One at which more servers open to a request that has enough is among them, since those may be taken.
    """
    spans_of: dict[str, list[Span]] = {}
    slots = list(Prospects.of(cluster).slots(request))
    if request.lease_id in cluster.failed_starts:  # it may avoid each of them until another time
        groups = [1 << state.index for state in cluster.nodes]
    else:
        under, never_under = by_windows(cluster, cluster.windows)
        groups = [*under, never_under]
    for value, area in areas_of(cluster, request).items():
        spans = spans_of[value] = []
        for mask in groups:
            if count := members_on(mask & area, slots):
                one = cluster.nodes[next(positions(mask))].name
                all_of_it: Span = (now, until, False, count)
                spans += open_spans(cluster, one, request, (all_of_it,), MAINTENANCE_GUARD_S)
    return together(spans_of, request.nodes)
