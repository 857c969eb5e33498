"""Choice of the leases that are preempted for a request with a stronger right.

A request may take leases of its own team with a strictly lower stated priority. A team that stays inside its
guarantee with it may also take leases of teams that are beyond theirs at that moment: where its own leases go
first, that is what it holds without them. Where that guarantee is by type, the request is placed on types
inside it. Both are strict, so requests can never take each other's place in turn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.node_state import NodeState
from resource_manager.core.pending import PendingRequest
from resource_manager.errors import CapacityError
from resource_manager.scheduling.placement.gangs import Members
from resource_manager.scheduling.preemption.victim_right import Planned, Right, cheapest_first
from resource_manager.scheduling.queue.quotas import by_right, on_types, stop_of, typed_above
from resource_manager.scheduling.queue.windows import place_now
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_EXACT = 10
"""Maximum number of leases on one node of which all rows are tried."""

MAX_STEPS = 2000
"""Maximum number of rows that are tried for one request."""


def find_victims(
    cluster: ClusterState,
    pending: PendingRequest,
    current: SchedulingPass,
    planned: Planned | None = None,
) -> list[Lease]:
    """Return the leases to preempt so that the request fits; empty if there are none, or none are needed.

    They are chosen one after the other: other teams before the request's own, unless the right to take theirs
    begins only without leases of its own; the team most over its share, the lowest priority, the least work
    lost, the newest. What is not needed in the end is given back in reverse order. The cluster is left
    unchanged. `planned` is what it holds in the trial that it is in, and nobody holds yet.
    """
    ledger, request = cluster.ledger, pending.request
    if ledger is None:
        return []
    right = Right(cluster, request, current.now, planned)
    typed = typed_above(ledger, request)
    if not typed:
        return _victims_among(cluster, pending, current, right) or []
    leases = right.leases()
    mine = [lease for lease in leases if lease.request.team == request.team]
    inside = by_right(ledger, request)
    ways = [(placed, leases, False) for placed in inside]
    if mine:  # of any type, without others; then on types that are inside the guarantee only without those
        types = request.gpu_types or dict.fromkeys(
            name for each in typed for name in each.team.guaranteed_by_type
        )
        alone = {each.gpu_types: each for each in (*inside, *(on_types(request, [name]) for name in types))}
        ways += [(request, mine, False), *((placed, leases, True) for placed in alone.values())]
    for placed, takeable, own_first in ways:
        right = Right(cluster, placed, current.now, planned)
        as_placed = replace(pending, request=placed)
        found = _victims_among(cluster, as_placed, current, right, takeable, own_first=own_first)
        if found is None:
            return []
        if found and (takeable is mine or takes_of_others(request, found)):
            return found
    return []


def _victims_among(
    cluster: ClusterState,
    pending: PendingRequest,
    current: SchedulingPass,
    right: Right,
    leases: list[Lease] | None = None,
    *,
    own_first: bool = True,
) -> list[Lease] | None:
    """Return the leases of these to preempt, by default of all; None if the request fits without.

    With `own_first` also of others to whose leases the right begins only without the team's own.
    """

    def fits() -> bool:
        return place_of(cluster, pending, current) is not None

    if fits():
        return None
    leases = right.leases() if leases is None else leases
    found = _search(cluster, pending.request, leases, right, fits, own_first) if leases else []
    if right.holds(found):
        return found
    # The right to take others' begins when the team's own have ended.
    return sorted(found, key=lambda lease: lease.request.team != pending.request.team)


def _search(
    cluster: ClusterState,
    request: Request,
    leases: list[Lease],
    right: Right,
    fits: Callable[[], bool],
    own_first: bool,
) -> list[Lease]:
    ledger = cluster.ledger
    assert ledger is not None
    useful = _Useful(cluster, request)
    # If a quota is what stops it, it does not matter where the leases are.
    is_anywhere = stop_of(ledger, request) is not None
    if is_anywhere:
        found = _greedy(cluster, request, right.in_order(leases), right, fits, is_anywhere=True)
    elif request.nodes == 1:
        found = _greedy_on_one_node(cluster, request, leases, right, fits, useful)
    else:
        ordered = right.in_order([*filter(useful, leases)])
        found = _greedy(cluster, request, ordered, right, fits, is_anywhere=False)
    if found:
        return found
    if mine := right.to_end_first(leases) if own_first else []:
        ordered = right.in_order(leases, first=mine)
        found = _greedy(cluster, request, ordered, right, fits, is_anywhere=True)
    if found or is_anywhere:
        return found
    # Leases that do not help may have used up what a team has beyond its guarantee: look at single nodes.
    steps = iter(range(MAX_STEPS))
    for together in _of_one_place(cluster, request, leases, useful):
        elsewhere = [lease for lease in mine if lease not in together]
        row = [*together, *elsewhere[: MAX_EXACT - len(together)]]
        if len(together) <= MAX_EXACT and (found := _exact(cluster, row, right, fits, steps)):
            return found
    return []


def _of_one_place(
    cluster: ClusterState, request: Request, leases: Iterable[Lease], useful: _Useful
) -> Iterator[list[Lease]]:
    """Yield the leases of each useful node; of one with too many, those of each GPU if one GPU is enough."""
    on: dict[str, list[Lease]] = {}
    for lease in leases:
        for name in {member.node for member in lease.members}:
            if useful.node(name):
                on.setdefault(name, []).append(lease)
    for name, there in on.items():
        if len(there) <= MAX_EXACT or request.nodes * request.gpus != 1:
            yield there
            continue
        state, on_gpu = cluster.by_name[name], dict[int, list[Lease]]()
        for lease in there:
            for gpu_id in {gpu_id for member in lease.on(name) for gpu_id in state.gpu_ids_of(member)}:
                on_gpu.setdefault(gpu_id, []).append(lease)
        yield from (on_gpu[gpu_id] for gpu_id in sorted(on_gpu))


class _Useful:
    """Answer, kept for each node, whether a lease is on a node that could take the request when empty."""

    def __init__(self, cluster: ClusterState, request: Request) -> None:
        self._cluster = cluster
        self._request = request
        self._nodes: dict[str, bool] = {}

    def node(self, name: str) -> bool:
        if name not in self._nodes:
            state = self._cluster.by_name[name]
            self._nodes[name] = state.is_open and state.could_fit(self._request)
        return self._nodes[name]

    def __call__(self, lease: Lease) -> bool:
        return any(self.node(member.node) for member in lease.members)


def place_of(cluster: ClusterState, pending: PendingRequest, current: SchedulingPass) -> Members | None:
    """Return the places where the request may start now, or None."""
    request = pending.request
    if cluster.ledger is not None and stop_of(cluster.ledger, request) is not None:
        return None
    members = place_now(cluster, request, current)
    if members is None or not current.admits(cluster, request, members, pending.queued_at):
        return None
    return members


def takes_of_others(request: Request, victims: Iterable[Lease]) -> bool:
    """Return True if some of these leases are of other teams than the request."""
    return any(lease.request.team != request.team for lease in victims)


def ways_after(
    cluster: ClusterState, pending: PendingRequest, victims: Iterable[Lease]
) -> list[PendingRequest]:
    """Return the request as it may be placed once these leases have ended: by right inside the guarantee."""
    ways: list[Request] = []
    if cluster.ledger is not None and takes_of_others(pending.request, victims):
        ways = by_right(cluster.ledger, pending.request)
    return [replace(pending, request=request) for request in ways] or [pending]


def place_by_right(
    cluster: ClusterState, pending: PendingRequest, current: SchedulingPass
) -> tuple[Request, Members] | None:
    """Return the request for which leases end, on the types that it may have, and its places; or None.

    They are those inside its team's guarantee, or any where it does not fit on these: an operator decided, or
    only leases of its own team end.
    """
    ways = [] if cluster.ledger is None else by_right(cluster.ledger, pending.request)
    for request in (*ways, pending.request):
        if members := place_of(cluster, replace(pending, request=request), current):
            return request, members
    return None


def _greedy_on_one_node(
    cluster: ClusterState,
    request: Request,
    leases: Iterable[Lease],
    right: Right,
    fits: Callable[[], bool],
    useful: _Useful,
) -> list[Lease]:
    """Return what `_greedy` does for a request of one node, counting until its ends can make room there.

    Only the accounts follow each step: most leases are on other nodes than the one that is found.
    """
    ledger = cluster.ledger
    assert ledger is not None
    counted: list[Lease] = []
    taken: dict[str, list[Lease]] = {}
    freed: dict[str, _FreedGpus] = {}
    found: list[Lease] = []
    try:
        for lease in right.in_order(leases):
            if not useful(lease):
                continue
            ledger.remove(lease, cluster.by_name)
            counted.append(lease)
            for name in {member.node for member in lease.members}:
                taken.setdefault(name, []).append(lease)
                if name not in freed:
                    freed[name] = _FreedGpus(cluster.by_name[name], request.gpu_milli)
                if freed[name].with_end_of(lease) >= request.gpus:
                    found = found or _taken_at_once(cluster, taken[name], right, fits)
            if found:
                return found
    finally:
        for lease in counted:
            ledger.add(lease, cluster.by_name)
    return []


class _FreedGpus:
    """GPUs of a node of which so many thousandths are free once the leases that are counted have ended."""

    def __init__(self, state: NodeState, milli: int) -> None:
        self._state = state
        self._milli = milli
        self._free = dict(state.gpu_free)
        self.count_slots = sum(free >= milli for free in self._free.values())

    def with_end_of(self, lease: Lease) -> int:
        """Count a lease that ends; return the number of GPUs with enough free."""
        free, enough, closed = self._free, self._milli, self._state.closed_gpus
        for member in lease.on(self._state.name):
            for gpu_id in self._state.gpu_ids_of(member):
                if gpu_id in free and gpu_id not in closed:
                    before = free[gpu_id]
                    free[gpu_id] = before + lease.request.gpu_milli
                    self.count_slots += before < enough <= free[gpu_id]
        return self.count_slots


def _taken_at_once(
    cluster: ClusterState, taken: list[Lease], right: Right, fits: Callable[[], bool]
) -> list[Lease]:
    with cluster.trial():
        for lease in taken:
            cluster.suppose_ended(lease)
        return _needed(cluster, taken, right, fits) if fits() else []


def _greedy(
    cluster: ClusterState,
    request: Request,
    ordered: Iterator[Lease],
    right: Right,
    fits: Callable[[], bool],
    *,
    is_anywhere: bool,
) -> list[Lease]:
    """Return the victims that are found by taking one lease after the other, without a step back."""
    ledger = cluster.ledger
    assert ledger is not None
    taken: list[Lease] = []
    was_stopped = is_anywhere
    with cluster.trial():
        for lease in ordered:
            cluster.suppose_ended(lease)
            taken.append(lease)
            if is_anywhere and stop_of(ledger, request) is not None:
                was_stopped = True
                continue
            # Only nodes of this lease have more than before; looking at them first is cheap.
            is_near = was_stopped or any(
                cluster.by_name[member.node].fits(request) for member in lease.members
            )
            was_stopped = False
            if is_near and fits():
                return _needed(cluster, taken, right, fits)
    return []


def _exact(
    cluster: ClusterState,
    leases: Sequence[Lease],
    right: Right,
    fits: Callable[[], bool],
    steps: Iterator[int],
) -> list[Lease]:
    """Return victims among the leases of one node if there are any, by trying all rows of allowed ones.

    The last lease of a team may take it below its guarantee, so the row decides which can be taken at all.
    """
    with cluster.trial():
        for lease in leases:
            cluster.suppose_ended(lease)
        if not fits():
            return []
    seen: set[frozenset[str]] = set()
    ordered = sorted(leases, key=cheapest_first)

    def search(taken: list[Lease]) -> list[Lease]:
        for lease in ordered:
            row = frozenset([lease.lease_id, *(other.lease_id for other in taken)])
            if lease in taken or row in seen or not right.allows(lease):
                continue
            if next(steps, None) is None:
                return []
            seen.add(row)
            with cluster.trial():
                cluster.suppose_ended(lease)
                with_it = [*taken, lease]
                found = _needed(cluster, with_it, right, fits) if fits() else search(with_it)
            if found:
                return found
        return []

    return search([])


def _needed(
    cluster: ClusterState, taken: Sequence[Lease], right: Right, fits: Callable[[], bool]
) -> list[Lease]:
    """Give back in reverse what is not needed; the last one taken is: without it the request did not fit."""
    kept = [taken[-1]]
    for place, lease in reversed([*enumerate(taken[:-1])]):
        try:
            cluster.apply(Granted(lease, lease.granted_at))
        except CapacityError:  # its node has less than before, so it cannot come back
            kept.append(lease)
            continue
        if not fits() or not right.holds([*taken[:place], *kept]):
            cluster.suppose_ended(lease)
            kept.append(lease)
    return kept[::-1]
