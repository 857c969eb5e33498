"""Reservations: planned starts of pending requests, which later requests that start now must not delay."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from functools import partial

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.fit import (
    FreeCapacity,
    accepted_gpu_ids,
    fits,
    pick_gpus,
)
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.gangs import Members, Part, plan, positions, ranked, slots
from resource_manager.scheduling.maintenance import MAX_OCCURRENCES, horizon_s, is_restricted, opens_at
from resource_manager.scheduling.queue_order import MAINTENANCE_GUARD_S
from resource_manager.scheduling.runtime_history import RuntimeOf, stated_runtime

Span = tuple[float, float, bool, int]
"""Starts of members of a gang: begin, end, True if the end is one too, and the most members."""

MAX_RESERVATIONS = 32
"""Maximum number of requests with a reservation; once it is reached, no later request may overtake."""


class Reservations:
    """Free capacity of each node from now on, by the runtimes of leases and of reserved requests.

    An unknown runtime is infinite, and `guard_s` before a maintenance window: none of those that start cross
    one. A lease past its expected end is assumed to end at any moment.
    """

    def __init__(
        self,
        cluster: ClusterState,
        now: float,
        runtime_of: RuntimeOf = stated_runtime,
        guard_s: float = MAINTENANCE_GUARD_S,
    ) -> None:
        self._cluster = cluster
        self._now = now
        self._runtime_of = runtime_of
        self._guard_s = guard_s
        self._count = 0
        self._timelines: dict[str, _Timeline] = {}

    def reserve(self, request: Request) -> bool:
        """Reserve the earliest start that delays no earlier reservation.

        Returns False if none is known or `MAX_RESERVATIONS` is reached.
        """
        if self._count == MAX_RESERVATIONS:
            return False
        if request.nodes != 1:
            return self._reserve_gang(request)
        start, best = math.inf, None
        runtime_s = self._runtime_s(request)
        for node in self._cluster.nodes:
            if not node.is_open or request.required_node not in (None, node.name):
                continue
            at = self._timeline(node).earliest(request, runtime_s, start, self._opening(node, request))
            if at < start:
                start, best = at, node
                if start == self._now:
                    break
        if best is None:
            return False
        timeline = self._timeline(best)
        end = start + runtime_s
        gpu_ids = timeline.pick_gpus(request, timeline.least_free(start, end))
        timeline.occupy(request, gpu_ids or (), start, end)
        self._count += 1
        return True

    def _reserve_gang(self, request: Request) -> bool:
        """Reserve nodes for all members at the first time at which they are free together for the runtime."""
        runtime_s = self._runtime_s(request)
        for start in self._gang_starts(request, runtime_s):
            free = partial(self._free, start, start + runtime_s)

            def slots_of(
                node: NodeState, start: float = start, free: Callable[[NodeState], FreeCapacity] = free
            ) -> int:
                return self._is_open_at(node, request, start) and slots(node.node, request, free(node))

            parts = plan(self._cluster, request, slots_of=slots_of)
            if parts:
                for member in self._fill(request, parts, free):
                    timeline = self._timeline(self._cluster.by_name[member.node])
                    timeline.occupy(request, member.gpu_ids, start, start + runtime_s)
                self._count += 1
                return True
        return False

    def _free(self, start: float, end: float, node: NodeState) -> FreeCapacity:
        return self._timeline(node).least_free(start, end)

    def _opening(self, node: NodeState, request: Request) -> Callable[[float], float] | None:
        """Return the function (time) -> when the node is first open to the request; None if it always is."""
        if request.lease_id not in self._cluster.failed_starts and not any(
            node.name in window.servers for window in self._cluster.windows
        ):
            return None
        return lambda at: opens_at(self._cluster, node.name, request, at, self._runtime_of, self._guard_s)

    def _is_open_at(self, node: NodeState, request: Request, at: float) -> bool:
        opening = self._opening(node, request)
        return opening is None or opening(at) == at

    def _gang_starts(self, request: Request, runtime_s: float) -> Iterator[float]:
        """Yield the times, ascending, at which enough nodes of one domain may be free for the runtime.

        A sweep over the events of all nodes: each adds the members that it takes from a time on, and takes
        them back where its free time has become too short.
        """
        events: list[tuple[float, int, str, int]] = []
        for node in self._cluster.nodes:
            if not node.is_open or not node.node.address or request.required_node not in (None, node.name):
                continue
            domain = node.node.labels.get(request.same) if request.same else ""
            if domain is None:
                continue
            spans = self._timeline(node).gang_starts(request, runtime_s)
            if is_restricted(self._cluster, request):
                spans = self._outside_of_windows(node, request, spans)
            for begin, end, is_at_end, count in spans:
                events.append((begin, 0, domain, count))
                if end < math.inf:
                    events.append((end, int(is_at_end), domain, -count))
        events.sort()
        count_of: dict[str, int] = {}
        enough: set[str] = set()
        for place, (at, phase, domain, count) in enumerate(events):
            count_of[domain] = count_of.get(domain, 0) + count
            (enough.add if count_of[domain] >= request.nodes else enough.discard)(domain)
            following = events[place + 1][:2] if place + 1 < len(events) else None
            if enough and phase == 0 and following != (at, 0):
                yield at

    def _outside_of_windows(self, node: NodeState, request: Request, spans: Iterator[Span]) -> Iterator[Span]:
        """Yield the parts of spans of starts in which the node is open to the request."""
        held = [
            (window, horizon_s(self._cluster, request, window, self._runtime_of, self._guard_s))
            for window in self._cluster.windows
            if node.name in window.servers
        ]
        for begin, end, is_at_end, count in spans:
            for _ in range(MAX_OCCURRENCES):
                begin = opens_at(self._cluster, node.name, request, begin, self._runtime_of, self._guard_s)
                if begin > end or begin == math.inf or (begin == end and not is_at_end):
                    break
                comes = (window.occurrence(begin) for window, _ in held)
                lasts = [
                    found[0] - length_s for found, (_, length_s) in zip(comes, held, strict=True) if found
                ]
                last = min(lasts, default=math.inf)
                if last >= end:
                    yield begin, end, is_at_end, count
                    break
                yield begin, last, True, count
                begin = math.nextafter(last, math.inf)

    def _fill(
        self, request: Request, parts: Iterable[Part], free_of: Callable[[NodeState], FreeCapacity]
    ) -> list[Placement]:
        """Return a placement for each member on the nodes of the parts, in inventory order."""
        found: list[Placement] = []
        for mask, count in parts:
            wanted = len(found) + count
            for position in positions(mask):
                node = self._cluster.nodes[position]
                free = free_of(node)
                for _ in range(min(slots(node.node, request, free), wanted - len(found))):
                    gpu_ids = self._timeline(node).pick_gpus(request, free) or ()
                    found.append(Placement(node.name, gpu_ids))
                    free = free.minus(request, gpu_ids)
                if len(found) == wanted:
                    break
        return found

    def started(self, request: Request, members: Members) -> None:
        """Record a request that starts now."""
        end = self._now + self._runtime_s(request)
        for member in members:
            timeline = self._timeline(self._cluster.by_name[member.node])
            timeline.occupy(request, member.gpu_ids, self._now, end)

    def without_delay(self, request: Request, members: Members) -> Members | None:
        """Return the placements, or others for now, that delay no reservation; None if there are none."""
        end = self._now + self._runtime_s(request)

        def free_of(node: NodeState) -> FreeCapacity:
            # Intersect with what is free now: a lease past its expected end is still allocated.
            return self._timeline(node).least_free(self._now, end).intersect(node.capacity)

        if request.nodes != 1:
            return self._gang_without_delay(request, members, free_of)
        placement = members[0]
        wanted = self._cluster.by_name[placement.node]
        for node in (wanted, *self._cluster.candidates(request)):
            if not self._is_open_at(node, request, self._now):
                continue
            free = free_of(node)
            gpu_ids = self._timeline(node).pick_gpus(request, free)
            if gpu_ids is None:
                continue
            if node is wanted and all(free.gpus[gpu_id] >= request.gpu_milli for gpu_id in placement.gpu_ids):
                return members
            return (Placement(node.name, gpu_ids),)
        return None

    def _gang_without_delay(
        self, request: Request, members: Members, free_of: Callable[[NodeState], FreeCapacity]
    ) -> Members | None:
        left: dict[str, FreeCapacity] = {}
        for member in members:
            free = left.get(member.node) or free_of(self._cluster.by_name[member.node])
            left[member.node] = free.minus(request, member.gpu_ids)
        if all(min((*free.gpus.values(), *free.amounts.values()), default=0) >= 0 for free in left.values()):
            return members

        def slots_of(node: NodeState) -> int:
            return self._is_open_at(node, request, self._now) and slots(node.node, request, free_of(node))

        parts = plan(self._cluster, request, slots_of=slots_of)
        return ranked(self._cluster, request, self._fill(request, parts, free_of)) if parts else None

    def _timeline(self, node: NodeState) -> _Timeline:
        timeline = self._timelines.get(node.name)
        if timeline is None:
            timeline = self._timelines[node.name] = _Timeline(node, self._now, self._runtime_s)
        return timeline

    def _runtime_s(self, request: Request) -> float:
        runtime = self._runtime_of(request)
        return math.inf if runtime is None else runtime.seconds


class _Timeline:
    """Free capacity of one node over time, one entry for each span between two times, the last endless."""

    def __init__(self, node: NodeState, now: float, runtime_s: Callable[[Request], float]) -> None:
        self._node = node
        self._accepted: dict[tuple[object, ...], set[int] | None] = {}
        self._times = [now]
        self._free = [node.capacity_without_leases]
        for lease in node.leases.values():
            end = max(lease.granted_at + runtime_s(lease.request), now)
            for member in lease.on(node.name):
                self.occupy(lease.request, node.gpu_ids_of(member), now, end)

    def gang_starts(self, request: Request, runtime_s: float) -> Iterator[tuple[float, float, bool, int]]:
        """Yield spans of starts from which members of the gang fit for the runtime, and the most that do.

        A span is its begin, its end, and True if a start at its end is possible too.
        """
        if self._accepted_gpus(request) is None:
            return
        node, times = self._node.node, self._times
        for place, begin in enumerate(times):
            count = slots(node, request, self.least_free(begin, begin + runtime_s))
            if not count:
                continue
            following = times[place + 1] if place + 1 < len(times) else math.inf
            least, until = self._free[place], math.inf
            for later in range(place + 1, len(times)):
                least = least.intersect(self._free[later])
                if not fits(node, request, least):
                    until = times[later]
                    break
            last = until - runtime_s
            yield (begin, last, True, count) if last < following else (begin, following, False, count)

    def occupy(self, request: Request, gpu_ids: tuple[int, ...], start: float, end: float) -> None:
        """Allocate the request from start to end."""
        for place in range(self._cut(start), self._cut(end) if end < math.inf else len(self._times)):
            self._free[place] = self._free[place].minus(request, gpu_ids)

    def earliest(
        self,
        request: Request,
        runtime_s: float,
        before: float,
        opening: Callable[[float], float] | None = None,
    ) -> float:
        """Return the first time before `before` from which the request fits for its runtime, or infinity.

        `opening` maps a time to the first one from then on at which it may start.
        """
        if self._accepted_gpus(request) is None:
            return math.inf
        for start in self._times:
            if opening is not None:
                start = opening(start)
            if start >= before:
                break
            least: FreeCapacity | None = None
            for free in self._between(start, start + runtime_s):
                least = free if least is None else least.intersect(free)
                if self.pick_gpus(request, least) is None:
                    break
            else:
                return start
        return math.inf

    def least_free(self, start: float, end: float) -> FreeCapacity:
        """Return what is free at every moment from start to end, both at or after the first time."""
        spans = self._between(start, end)
        least = next(spans)
        for free in spans:
            least = least.intersect(free)
        return least

    def pick_gpus(self, request: Request, free: FreeCapacity) -> tuple[int, ...] | None:
        """Return the lowest GPUs that fit the request, for a fraction the tightest one; None if none fit."""
        for name, amount in request.resources.items():
            if free.amounts.get(name, 0) < amount:
                return None
        accepted = self._accepted_gpus(request)
        if accepted is None:
            return None
        milli = request.gpu_milli
        usable = [gpu_id for gpu_id, free in free.gpus.items() if free >= milli and gpu_id in accepted]
        return pick_gpus(request, usable, free.gpus) if len(usable) >= request.gpus else None

    def _accepted_gpus(self, request: Request) -> set[int] | None:
        """Return the GPUs whose type and vendor the request accepts; None if it never fits the node."""
        if request.shape not in self._accepted:
            node = self._node.node
            fits = self._node.could_fit(request)
            self._accepted[request.shape] = accepted_gpu_ids(node, request) if fits else None
        return self._accepted[request.shape]

    def _between(self, start: float, end: float) -> Iterator[FreeCapacity]:
        place = bisect_left(self._times, start)
        if place == len(self._times) or self._times[place] != start:
            place -= 1
        yield self._free[place]
        for later in range(place + 1, len(self._times)):
            if self._times[later] >= end:
                return
            yield self._free[later]

    def _cut(self, time: float) -> int:
        """Return the index of the span that begins at that time, after splitting one if needed."""
        place = bisect_left(self._times, time)
        if place == len(self._times) or self._times[place] != time:
            self._times.insert(place, time)
            self._free.insert(place, self._free[place - 1])
        return place
