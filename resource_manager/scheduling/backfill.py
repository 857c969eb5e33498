"""Reservations: planned starts of pending requests, which later requests that start now must not delay."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Callable, Iterator

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.fit import (
    FreeCapacity,
    accepted_gpu_ids,
    pick_gpus,
)
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.runtime_history import RuntimeOf, stated_runtime

MAX_RESERVATIONS = 32
"""Maximum number of requests with a reservation; once it is reached, no later request may overtake."""


class Reservations:
    """Free capacity of each node from now on, by the runtimes of leases and of reserved requests.

    An unknown runtime is infinite. A lease past its expected end is assumed to end at any moment.
    """

    def __init__(self, cluster: ClusterState, now: float, runtime_of: RuntimeOf = stated_runtime) -> None:
        self._cluster = cluster
        self._now = now
        self._runtime_of = runtime_of
        self._count = 0
        self._timelines: dict[str, _Timeline] = {}

    def reserve(self, request: Request) -> bool:
        """Reserve the earliest start that delays no earlier reservation.

        Returns False if none is known or `MAX_RESERVATIONS` is reached.
        """
        if self._count == MAX_RESERVATIONS:
            return False
        start, best = math.inf, None
        runtime_s = self._runtime_s(request)
        for node in self._cluster.nodes:
            if not node.is_open or request.required_node not in (None, node.name):
                continue
            at = self._timeline(node).earliest(request, runtime_s, start)
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

    def started(self, request: Request, placement: Placement) -> None:
        """Record a request that starts now."""
        timeline = self._timeline(self._cluster.by_name[placement.node])
        timeline.occupy(request, placement.gpu_ids, self._now, self._now + self._runtime_s(request))

    def without_delay(self, request: Request, placement: Placement) -> Placement | None:
        """Return the placement, or another one for now, that delays no reservation; None if there is none."""
        wanted = self._cluster.by_name[placement.node]
        end = self._now + self._runtime_s(request)
        for node in (wanted, *self._cluster.candidates(request)):
            timeline = self._timeline(node)
            # Intersect with what is free now: a lease past its expected end is still allocated.
            free = timeline.least_free(self._now, end).intersect(node.capacity)
            gpu_ids = timeline.pick_gpus(request, free)
            if gpu_ids is None:
                continue
            if node is wanted and all(free.gpus[gpu_id] >= request.gpu_milli for gpu_id in placement.gpu_ids):
                return placement
            return Placement(node.name, gpu_ids)
        return None

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
            self.occupy(lease.request, node.gpu_ids_of(lease.placement), now, end)

    def occupy(self, request: Request, gpu_ids: tuple[int, ...], start: float, end: float) -> None:
        """Allocate the request from start to end."""
        for place in range(self._cut(start), self._cut(end) if end < math.inf else len(self._times)):
            self._free[place] = self._free[place].minus(request, gpu_ids)

    def earliest(self, request: Request, runtime_s: float, before: float) -> float:
        """Return the first time before `before` from which the request fits for its runtime, or infinity."""
        if self._accepted_gpus(request) is None:
            return math.inf
        for start in self._times:
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
