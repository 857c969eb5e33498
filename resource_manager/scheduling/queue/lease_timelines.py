"""Free capacity of each node over time as leases end, kept between passes but for what changed."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right, insort
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TypeVar

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, fits, pick_gpus
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request
from resource_manager.core.node_state import NodeState
from resource_manager.core.runtimes import class_of
from resource_manager.scheduling.placement.gang_slots import could_ever_mask, slots
from resource_manager.scheduling.placement.node_masks import positions
from resource_manager.scheduling.queue.runtime_limits import lasts_s
from resource_manager.scheduling.queue.spans import Span

T = TypeVar("T")

MAX_SHAPES = 256
"""The most shapes (`Request.shape`) of which the earliest starts are kept for one cluster."""

MAX_ANSWERS = 128
"""The most answers that a timeline keeps."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """A reservation of one node, which the next pass keeps if no change touched it."""

    request: Request
    runtime_s: float
    held_mask: int | None
    """The nodes of which something was held back; None if nodes may have been closed to the request alone."""
    start: float
    position: int
    gpu_ids: tuple[int, ...]


class Timeline:
    """Free capacity of one node, one entry for each span between two times, the first and last endless.

    It never changes, so what it answered once stays true; `with_` gives another one.
    """

    __slots__ = ("_earliest", "_free", "_next", "_node", "_rooms", "_spans", "_times", "_whole")

    def __init__(self, node: NodeState, times: list[float], free: list[FreeCapacity]) -> None:
        self._node = node
        self._times = times
        self._free = free
        self._earliest: dict[tuple[object, ...], tuple[float, float]] = {}
        """By shape and runtime the time that was asked about, and the start from then on."""
        self._spans: dict[tuple[object, ...], list[Span]] = {}
        self._rooms: dict[tuple[object, ...], float] = {}
        self._next: tuple[tuple[object, ...], Timeline] | None = None
        self._whole: list[int] | None = None

    @classmethod
    def of_leases(cls, node: NodeState, ends_at: Mapping[str, float]) -> Timeline:
        """Return what is free as leases end, of which these are the keys and the times.

        One past its expected end has ended.
        """
        ends = sorted(((at, key) for key, at in ends_at.items()), reverse=True)
        free = node.capacity_without_leases
        times, spans = [-math.inf], [free]
        for end, key in ends:
            lease = node.leases[key]
            if end < math.inf and times[1:2] != [end]:
                times.insert(1, end)
                spans.insert(0, spans[0])
            for member in lease.on(node.name):
                spans[0] = spans[0].minus(lease.request, node.gpu_ids_of(member))
        return cls(node, times, spans)

    def with_(self, reservation: Reservation) -> Timeline:
        """Return the timeline with a reservation of the node; the last one asked for is kept."""
        request, gpu_ids, start = reservation.request, reservation.gpu_ids, reservation.start
        end = start + reservation.runtime_s
        key = (request.shape, gpu_ids, start, end)
        if self._next is None or self._next[0] != key:
            times, free = self._times.copy(), self._free.copy()
            first = _cut(times, free, start)
            last = _cut(times, free, end) if end < math.inf else len(times)
            for place in range(first, last):
                free[place] = free[place].minus(request, gpu_ids)
            self._next = key, Timeline(self._node, times, free)
        return self._next[1]

    def has_room_from(self, request: Request) -> float:
        """Return from when on the request fits for ever, on a timeline of leases alone; infinity if never."""
        known = self._rooms.get(request.shape)
        if known is not None:
            return known
        room = math.inf
        for place in range(len(self._times) - 1, -1, -1):
            if self._node.usable(request, self._free[place]) is None:
                break
            room = self._times[place]
        _keep(self._rooms, request.shape, room)
        return room

    def earliest(
        self,
        request: Request,
        runtime_s: float,
        now: float,
        until: float = math.inf,
        opening: Callable[[float], float] | None = None,
    ) -> float:
        """Return the first time from now on from which the request fits for its runtime.

        It does not look beyond `until`: then it returns infinity, unless it knows better. `opening` maps a
        time to the first one from then on at which it may start.
        """
        if opening is not None:
            starts = map(opening, (now, *self._times[bisect_right(self._times, now) :]))
            return next((start for start in starts if self._fits_at(request, runtime_s, start)), math.inf)
        key = (request.shape, runtime_s)
        since, start = self._earliest.get(key, (now, -math.inf))
        if not since <= now <= start:  # a play of the queue asks about later times than the pass after it
            start = self._search(request, runtime_s, now, until)
            if start < math.inf or until == math.inf:
                _keep(self._earliest, key, (now, start))
        return start

    def _search(self, request: Request, runtime_s: float, now: float, until: float) -> float:
        times = self._times
        place, start = bisect_right(times, now) - 1, now
        while start <= until:
            failed = self._first_too_full(request, place, start + runtime_s)
            if failed is None:
                if self._fits_at(request, runtime_s, start):
                    return start
                failed = place
            place = failed + 1
            if place == len(times):
                break
            start = times[place]
        return math.inf

    def may_fit(self, request: Request, start: float, end: float) -> bool:
        """Return False if the request surely does not fit from start to end: too few whole GPUs are free."""
        place = bisect_right(self._times, start) - 1
        return self._first_too_full(request, place, end) is None

    def _first_too_full(self, request: Request, place: int, end: float) -> int | None:
        """Return the first span from that place on, before the end, with too few whole GPUs."""
        if request.gpu_milli != MILLI_PER_GPU:
            return None
        times, free = self._times, self._free
        if self._whole is None:
            self._whole = [sum(milli == MILLI_PER_GPU for milli in each.gpus.values()) for each in free]
        need, whole = request.gpus, self._whole
        while whole[place] >= need:
            place += 1
            if place == len(times) or times[place] >= end:
                return None
        return place

    def _fits_at(self, request: Request, runtime_s: float, start: float) -> bool:
        least: FreeCapacity | None = None
        for free in self._between(start, start + runtime_s):
            least = free if least is None else least.intersect(free)
            if self._node.usable(request, least) is None:
                return False
        return start < math.inf

    def gang_starts(self, request: Request, runtime_s: float, now: float) -> Iterator[Span]:
        """Yield spans of starts from now on from which members of the gang fit, and the most that do."""
        key = (request.shape, runtime_s)
        if key not in self._spans:
            _keep(self._spans, key, list(self._search_spans(request, runtime_s)))
        for begin, end, is_at_end, count in self._spans[key]:
            if end > now or (end == now and is_at_end):
                yield max(begin, now), end, is_at_end, count

    def _search_spans(self, request: Request, runtime_s: float) -> Iterator[Span]:
        node, times = self._node.node, self._times
        for place, begin in enumerate(times):
            following = times[place + 1] if place + 1 < len(times) else math.inf
            # The first start in a span runs into the fewest of those that follow.
            count = slots(node, request, self.least_free(begin, begin + runtime_s))
            if not count:
                continue
            least, until = self._free[place], math.inf
            for later in range(place + 1, len(times)):
                least = least.intersect(self._free[later])
                if not fits(node, request, least):
                    until = times[later]
                    break
            last = until - runtime_s
            yield (begin, last, True, count) if last < following else (begin, following, False, count)

    def least_free(self, start: float, end: float) -> FreeCapacity:
        """Return what is free at every moment from start to end."""
        spans = self._between(start, end)
        least = next(spans)
        for free in spans:
            least = least.intersect(free)
        return least

    def pick_gpus(self, request: Request, free: FreeCapacity) -> tuple[int, ...] | None:
        """Return the GPUs for a request that the node could take; None if none fit.

        They are of few islands, else the lowest; for a fraction it is the tightest one.
        """
        usable = self._node.usable(request, free)
        return None if usable is None else pick_gpus(request, usable, free.gpus, self._node.node.islands)

    def _between(self, start: float, end: float) -> Iterator[FreeCapacity]:
        times, place = self._times, bisect_right(self._times, start) - 1
        yield self._free[place]
        for later in range(place + 1, len(times)):
            if times[later] >= end:
                return
            yield self._free[later]


def _keep(answers: dict[tuple[object, ...], T], key: tuple[object, ...], answer: T) -> None:
    if len(answers) >= MAX_ANSWERS:
        answers.clear()
    answers[key] = answer


def _cut(times: list[float], free: list[FreeCapacity], time: float) -> int:
    """Return the index of the span that begins at that time, after splitting one if needed."""
    place = bisect_left(times, time)
    if place == len(times) or times[place] != time:
        times.insert(place, time)
        free.insert(place, free[place - 1])
    return place


class LeaseTimelines:
    """The timelines of all nodes by their leases alone, and by shape from when on each node has room."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._runtimes_mark = 0
        self._rules: object = None
        self._of_class: dict[str, set[int]] = {}
        """Positions of the nodes with leases of a class of task whose runtime was to be learnt."""
        self._mark = -1
        self._inventory: object = None
        self._timelines: list[Timeline | None] = []
        self._made_of: list[object] = []
        self._changed: set[int] = set()
        self._rooms: dict[tuple[object, ...], Rooms] = {}
        self.reserved: tuple[int, float, list[Reservation]] = (-1, -math.inf, [])
        """The mark and the time at which the last pass began to reserve, and its reservations."""

    @classmethod
    def of(cls, cluster: ClusterState) -> LeaseTimelines:
        """Return those of the cluster."""
        found: LeaseTimelines | None = cluster.policy_cache.get(cls)
        if found is None:
            found = cluster.policy_cache[cls] = cls(cluster)
        found._note_ends()
        return found

    def reserved_until(self, now: float) -> tuple[int, list[Reservation]]:
        """Return the mark and the reservations of the last pass, none if it was a later one, as in a play."""
        mark, reserved_at, reservations = self.reserved
        return (mark, reservations) if reserved_at <= now else (-1, [])

    def _note_ends(self) -> None:
        """Have those nodes looked at again that have leases whose expected end has changed."""
        runtimes, ledger = self._cluster.runtimes, self._cluster.ledger
        rules = None if ledger is None else ledger.rules
        if rules is not self._rules:  # teams may have another limit of runtimes
            self._rules = rules
            for position in range(len(self._cluster.nodes)):
                self._cluster.note_changed(position)
        changed = runtimes.changed_since(self._runtimes_mark)
        self._runtimes_mark = runtimes.mark
        for name in self._of_class if changed is None else set(changed):
            for position in self._of_class.get(name, ()):
                if position < len(self._cluster.nodes):
                    self._cluster.note_changed(position)

    def of_position(self, position: int) -> Timeline:
        """Return the timeline of the node at that position."""
        self._catch_up()
        timeline = self._timelines[position]
        if position in self._changed:
            self._changed.discard(position)
            node = self._cluster.nodes[position]
            ends = {key: self._end_on(position, lease) for key, lease in node.leases.items()}
            made_of = (node.node, dict(node.leases), ends, dict(node.closed_gpus))
            if timeline is None or self._made_of[position] != made_of:  # a trial that ended changed nothing
                timeline = Timeline.of_leases(node, ends)
                self._timelines[position], self._made_of[position] = timeline, made_of
        assert timeline is not None
        return timeline

    def rooms(self, request: Request) -> list[tuple[float, int]]:
        """Return from when on open nodes have room for the request, and their positions, in order."""
        self._catch_up()
        rooms = self._rooms.get(request.shape)
        if rooms is None:
            if len(self._rooms) >= MAX_SHAPES:
                self._rooms.clear()
            rooms = self._rooms[request.shape] = Rooms(self._cluster, request)
        rooms.catch_up(self)
        return rooms.sorted

    def _end_on(self, position: int, lease: Lease) -> float:
        """Return when that node has what the lease holds: if it is preempted, once the other has run."""
        if lease.quarantined:
            return math.inf
        if (waiting := self._cluster.pending.get(lease.preempted_by)) is not None:
            return lease.preempt_until + self._runtime_on(position, waiting.request)
        return lease.granted_at + self._runtime_on(position, lease.request)

    def _runtime_on(self, position: int, request: Request) -> float:
        """Return the expected runtime of a request on that node, which is looked at again if it changes."""
        if request.expected_runtime_s is None:
            self._of_class.setdefault(class_of(request), set()).add(position)
        return lasts_s(self._cluster, request)

    def _catch_up(self) -> None:
        cluster, mark = self._cluster, self._cluster.mark
        if mark == self._mark and self._inventory is cluster.largest:
            return
        changed = cluster.changed_since(self._mark) if self._inventory is cluster.largest else None
        if changed is None:
            self._timelines = [None] * len(cluster.nodes)
            self._made_of = [None] * len(cluster.nodes)
            self._changed = set(range(len(cluster.nodes)))
            self._rooms.clear()
            self._of_class.clear()
        else:
            self._changed.update(changed)
        self._mark, self._inventory = mark, cluster.largest


class Rooms:
    """From when on each open node has room for the requests of one shape, by its leases alone."""

    def __init__(self, cluster: ClusterState, request: Request) -> None:
        self._cluster = cluster
        self._request = request
        self._mark = -1
        self._could = could_ever_mask(cluster, request)
        self._since: dict[int, float] = {}
        self.sorted: list[tuple[float, int]] = []

    def catch_up(self, timelines: LeaseTimelines) -> None:
        """Look again at the nodes that changed."""
        cluster = self._cluster
        if self._mark == cluster.mark:
            return
        changed = cluster.changed_since(self._mark)
        self._mark = cluster.mark
        if changed is None:
            self._since = {
                position: self._room_from(position, timelines) for position in positions(self._could)
            }
            self.sorted = sorted(
                (since, position) for position, since in self._since.items() if since < math.inf
            )
            return
        for position in set(changed):
            if not self._could >> position & 1:
                continue
            before, since = self._since[position], self._room_from(position, timelines)
            if since != before:
                self._since[position] = since
                if before < math.inf:
                    del self.sorted[bisect_left(self.sorted, (before, position))]
                if since < math.inf:
                    insort(self.sorted, (since, position))

    def _room_from(self, position: int, timelines: LeaseTimelines) -> float:
        node = self._cluster.nodes[position]
        if not node.is_open:
            return math.inf
        return timelines.of_position(position).has_room_from(self._request)
