"""Reservations: planned starts of pending requests, which later requests that start now must not delay."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import chain

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, is_short
from resource_manager.core.models import Placement, Request
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.gang_slots import Prospects, slots
from resource_manager.scheduling.placement.gangs import Members, Part, by_type, plan, ranked
from resource_manager.scheduling.placement.node_masks import positions
from resource_manager.scheduling.queue.held_back import HeldBack
from resource_manager.scheduling.queue.lease_timelines import LeaseTimelines, Reservation, Timeline
from resource_manager.scheduling.queue.runtime_limits import lasts_s
from resource_manager.scheduling.queue.spans import Span, together
from resource_manager.scheduling.queue.windows import Outlook, is_restricted, open_spans, opening_of, opens_at
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_RESERVATIONS = 16
"""Maximum number of requests with a reservation; those behind may be overtaken until they are among these.

Otherwise all that they could use would idle: with 17 requests for whole servers each single free GPU.
"""

MAX_AHEAD = 200
"""Number of requests that wait for the same nodes, behind which a pass starts none of those.

Each costs a search, and those of whole servers would wait ever longer for all that are smaller.
"""

MAX_SWEPT = 1000
"""Maximum number of nodes at which the reservations of gangs look, beyond the first. Each looks at all nodes
that it could use, in every pass: a few dozen gangs on hundreds of nodes would take a tenth of a second."""


class Reservations:
    """Free capacity of each node from now on, by the runtimes of leases and of reserved requests.

    An unknown runtime is infinite, and before a maintenance window as the limits say: none of those that
    start cross one. A lease past its expected end is assumed to end at any moment. A request whose start is
    unknown may start at any moment: on each node that it could use, it holds back the GPUs of its kind and
    its amounts. One too many for a reservation holds back nothing.

    Nothing is freed while a pass goes on, so what cannot start once cannot start later in it.
    """

    def __init__(self, cluster: ClusterState, current: SchedulingPass) -> None:
        self._cluster, self._now = cluster, current.now
        self._guard_s = current.limits.maintenance_guard_s
        self._prospects, self._outlook = Prospects.of(cluster), Outlook(cluster, current)
        self._usable = self._outlook.usable if cluster.windows else self._prospects.usable
        self._leases = LeaseTimelines.of(cluster)
        self._waiting: list[Request] = []
        self._count = self._put = 0
        """How many got a reservation, and how many were put ahead."""
        self._swept = 0
        """The nodes at which reservations of gangs have looked."""
        self._ahead: Counter[int] = Counter()
        """How many requests were put ahead, by the nodes that they could ever use."""
        self._planned: dict[int, list[Reservation]] = {}
        """What is reserved, by position of the node."""
        self._timelines: dict[int, tuple[Timeline, Timeline]] = {}
        """By position of a node its timeline by leases alone, and with what is reserved."""
        self._mark, self._before = self._leases.reserved_until(self._now)
        self._made: list[Reservation] = []
        self._place_before = {each.request.lease_id: place for place, each in enumerate(self._before)}
        self._passed = 0
        """Place in the last pass up to which its reservations were looked at."""
        self._dirty: set[int] | None = set()
        """Positions of the nodes that changed since the last pass; None if any may have."""
        self._held_back = HeldBack(cluster)
        self._delaying: dict[tuple[object, ...], float] = {}
        """The shortest runtime with which a request of that shape would have delayed a reservation."""
        self._startable: dict[tuple[object, ...], Request] | None = None
        """Shapes of pending requests that may still start in this pass; None until somebody asks."""

    def put_ahead(self, request: Request) -> None:
        """Put a request that does not start ahead of those asked about next, unless it never starts."""
        if not (usable := self._usable(request)):
            return
        self._ahead[usable] += 1
        self._put += 1
        if self._count < MAX_RESERVATIONS:
            self._waiting.append(request)
        if self._startable and self._ahead[usable] == MAX_AHEAD:
            self._startable = {
                shape: each
                for shape, each in self._startable.items()
                if self._prospects.usable(each) != usable
            }

    def is_over(self) -> bool:
        """Return True if no pending request behind those put ahead starts in this pass."""
        shapes = self._cluster.pending.shapes
        if self._startable is None and self._put >= min(len(shapes), MAX_RESERVATIONS):
            requests = (next(iter(alike.values())) for alike in shapes.values())
            self._startable = {
                request.shape: request
                for request in requests
                if next(self._cluster.candidates(request), None) is not None
            }
        return self._startable is not None and not self._startable

    def may_start(self, request: Request, *, restricted: bool) -> bool:
        """Return False if it is known that no request of that shape starts in this pass."""
        if restricted:
            masks = self._outlook.waits_for(request)
            return 0 not in masks and sum(self._ahead[mask] for mask in masks) < MAX_AHEAD
        return self._startable is None or request.shape in self._startable

    def rule_out(self, request: Request) -> None:
        """Note that no request of that shape can start now."""
        if self._startable is not None:
            self._startable.pop(request.shape, None)

    def _settle(self) -> None:
        """Reserve for those put ahead, or hold back what they could use."""
        is_more = False
        for request in self._waiting:
            if not self.is_one_too_many(request) and self.reserve(request) is None:
                is_more = self.hold_back(request) or is_more
        self._waiting.clear()
        if is_more and self._startable is not None:
            self._startable = {
                shape: request for shape, request in self._startable.items() if self._has_room_for(request)
            }

    def _has_room_for(self, request: Request) -> bool:
        """Return True if a node has room now for a member of the request, beside what is held back."""
        cluster, held_back = self._cluster, self._held_back
        mask = cluster.candidate_mask(request) & ~(held_back.gpus_mask if request.gpus else 0)
        nodes = cluster.scan(mask, request)
        return any(slots(node.node, request, held_back.left(node, node.capacity)) for node in nodes)

    def hold_back(self, request: Request) -> bool:
        """Hold back what the request could use; return True if that was not so before."""
        return self._held_back.add(request, self._usable(request))

    def is_one_too_many(self, request: Request) -> bool:
        """Return True if the request gets no reservation: those before it have all that a pass makes."""
        if self._count == MAX_RESERVATIONS:
            return True
        swept = self._sweep_of(request)
        return bool(swept and self._swept) and self._swept + swept > MAX_SWEPT

    def _sweep_of(self, request: Request) -> int:
        """Return the number of nodes at which a reservation has to look together: none for one member."""
        return 0 if request.nodes == 1 else self._prospects.usable(request).bit_count()

    def reserve(self, request: Request) -> float | None:
        """Reserve the earliest start that delays no earlier reservation; ask `is_one_too_many` before.

        It is on nodes of which nothing is held back. Returns it, or None if none is known.
        """
        if swept := self._sweep_of(request):
            return self._reserve_gang(request, swept)
        runtime_s = lasts_s(self._cluster, request)
        held_mask = None if is_restricted(self._cluster, request) else self._held_back.mask
        before, dirty = self._as_before(request), self._dirty
        if (
            before is not None
            and dirty is not None
            and held_mask is not None
            and (before.request.shape, before.runtime_s, before.held_mask)
            == (request.shape, runtime_s, held_mask)
            and before.start >= self._now
            and before.position not in dirty
        ):  # it is still the best of all nodes but those that changed
            best = before.start, before.position
            usable = self._prospects.usable(request) if dirty else 0
            for position in dirty:
                if usable >> position & 1:
                    since = self._leases.of_position(position).has_room_from(request)
                    best = self._better(request, runtime_s, since, position, best)
            is_same = best == (before.start, before.position)
        else:
            best = self._search(request, runtime_s, restricted=held_mask is None)
            is_same = False
        if before is not None and dirty is not None and not is_same:
            dirty.add(before.position)
        start, position = best
        if start == math.inf:
            return None
        if is_same and before is not None:
            self._plan(before)
        else:
            end, timeline = start + runtime_s, self._timeline(position)
            gpu_ids = timeline.pick_gpus(request, timeline.least_free(start, end)) or ()
            if dirty is not None:
                dirty.add(position)
            self._plan(Reservation(request, runtime_s, held_mask, start, position, gpu_ids))
        self._count += 1
        return start

    def _as_before(self, request: Request) -> Reservation | None:
        """Return what the last pass reserved for the request, of a gang the last node.

        Nodes that changed since then, also by what is reserved there, become dirty.
        """
        if not self._made:
            self._leases.reserved = self._cluster.mark, self._now, self._made
        changed = self._cluster.changed_since(self._mark)
        if self._dirty is None or changed is None:
            self._dirty = None
            return None
        self._mark = self._cluster.mark
        self._dirty.update(changed)
        place = self._place_before.get(request.lease_id, -1)
        if place < self._passed:
            return None
        self._dirty.update(skipped.position for skipped in self._before[self._passed : place])
        self._passed = place + 1
        return self._before[place]

    def _search(self, request: Request, runtime_s: float, *, restricted: bool) -> tuple[float, int]:
        """Return the earliest start and the first node of those with it; infinity if there is none."""
        best, now = (math.inf, -1), self._now
        for since, position in self._leases.rooms(request):
            at = since if since > now else now
            if at > best[0]:
                break
            if at < best[0] or position < best[1]:  # asked here: nodes of overdue leases are many
                best = self._better(request, runtime_s, since, position, best, restricted=restricted)
        return best

    def _better(
        self,
        request: Request,
        runtime_s: float,
        since: float,
        position: int,
        best: tuple[float, int],
        *,
        restricted: bool = False,
    ) -> tuple[float, int]:
        """Return the earliest start on a node, which has room by its leases `since` then, if it is better."""
        at = since if since > self._now else self._now
        if (at, position) >= best or self._held_back.mask >> position & 1:
            return best
        if restricted or position in self._planned:
            node = self._cluster.nodes[position].name
            opening = opening_of(self._cluster, node, request, self._guard_s) if restricted else None
            at = self._timeline(position).earliest(request, runtime_s, at, best[0], opening)
        return (at, position) if (at, position) < best and at < math.inf else best

    def _reserve_gang(self, request: Request, swept: int) -> float | None:
        """Reserve nodes for all members at the first time at which they are free together for the runtime."""
        self._swept += swept
        before, runtime_s = self._as_before(request), lasts_s(self._cluster, request)
        if before is not None and self._dirty is not None:
            self._dirty.add(before.position)
        for start in self._gang_starts(request, runtime_s):
            free = partial(self._free, start, start + runtime_s)

            def slots_of(
                node: NodeState, start: float = start, free: Callable[[NodeState], FreeCapacity] = free
            ) -> int:
                if self._held_back.mask >> node.index & 1 or not self._is_open_at(node, request, start):
                    return 0
                return slots(node.node, request, free(node))

            parts = plan(self._cluster, request, slots_of=slots_of)
            if parts:
                for member in self._fill(request, parts, free):
                    position = self._cluster.by_name[member.node].index
                    self._plan(Reservation(request, runtime_s, None, start, position, member.gpu_ids))
                    if self._dirty is not None:
                        self._dirty.add(position)
                self._count += 1
                return start
        return None

    def _free(self, start: float, end: float, node: NodeState) -> FreeCapacity:
        return self._timeline(node.index).least_free(start, end)

    def _is_open_at(self, node: NodeState, request: Request, at: float) -> bool:
        return opens_at(self._cluster, node.name, request, at, self._guard_s) == at

    def _gang_starts(self, request: Request, runtime_s: float) -> Iterator[float]:
        """Yield the times, ascending, at which enough nodes of one domain may be free for the runtime."""
        spans_of: dict[str, list[Span]] = {}
        for position in positions(self._prospects.usable(request) & ~self._held_back.mask):
            node = self._cluster.nodes[position]
            domain = node.node.labels.get(request.same) if request.same else ""
            if domain is None:
                continue
            spans = self._timeline(node.index).gang_starts(request, runtime_s, self._now)
            if is_restricted(self._cluster, request):
                spans = open_spans(self._cluster, node.name, request, spans, self._guard_s)
            spans_of.setdefault(domain, []).extend(spans)
        return together(spans_of, request.nodes)

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
                    gpu_ids = self._timeline(node.index).pick_gpus(request, free) or ()
                    found.append(Placement(node.name, gpu_ids))
                    free = free.minus(request, gpu_ids)
                if len(found) == wanted:
                    break
        return found

    def without_delay(self, request: Request, members: Members) -> Members | None:
        """Return the placements, or others for now, that delay no reservation; None if there are none."""
        self._settle()
        runtime_s, restricted = lasts_s(self._cluster, request), is_restricted(self._cluster, request)
        delaying = None if restricted else self._delaying.get(request.shape)
        if delaying is not None and runtime_s >= delaying:
            return None
        end, ways = self._now + runtime_s, (*by_type(request), request)
        found = next(filter(None, (self._without_delay(each, members, end) for each in ways)), None)
        if found is None and not restricted:
            self._delaying[request.shape] = runtime_s
        return found

    def _without_delay(self, request: Request, members: Members, end: float) -> Members | None:
        def free_of(node: NodeState) -> FreeCapacity:
            # Intersect with what is free now: a lease past its expected end is still allocated.
            free = self._timeline(node.index).least_free(self._now, end).intersect(node.capacity)
            return self._held_back.left(node, free)

        if request.nodes != 1:
            return self._gang_without_delay(request, members, free_of)
        placement = members[0]
        wanted = self._cluster.by_name[placement.node]
        for node in chain((wanted,), self._cluster.candidates(request)):
            if not self._is_open_at(node, request, self._now):
                continue
            if node.index not in self._planned and not self._held_back.mask >> node.index & 1:
                if not node.fits(request):
                    continue
                if node is wanted and all(
                    node.gpu_free[gpu_id] >= request.gpu_milli for gpu_id in placement.gpu_ids
                ):
                    return members
                return (node.place(request),)
            timeline = self._timeline(node.index)
            if not timeline.may_fit(request, self._now, end):
                continue
            free = free_of(node)
            gpu_ids = timeline.pick_gpus(request, free)
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
        amounts = (each for free in left.values() for each in (*free.gpus.values(), *free.amounts.values()))
        if not any(is_short(each, 0) for each in amounts):
            return members

        def slots_of(node: NodeState) -> int:
            return self._is_open_at(node, request, self._now) and slots(node.node, request, free_of(node))

        def filled(allowed: int) -> list[Placement]:
            return self._fill(request, plan(self._cluster, request, allowed, slots_of), free_of)

        return ranked(self._cluster, request, filled)

    def _plan(self, made: Reservation) -> None:
        self._made.append(made)
        self._planned.setdefault(made.position, []).append(made)
        self._timelines.pop(made.position, None)

    def _timeline(self, position: int) -> Timeline:
        """Return the node's timeline with what is reserved on it."""
        of_leases = self._leases.of_position(position)
        if position not in self._planned:
            return of_leases
        known = self._timelines.get(position)
        if known is None or known[0] is not of_leases:
            timeline = of_leases
            for made in self._planned[position]:
                timeline = timeline.with_(made)
            known = self._timelines[position] = of_leases, timeline
        return known[1]
