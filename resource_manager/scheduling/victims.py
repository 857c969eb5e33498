"""Choice of the leases that are preempted for a request with a stronger right.

A request may take leases of its own team with a strictly lower stated priority. A team that stays inside its
guarantee with it may also take leases of teams that are beyond theirs at that moment. Both are strict, so two
requests can never take each other's place in turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from heapq import heapify, heappop, heappush

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MAX_PRIORITY, MILLI_PER_GPU, Lease, PendingRequest, Request
from resource_manager.core.team_ledger import Account, TeamLedger, gpu_types_of, milli_of
from resource_manager.errors import CapacityError
from resource_manager.scheduling.gangs import Members
from resource_manager.scheduling.maintenance import place_now
from resource_manager.scheduling.policies import Policy
from resource_manager.scheduling.queue_order import QueueDiscipline
from resource_manager.scheduling.quotas import gpus, stays_inside, stop_of, team_words

MAX_EXACT = 10
"""Maximum number of leases on one node of which all rows are tried."""

MAX_STEPS = 2000
"""Maximum number of rows that are tried for one request."""

Share = tuple[tuple[float, float], ...]
"""Sort key of a team: of each level of its tree what it holds of its guarantee, and by weight, negative."""

Cheapness = tuple[int, float, float, str]
"""Sort key of a lease among its team's: lowest priority, least work lost, newest."""

CHEAPEST: Cheapness = (-MAX_PRIORITY - 1, -math.inf, -math.inf, "")


def find_victims(
    cluster: ClusterState, pending: PendingRequest, policy: Policy, order: QueueDiscipline, now: float
) -> list[Lease]:
    """Return the leases to preempt so that the request fits; empty if there are none, or none are needed.

    They are chosen one after the other: other teams before the request's own, the team most over its share,
    the lowest priority, the least work lost, the newest. What is not needed in the end is given back in
    reverse order. The cluster is left unchanged.
    """
    ledger, request = cluster.ledger, pending.request

    def fits() -> bool:
        return place_of(cluster, pending, policy, order, now) is not None

    if ledger is None or fits():
        return []
    right = Right(cluster, request, now)
    leases = right.leases()
    # If a quota is what stops it, it does not matter where the leases are.
    if stop_of(ledger, request) is not None:
        return _greedy(cluster, request, leases, right, fits, is_anywhere=True)
    useful = _Useful(cluster, request)
    if request.nodes == 1:
        found = _greedy_on_one_node(cluster, request, leases, right, fits, useful)
    else:
        found = _greedy(cluster, request, [*filter(useful, leases)], right, fits, is_anywhere=False)
    if found or not leases:
        return found
    # Leases that do not help may have used up what a team has beyond its guarantee: look at single nodes.
    on: dict[str, list[Lease]] = {}
    for lease in leases:
        for name in {member.node for member in lease.members}:
            if useful.node(name):
                on.setdefault(name, []).append(lease)
    steps = iter(range(MAX_STEPS))
    for there in on.values():
        if len(there) <= MAX_EXACT and (found := _exact(cluster, there, right, fits, steps)):
            return found
    return []


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


def place_of(
    cluster: ClusterState, pending: PendingRequest, policy: Policy, order: QueueDiscipline, now: float
) -> Members | None:
    """Return the places where the request may start now, or None."""
    request = pending.request
    if cluster.ledger is not None and stop_of(cluster.ledger, request) is not None:
        return None
    members = place_now(cluster, request, policy, order, now)
    if members is None or not order.admits(cluster, request, members, pending.queued_at, now):
        return None
    return members


def _greedy_on_one_node(
    cluster: ClusterState,
    request: Request,
    leases: Sequence[Lease],
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
    freed: dict[str, int] = {}
    found: list[Lease] = []
    try:
        for lease in right.in_order(leases):
            if not useful(lease):
                continue
            ledger.remove(lease, cluster.by_name)
            counted.append(lease)
            for name in {member.node for member in lease.members}:
                taken.setdefault(name, []).append(lease)
                held = sum(len(member.gpu_ids) for member in lease.on(name))
                freed[name] = freed.get(name, 0) + held
                is_enough = lease.request.gpu_milli != MILLI_PER_GPU or request.gpu_milli != MILLI_PER_GPU
                if is_enough or cluster.by_name[name].whole_free + freed[name] >= request.gpus:
                    found = found or _taken_at_once(cluster, taken[name], fits)
            if found:
                return found
    finally:
        for lease in counted:
            ledger.add(lease, cluster.by_name)
    return []


def _taken_at_once(cluster: ClusterState, taken: list[Lease], fits: Callable[[], bool]) -> list[Lease]:
    with cluster.trial():
        for lease in taken:
            cluster.suppose_ended(lease)
        return _needed(cluster, taken, fits) if fits() else []


def _greedy(
    cluster: ClusterState,
    request: Request,
    leases: Sequence[Lease],
    right: Right,
    fits: Callable[[], bool],
    *,
    is_anywhere: bool,
) -> list[Lease]:
    """Return the victims that are found by taking one lease after the other, without a step back."""
    taken: list[Lease] = []
    with cluster.trial():
        for lease in right.in_order(leases):
            cluster.suppose_ended(lease)
            taken.append(lease)
            # Only nodes of this lease have more than before; looking at them first is cheap.
            is_near = is_anywhere or any(
                cluster.by_name[member.node].fits(request) for member in lease.members
            )
            if is_near and fits():
                return _needed(cluster, taken, fits)
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
    ordered = sorted(leases, key=_cheapest_first)

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
                found = _needed(cluster, with_it, fits) if fits() else search(with_it)
            if found:
                return found
        return []

    return search([])


def _needed(cluster: ClusterState, taken: Sequence[Lease], fits: Callable[[], bool]) -> list[Lease]:
    """Give back in reverse what is not needed; the last one taken is: without it the request did not fit."""
    kept = [taken[-1]]
    for lease in reversed(taken[:-1]):
        try:
            cluster.apply(Granted(lease, lease.granted_at))
        except CapacityError:  # its node has less than before, so it cannot come back
            kept.append(lease)
            continue
        if not fits():
            cluster.suppose_ended(lease)
            kept.append(lease)
    return kept[::-1]


class Right:
    """Right of one request to take leases, judged by what the teams hold at each moment of a search."""

    def __init__(self, cluster: ClusterState, request: Request, now: float) -> None:
        ledger = cluster.ledger
        assert ledger is not None
        self._cluster = cluster
        self._ledger = ledger
        self._request = request
        self._now = now
        self._above = ledger.of(request).path
        self._levels: dict[str, list[Account] | None] = {}

    def leases(self) -> list[Lease]:
        """Return the leases that may be taken at some moment, by everything that does not change."""
        team, priority = self._request.team, self._request.priority
        newest: dict[str, float | None] = {}
        """Latest start of a lease of each team that may be taken; None if none may."""
        found: list[Lease] = []
        for lease in self._cluster.leases.values():
            other = lease.request
            its_team = other.team
            if its_team not in newest:
                newest[its_team] = self._newest(its_team)
            latest = newest[its_team]
            if latest is None or lease.granted_at > latest or not other.preemptible:
                continue
            if lease.quarantined or lease.preempted_by or (its_team == team and other.priority >= priority):
                continue
            found.append(lease)
        return found

    def _newest(self, team: str) -> float | None:
        """Return the latest start of a lease of the team that may be taken; None if none may."""
        if team != self._request.team:
            levels = self._over(team)
            if levels is None or any(
                account.allocated <= account.guaranteed and not account.team.guaranteed_by_type
                for account in levels
            ):
                return None
        own_s = self._ledger.named(team).team.min_runtime_s
        return self._now - (self._ledger.rules.min_runtime_s if own_s is None else own_s)

    def allows(self, lease: Lease) -> bool:
        """Return True if the lease, one of `leases`, may be taken now."""
        if lease.request.team == self._request.team:
            return True
        return all(
            _is_over(account, lease, self._cluster) for account in self._over(lease.request.team) or ()
        )

    def in_order(self, leases: Sequence[Lease]) -> Iterator[Lease]:
        """Yield those that may be taken, other teams' first; the caller ends each before the next step."""
        mine: list[Lease] = []
        queues: dict[str, list[Lease]] = {}
        of_team: dict[str, list[Lease]] = {self._request.team: mine}
        for lease in leases:
            team = lease.request.team
            if team not in of_team:
                of_team[team] = queues.setdefault(self._ledger.named(team).name, [])
            of_team[team].append(lease)
        is_sorted: set[str] = set()

        def entry(team: str) -> tuple[Share, Cheapness, str]:
            """Of teams equally over their share, the one whose next lease is the cheapest comes first."""
            if team not in is_sorted:
                queues[team].sort(key=_cheapest_first, reverse=True)
                is_sorted.add(team)
            return _most_over(self._ledger, team), _cheapest_first(queues[team][-1]), team

        # A team's leases are sorted only once it is its turn: until then it stands before all equal ones.
        heap = [(_most_over(self._ledger, team), CHEAPEST, team) for team in queues]
        heapify(heap)
        while heap:
            first = heappop(heap)
            team = first[-1]
            # What a team holds only falls here, so the first entry that is still true is the next.
            if (current := entry(team)) != first:
                heappush(heap, current)
                continue
            lease = queues[team].pop()
            if self.allows(lease):
                yield lease
            elif not any(account.team.guaranteed_by_type for account in self._over(team) or ()):
                continue  # nor are its other leases beyond the guarantee
            if queues[team]:
                heappush(heap, entry(team))
        yield from sorted(mine, key=_cheapest_first)

    def _over(self, team: str) -> list[Account] | None:
        """Return the accounts of a team that must be over their guarantee; None if it may never be taken.

        They are all below the common parent. The highest account of the request's own side decides whether
        it has the right: a team without a guarantee lives on that of its parent.
        """
        if team not in self._levels:
            own = self._ledger.named(team)
            below = [account for account in own.path if account not in self._above]
            common = below[-1].parent if below else own
            place = len(self._above) if common is None else self._above.index(common)
            decides = self._above[max(place - 1, 0)]
            has_right = milli_of(self._request) > 0 and stays_inside(decides, self._request)
            self._levels[team] = below if has_right else None
        return self._levels[team]


def _most_over(ledger: TeamLedger, team: str) -> Share:
    """Return the sort key of a team's share, from the top of the tree down; the most over comes first."""
    return tuple(
        (
            -account.allocated / account.guaranteed if account.guaranteed else -math.inf,
            -account.allocated / account.team.weight if account.team.weight else -math.inf,
        )
        for account in reversed(ledger.named(team).path)
    )


def _is_over(account: Account, lease: Lease, cluster: ClusterState) -> bool:
    """Return True if the team is beyond its guarantee: of a type that the lease holds, if it is by type."""
    typed = account.team.guaranteed_by_type
    if not typed:
        return account.allocated > account.guaranteed
    return any(
        account.by_type.get(gpu_type, 0) > MILLI_PER_GPU * typed.get(gpu_type, 0)
        for gpu_type in gpu_types_of(lease, cluster.by_name)
    )


def _cheapest_first(lease: Lease) -> Cheapness:
    """Return the sort key of a lease among its team's: lowest priority, least work lost, newest."""
    saved_at = lease.granted_at if lease.checkpoint_at is None else max(lease.checkpoint_at, lease.granted_at)
    return (lease.request.priority, -saved_at, -lease.arrived_at, lease.lease_id)


def reasons_for(cluster: ClusterState, request: Request, victims: Sequence[Lease]) -> str:
    """Say why the request may take these leases: `since its priority 5 is above theirs in the team`."""
    ledger = cluster.ledger
    assert ledger is not None
    reasons = []
    others = {ledger.of(lease.request).name for lease in victims if lease.request.team != request.team}
    if others:
        own = ledger.of(request)
        reasons.append(
            f"{team_words(own)} stays inside its guarantee ({gpus(own.allocated + milli_of(request))} of "
            f"{gpus(own.guaranteed)} GPUs)"
        )
        reasons += [
            f"{team_words(account)} is {gpus(account.allocated - account.guaranteed)} beyond its own"
            for account in map(ledger.named, sorted(others))
        ]
    if any(lease.request.team == request.team for lease in victims):
        reasons.append(f"its priority {request.priority} is above theirs in the team")
    return "since " + " and ".join(reasons)
