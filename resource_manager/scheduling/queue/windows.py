"""Maintenance windows in scheduling: the servers that a request may not start on now, and since when it may.

A request crosses a window if its runtime, stated or learnt, reaches into it, or its limit if that is shorter.
An unknown runtime is taken to be `maintenance_guard_s`, or to end at the begin of a window that preempts it.
A TTL tells nothing. Servers on which its job has just failed to start are closed to a request the same way.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager

from resource_manager.core.changes import Preempting, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.failed_starts import avoided_until
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Lease, Request, has_stored_job
from resource_manager.core.node_state import ClosedToRequest
from resource_manager.core.server_facts import InWindow, StartFailed
from resource_manager.scheduling.placement.gang_slots import Prospects, could_ever_take, members_on
from resource_manager.scheduling.placement.gangs import Members, select_members
from resource_manager.scheduling.placement.node_masks import areas_of, positions, union
from resource_manager.scheduling.queue.runtime_limits import whole_limit_s
from resource_manager.scheduling.queue.spans import Span, together
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_OCCURRENCES = 100
"""Maximum number of windows in a row after which a start is looked for."""


def reach_of(cluster: ClusterState, request: Request, guard_s: float) -> tuple[float, bool]:
    """Return how far from its start the request reaches, and whether what preempts it may begin before.

    Its limit counts in full: less what it used up before it was given back, it would be granted where it
    begins too late, and given back, again and again.
    """
    runtime = cluster.runtimes.runtime_of(request)
    reach_s = min(guard_s if runtime is None else runtime, whole_limit_s(cluster.ledger, request))
    return reach_s, runtime is None and request.preemptible


def horizon_s(cluster: ClusterState, request: Request, window: Window, guard_s: float) -> float:
    """Return for how long from its start the request must not meet the window."""
    reach_s, may_be_ended = reach_of(cluster, request, guard_s)
    return 0.0 if may_be_ended and preempts(cluster, window) else reach_s


def preempts(cluster: ClusterState, window: Window) -> bool:
    """Return True if the window ends what runs at its begin: it says so, and the teams allow preemption."""
    return window.preempt and cluster.teams.preemption


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


def opens_at(cluster: ClusterState, node: str, request: Request, at: float, guard_s: float) -> float:
    """Return the first time from `at` on at which neither windows nor a failed start close the node to it."""
    held = _horizons(cluster, node, request, guard_s)
    if not held and request.lease_id not in cluster.failed_starts:
        return at
    for _ in range(MAX_OCCURRENCES):
        crossed = [
            (window, length_s, found) for window, length_s in held if (found := window.crossed(at, length_s))
        ]
        if any(window.crossed(found[1], length_s) for window, length_s, found in crossed):
            return math.inf  # it comes again too soon, always
        ends = [end for _, _, (_, end) in crossed]
        if (failed := avoided(cluster, request, at).get(node)) is not None:
            ends.append(avoided_until(failed))
        if not ends:
            return at
        at = max(ends)
    return math.inf


def by_windows(cluster: ClusterState, windows: Iterable[Window]) -> tuple[list[int], int]:
    """Return masks of the nodes under the same of these windows, and that of the nodes under none."""
    of_node: dict[str, list[int]] = {}
    for window in windows:
        for name in window.servers:
            of_node.setdefault(name, []).append(window.window_id)
    masks: dict[tuple[int, ...], int] = {}
    for name, ids in of_node.items():
        if (state := cluster.by_name.get(name)) is not None:
            masks[tuple(ids)] = masks.get(tuple(ids), 0) | 1 << state.index
    under = list(masks.values())
    return under, (1 << len(cluster.nodes)) - 1 & ~union(under)


class Outlook:
    """Where requests could ever start, as windows that come again close some nodes for good; of one pass."""

    def __init__(self, cluster: ClusterState, current: SchedulingPass) -> None:
        self._cluster, self._now = cluster, current.now
        self._guard_s = current.limits.maintenance_guard_s
        self._windows = [window for window in cluster.windows if window.every_s is not None]
        self._prospects = Prospects.of(cluster)
        self._under, self._never_under = by_windows(cluster, self._windows)
        """Masks of the nodes under the same windows that come again, and of those under none."""
        self._masks: dict[tuple[float, bool], int] = {}
        """By how far requests reach."""
        self._spans: dict[tuple[float, bool, int], list[Span]] = {}
        """By how far requests reach and nodes under the same windows, of one member."""
        self._usable: dict[tuple[object, ...], int] = {}

    def usable(self, request: Request) -> int:
        """Return the mask of the open nodes that could ever take members of the request, if they take all."""
        if not self._windows:
            return self._prospects.usable(request)
        reach = reach_of(self._cluster, request, self._guard_s)
        key = request.shape, reach
        if (found := self._usable.get(key)) is None:
            if reach not in self._masks:
                self._masks[reach] = ~self._closed_for_good(request)
            found = self._prospects.usable_of(request, self._masks[reach])
            if found and request.nodes > 1:
                found = self._ever_together(request, found, reach)
            self._usable[key] = found
        return found

    def waits_for(self, request: Request) -> set[int]:
        """Return the masks that the request waits for: what it could use, also without any window."""
        return {self.usable(request), self._prospects.usable(request)}

    def _closed_for_good(self, request: Request) -> int:
        return union(
            mask
            for mask in self._under
            if opens_at(self._cluster, self._one_of(mask), request, self._now, self._guard_s) == math.inf
        )

    def _one_of(self, mask: int) -> str:
        return self._cluster.nodes[next(positions(mask))].name

    def _ever_together(self, request: Request, usable: int, reach: tuple[float, bool]) -> int:
        """Return those of the nodes in whose domain the windows leave a time for all members to start."""
        slots, found = list(self._prospects.slots(request)), 0
        for area in (each & usable for each in areas_of(self._cluster, request).values()):
            counts = {mask: members_on(mask & area, slots) for mask in (self._never_under, *self._under)}
            if any(count >= request.nodes for count in counts.values()):
                found |= area  # also those that open alone, as nearly always
                continue
            always: Span = (self._now, math.inf, False, counts.pop(self._never_under))
            opens = [
                (begin, end, is_at_end, count)
                for mask, count in counts.items()
                if count
                for begin, end, is_at_end, _ in self._spans_of(mask, request, reach)
            ]
            if any(True for _ in together({"": [always, *opens]}, request.nodes)):
                found |= area
        return found

    def _spans_of(self, mask: int, request: Request, reach: tuple[float, bool]) -> list[Span]:
        """Return when nodes under the same windows are open to requests that reach so far."""
        spans = self._spans.get((*reach, mask))
        if spans is None:
            always: Span = (self._now, math.inf, False, 1)
            found = open_spans(self._cluster, self._one_of(mask), request, [always], self._guard_s)
            spans = self._spans[*reach, mask] = list(found)
        return spans


def opening_of(
    cluster: ClusterState, node: str, request: Request, guard_s: float
) -> Callable[[float], float] | None:
    """Return the function (time) -> when the node is first open to the request; None if it always is."""
    if request.lease_id not in cluster.failed_starts and not any(
        node in window.servers for window in cluster.windows
    ):
        return None
    return lambda at: opens_at(cluster, node, request, at, guard_s)


def open_spans(
    cluster: ClusterState, node: str, request: Request, spans: Iterable[Span], guard_s: float
) -> Iterator[Span]:
    """Yield the parts of spans of starts in which the node is open to the request."""
    held = _horizons(cluster, node, request, guard_s)
    for begin, end, is_at_end, count in spans:
        for _ in range(MAX_OCCURRENCES):
            begin = opens_at(cluster, node, request, begin, guard_s)
            if begin > end or begin == math.inf or (begin == end and not is_at_end):
                break
            comes = (window.occurrence(begin) for window, _ in held)
            lasts = [found[0] - length_s for found, (_, length_s) in zip(comes, held, strict=True) if found]
            last = min(lasts, default=math.inf)
            if last >= end:
                yield begin, end, is_at_end, count
                break
            yield begin, last, True, count
            begin = math.nextafter(last, math.inf)


def _horizons(
    cluster: ClusterState, node: str, request: Request, guard_s: float
) -> list[tuple[Window, float]]:
    """Return the windows of the node, each with for how long from its start the request must not meet it."""
    return [
        (window, horizon_s(cluster, request, window, guard_s))
        for window in cluster.windows
        if node in window.servers
    ]


def ending(cluster: ClusterState, now: float) -> list[Preempting]:
    """Return the preemption of every preemptible lease that still runs in a window that preempts."""
    found: dict[str, Preempting] = {}
    for window in cluster.windows:
        if not (window.is_open(now) and preempts(cluster, window)):
            continue
        for lease in running(cluster, window):
            can_end = not lease.quarantined or is_of_agents(lease)
            if lease.request.preemptible and can_end and not lease.preempted_by:
                until = now + lease.request.preempt_grace_s
                change = Preempting(lease.lease_id, lease.fencing_token, window.preemptor, until, now)
                found.setdefault(lease.lease_id, change)
    return list(found.values())


def is_of_agents(lease: Lease) -> bool:
    """Return whether agents run all jobs of a lease, which tell and end them also if nobody renews it."""
    is_whole = bool(lease.places) and not (lease.revoked or lease.ranks)
    return is_whole and all(place.launcher == "agent" for place in lease.places)


def running(cluster: ClusterState, window: Window) -> list[Lease]:
    """Return the leases on the window's servers, by id."""
    states = (cluster.by_name[name] for name in window.servers if name in cluster.by_name)
    found = {lease_id: lease for state in states for lease_id, lease in state.leases.items()}
    return [lease for _, lease in sorted(found.items())]


def under_maintenance(cluster: ClusterState, now: float) -> list[Lease]:
    """Return the leases that still run on servers of open windows."""
    open_windows = (window for window in cluster.windows if window.is_open(now))
    return list({lease.key: lease for window in open_windows for lease in running(cluster, window)}.values())


def is_restricted(cluster: ClusterState, request: Request) -> bool:
    """Return True if servers may be closed to the request alone, by windows or by a failed start."""
    return bool(cluster.windows) or request.lease_id in cluster.failed_starts


@contextmanager
def closed_for(cluster: ClusterState, request: Request, current: SchedulingPass) -> Iterator[None]:
    """Close, inside, the servers that the request avoids, or whose windows it would cross, starting now."""
    closed = {
        node: ClosedToRequest(
            node, failed.at, why=StartFailed(failed.at, failed.reason, avoided_until(failed))
        )
        for node, failed in avoided(cluster, request, current.now).items()
    }
    for window in cluster.windows:
        length_s = horizon_s(cluster, request, window, current.limits.maintenance_guard_s)
        if found := window.crossed(current.now, length_s):
            is_too_often = window.crossed(window.end, length_s) is not None
            is_assumed = is_too_often and cluster.runtimes.runtime_of(request) is None
            why = InWindow(*found, window.reason, is_too_often, is_assumed)
            for name in window.servers:
                closed.setdefault(name, ClosedToRequest(name, found[0], why=why))
    if not closed:
        yield
        return
    with cluster.trial():
        for drained in closed.values():
            cluster.suppose_closed(drained)
        yield


def place_now(cluster: ClusterState, request: Request, current: SchedulingPass) -> Members | None:
    """Return the placements of all members on servers that are open to them, as `select_members`.

    There are none while grants are suspended.
    """
    if current.suspended is not None:
        return None
    if not is_restricted(cluster, request):
        return select_members(cluster, request, current.policy)
    with closed_for(cluster, request, current):
        return select_members(cluster, request, current.policy)
