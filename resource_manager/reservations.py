"""Places in time for requests that wait, so that others may start before them without delaying any."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from resource_manager.cluster import ClusterState, NodeState
from resource_manager.models import MILLI_PER_GPU, Placement, Request

MAX_RESERVATIONS = 32
"""So many requests that do not fit get a place in time; whoever comes after them does not overtake."""


@dataclass(frozen=True, slots=True)
class Hold:
    """A request on GPUs of a node from `start` to `end`, in seconds of the store's clock."""

    request: Request
    gpu_ids: tuple[int, ...]
    start: float
    end: float


class Reservations:
    """Running leases and reserved starts over time, by each request's `expected_runtime_s`.

    A runtime that is not known is endless. A lease past its expected end is thought to end at any moment.
    """

    def __init__(self, cluster: ClusterState, now: float) -> None:
        self._cluster = cluster
        self._now = now
        self._count = 0
        self._holds: dict[str, list[Hold]] = {node.name: [] for node in cluster.nodes}
        for lease in cluster.leases.values():
            end = max(lease.granted_at + _runtime_s(lease.request), now)
            hold = Hold(lease.request, lease.placement.gpu_ids, -math.inf, end)
            self._holds[lease.placement.node].append(hold)

    def reserve(self, request: Request) -> bool:
        """Gives the request the earliest start that delays nobody; False if there is none to be told."""
        if self._count == MAX_RESERVATIONS:
            return False
        starts = ((self._earliest(node, request), node) for node in self._cluster.nodes if node.is_open)
        start, best = min(starts, key=lambda found: found[0], default=(math.inf, None))
        if best is None or start == math.inf:
            return False
        end = start + _runtime_s(request)
        gpu_ids = self._least_free(best, start, end).pick_gpus(request)
        self._holds[best.name].append(Hold(request, gpu_ids, start, end))
        self._count += 1
        return True

    def started(self, request: Request, placement: Placement) -> None:
        """Takes note of a request that starts now."""
        hold = Hold(request, placement.gpu_ids, -math.inf, self._now + _runtime_s(request))
        self._holds[placement.node].append(hold)

    def without_delay(self, request: Request, placement: Placement) -> Placement | None:
        """The placement, or another for a start now, that keeps every reservation; None if there is none."""
        wanted = self._cluster.by_name[placement.node]
        for node in (wanted, *self._cluster.candidates(request)):
            room = self._least_free(node, self._now, self._now + _runtime_s(request))
            for gpu_id, milli in node.gpu_free.items():
                room.gpu_free[gpu_id] = min(room.gpu_free[gpu_id], milli)
            _count_whole(room)
            if not room.fits(request):
                continue
            if node is wanted and all(
                room.gpu_free[gpu_id] >= request.gpu_milli for gpu_id in placement.gpu_ids
            ):
                return placement
            return Placement(node.name, room.pick_gpus(request))
        return None

    def _earliest(self, node: NodeState, request: Request) -> float:
        holds = self._holds[node.name]
        ends = {hold.end for hold in holds if self._now < hold.end < math.inf}
        for start in (self._now, *sorted(ends)):
            if self._least_free(node, start, start + _runtime_s(request)).fits(request):
                return start
        return math.inf

    def _least_free(self, node: NodeState, start: float, end: float) -> NodeState:
        """The node with what is free at every moment from start to end."""
        holds = [hold for hold in self._holds[node.name] if hold.start < end and hold.end > start]
        room = NodeState(node.node, node.index)
        empty_gpus, empty = dict(room.gpu_free), dict(room.free)
        for moment in {start, *(hold.start for hold in holds if hold.start > start)}:
            gpu_free, free = dict(empty_gpus), dict(empty)
            for hold in _active(holds, moment):
                for gpu_id in hold.gpu_ids:
                    if gpu_id in gpu_free:
                        gpu_free[gpu_id] -= hold.request.gpu_milli
                for name, amount in hold.request.resources.items():
                    free[name] = free.get(name, 0) - amount
            for gpu_id, milli in gpu_free.items():
                room.gpu_free[gpu_id] = min(room.gpu_free[gpu_id], milli)
            for name, amount in free.items():
                room.free[name] = min(room.free.get(name, 0), amount)
        _count_whole(room)
        return room


def _active(holds: Iterable[Hold], moment: float) -> Iterable[Hold]:
    return (hold for hold in holds if hold.start <= moment < hold.end)


def _count_whole(room: NodeState) -> None:
    room.whole_free = sum(milli == MILLI_PER_GPU for milli in room.gpu_free.values())


def _runtime_s(request: Request) -> float:
    return math.inf if request.expected_runtime_s is None else request.expected_runtime_s
