"""Which leases a request has the right to end, and in what order they go."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from heapq import heapify, heappop, heappush
from typing import NamedTuple

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MAX_PRIORITY, Lease, Request
from resource_manager.core.team_ledger import Account, TeamLedger, gpu_types_of, held_milli, milli_of
from resource_manager.core.teams import milli_of_gpus
from resource_manager.scheduling.queue.quotas import stays_inside, types_left

Share = tuple[tuple[float, float], ...]
"""Sort key of a team: of each level of its tree what it holds of its guarantee, and by weight, negative."""


Cheapness = tuple[int, float, float, str]
"""Sort key of a lease among its team's: lowest priority, least work lost, newest."""


CHEAPEST: Cheapness = (-MAX_PRIORITY - 1, -math.inf, -math.inf, "")


class Planned:
    """What requests are to get that leases end for, `to_come` by lease id, once those `ending` have ended.

    So much of what a team holds in the trial, in thousandths of GPUs, it does not hold yet, and is not to
    lose other leases for.
    """

    def __init__(self, cluster: ClusterState, ending: Iterable[Lease] = ()) -> None:
        self._cluster = cluster
        self.ending = [*ending]
        self.to_come: dict[str, Lease] = {}
        self._milli: dict[tuple[str, str], int] = {}

    def milli(self, account: Account, gpu_type: str = "") -> int:
        """Return what the team holds less than the trial says, of that type or of all."""
        return self._milli.get((account.name, gpu_type), 0)

    def add(self, lease: Lease | None) -> None:
        """Count a lease that is to come, if there is one."""
        if lease is None:
            return
        self.to_come[lease.lease_id] = lease
        if (ledger := self._cluster.ledger) is None:
            return
        amounts = {"": held_milli(lease), **gpu_types_of(lease, self._cluster.by_name)}
        for account in ledger.of(lease.request).path:
            for gpu_type, milli in amounts.items():
                key = account.name, gpu_type
                self._milli[key] = self._milli.get(key, 0) + milli


class _Level(NamedTuple):
    """A team on a victim's side, and its guarantee as far as its parents' count; by type if it is by type."""

    account: Account
    guaranteed: int
    by_type: Mapping[str, int]


class _Side(NamedTuple):
    """What decides between the request's team and another: both sides below their common parent.

    The highest account of the request's own side decides whether it has the right: a team without a guarantee
    lives on that of its parent. On the other side every level must be over its guarantee.
    """

    decides: Account
    levels: tuple[_Level, ...]


class Right:
    """Right of one request to take leases, judged by what the teams hold at each moment of a search."""

    def __init__(
        self, cluster: ClusterState, request: Request, now: float, planned: Planned | None = None
    ) -> None:
        ledger = cluster.ledger
        assert ledger is not None
        self._cluster = cluster
        self._ledger = ledger
        self._request = request
        self._now = now
        self._planned = planned or Planned(cluster)
        self._above = ledger.of(request).path
        self._sides: dict[str, _Side] = {}

    def leases(self) -> list[Lease]:
        """Return the leases that may be taken at some moment, by everything that does not change."""
        team, priority = self._request.team, self._request.priority
        newest: dict[str, float | None] = {}
        """Latest start of a lease of each team that may be taken; None if none may."""
        found: list[Lease] = []
        own_milli = 0
        for lease in self._cluster.leases.values():
            other = lease.request
            its_team = other.team
            if its_team not in newest:
                newest[its_team] = self._newest(its_team)
            latest = newest[its_team]
            if latest is None or lease.granted_at > latest or not other.preemptible:
                continue
            if lease.quarantined or lease.preempted_by:
                continue
            if its_team == team:
                if other.priority >= priority:
                    continue
                own_milli += held_milli(lease)
            found.append(lease)
        without = {name for name in newest if name != team and not self.begins(self.decides(name), own_milli)}
        return [lease for lease in found if lease.request.team not in without] if without else found

    def _newest(self, team: str) -> float | None:
        """Return the latest start of a lease of the team that may be taken; None if none may."""
        if team != self._request.team and any(
            not (level.by_type or self._is_beyond(level)) for level in self._side(team).levels
        ):
            return None
        return self._now - self._ledger.min_runtime_s(team)

    def allows(self, lease: Lease) -> bool:
        """Return True if the lease, one of `leases`, may be taken now."""
        team = lease.request.team
        return team == self._request.team or (
            self._has_right(team) and all(self._is_over(level, lease) for level in self._side(team).levels)
        )

    def holds(self, taken: Iterable[Lease]) -> bool:
        """Return True if the team may have these leases of others with what it holds now itself."""
        teams = {lease.request.team for lease in taken} - {self._request.team}
        return all(map(self._has_right, teams))

    def to_end_first(self, leases: Iterable[Lease]) -> list[Lease]:
        """Return the team's own leases of these, the cheapest first, if others' may go only without them."""
        teams = {lease.request.team for lease in leases} - {self._request.team}
        if all(map(self._has_right, teams)):
            return []
        own = (lease for lease in leases if lease.request.team == self._request.team)
        return sorted(own, key=cheapest_first)

    def in_order(self, leases: Iterable[Lease], first: Iterable[Lease] = ()) -> Iterator[Lease]:
        """Yield those that may be taken, other teams' first; the caller ends each before the next step.

        Of the team's own leases so many of `first` come before all that others' may go then.
        """
        mine: list[Lease] = []
        queues: dict[str, list[Lease]] = {}
        of_team: dict[str, list[Lease]] = {self._request.team: mine}
        for lease in leases:
            team = lease.request.team
            if team not in of_team:
                of_team[team] = queues.setdefault(self._ledger.named(team).name, [])
            of_team[team].append(lease)
        ended: set[str] = set()
        for lease in first:
            if all(map(self._has_right, queues)):
                break
            ended.add(lease.lease_id)
            yield lease
        is_sorted: set[str] = set()

        def entry(team: str) -> tuple[Share, Cheapness, str]:
            """Of teams equally over their share, the one whose next lease is the cheapest comes first."""
            if team not in is_sorted:
                queues[team].sort(key=cheapest_first, reverse=True)
                is_sorted.add(team)
            return _most_over(self._ledger, team), cheapest_first(queues[team][-1]), team

        # A team's leases are sorted only once it is its turn: until then it stands before all equal ones.
        heap = [(_most_over(self._ledger, team), CHEAPEST, team) for team in queues]
        heapify(heap)
        while heap:
            key = heappop(heap)
            team = key[-1]
            # What a team holds only falls here, so the first entry that is still true is the next.
            if (current := entry(team)) != key:
                heappush(heap, current)
                continue
            lease = queues[team].pop()
            if self.allows(lease):
                yield lease
            elif not any(level.by_type for level in self._side(team).levels):
                continue  # nor are its other leases beyond the guarantee
            if queues[team]:
                heappush(heap, entry(team))
        for lease in sorted(mine, key=cheapest_first):
            if lease.lease_id not in ended:
                yield lease

    def _has_right(self, team: str) -> bool:
        """Return True if leases of that team may be taken for GPUs of all types of the request."""
        decides, request = self.decides(team), self._request
        if not decides.team.guaranteed_by_type:
            return self.begins(decides)
        inside = types_left([decides], request)
        return self.begins(decides) and inside == [*request.gpu_types]

    def begins(self, decides: Account, own_milli: int = 0) -> bool:
        """Return True if others' leases may be taken for GPUs of some type.

        That is once so much that the account holds has ended.
        """
        return milli_of(self._request) > 0 and stays_inside(decides, self._request, -own_milli)

    def decides(self, team: str) -> Account:
        """Return the account that decides whether leases of that team may be taken."""
        return self._side(team).decides

    def most_of(self, team: str) -> float:
        """Return the thousandths of GPUs by which the team is beyond what protects it."""
        levels = [level for level in self._side(team).levels if not level.by_type]
        return min((level.account.allocated - self._milli(level) for level in levels), default=math.inf)

    def _is_over(self, level: _Level, lease: Lease) -> bool:
        """Return True if the team is over its guarantee: of a type that the lease holds, if it is by type."""
        if not level.by_type:
            return self._is_beyond(level)
        account, planned = level.account, self._planned
        return any(
            account.by_type.get(gpu_type, 0) - planned.milli(account, gpu_type)
            > level.by_type.get(gpu_type, 0)
            for gpu_type in gpu_types_of(lease, self._cluster.by_name)
        )

    def _is_beyond(self, level: _Level) -> bool:
        return level.account.allocated > self._milli(level)

    def _milli(self, level: _Level) -> int:
        return level.guaranteed + self._planned.milli(level.account)

    def beyond(self, leases: Sequence[Lease]) -> int:
        """Return by how many thousandths the leases' team is over its guarantee, as far as its parents'.

        Where that is by type it is so for the type of the leases of which the team is over the most.
        """
        account, by_name = self._ledger.of(leases[0].request), self._cluster.by_name
        types = {name for lease in leases for name in gpu_types_of(lease, by_name)}
        return min(
            (
                max(level.account.by_type.get(name, 0) - level.by_type.get(name, 0) for name in types)
                if level.by_type and types
                else level.account.allocated - level.guaranteed
                for level in self._side(account.name).levels
            ),
            default=account.allocated,
        )

    def _side(self, team: str) -> _Side:
        if team not in self._sides:
            own = self._ledger.named(team)
            below = [account for account in own.path if account not in self._above]
            common = below[-1].parent if below else own
            place = len(self._above) if common is None else self._above.index(common)
            levels = tuple(_level_of(below[index:]) for index in range(len(below)))
            self._sides[team] = _Side(self._above[max(place - 1, 0)], levels)
        return self._sides[team]


def _level_of(upwards: Sequence[Account]) -> _Level:
    """Return the level of the first of these accounts, whose parents are the others."""
    guaranteed = min(account.guaranteed for account in upwards)
    by_type = {
        gpu_type: min(
            guaranteed,
            *(
                milli_of_gpus(account.team.guaranteed_by_type.get(gpu_type, 0))
                for account in upwards
                if account.team.guaranteed_by_type
            ),
        )
        for gpu_type in upwards[0].team.guaranteed_by_type
    }
    return _Level(upwards[0], guaranteed, by_type)


def _most_over(ledger: TeamLedger, team: str) -> Share:
    """Return the sort key of a team's share, from the top of the tree down; the most over comes first."""
    return tuple(
        (
            -account.allocated / account.guaranteed if account.guaranteed else -math.inf,
            -account.allocated / account.team.weight if account.team.weight else -math.inf,
        )
        for account in reversed(ledger.named(team).path)
    )


def cheapest_first(lease: Lease) -> Cheapness:
    """Return the sort key of a lease among its team's: lowest priority, least work lost, newest."""
    saved_at = lease.granted_at if lease.checkpoint_at is None else max(lease.checkpoint_at, lease.granted_at)
    return (lease.request.priority, -saved_at, -lease.arrived_at, lease.lease_id)


class PreemptionRight(NamedTuple):
    """Why a request may take leases: of other teams, with its guarantee in milli, and of its own.

    `team` is the one whose guarantee gives the right, that of the request or one above it. `others` are the
    teams, each with the milli by which it is beyond its guarantee; `priority` is that of the request if it
    takes leases of its own team.
    """

    team: str
    would_hold: int
    guaranteed: int
    others: tuple[tuple[str, int], ...]
    priority: int | None


def right_to(cluster: ClusterState, request: Request, victims: Sequence[Lease]) -> PreemptionRight:
    """Return why the request may take these leases."""
    ledger = cluster.ledger
    assert ledger is not None
    mine = [lease for lease in victims if lease.request.team == request.team]
    others: dict[str, list[Lease]] = {}
    for lease in victims:
        if lease.request.team != request.team:
            others.setdefault(ledger.of(lease.request).name, []).append(lease)
    right = Right(cluster, request, 0.0)
    own = right.decides(min(others)) if others else ledger.of(request)
    would_hold = own.allocated + milli_of(request)
    if not all(right.begins(right.decides(name)) for name in others):
        would_hold -= sum(map(held_milli, mine))
    beyond = tuple((name, right.beyond(leases)) for name, leases in sorted(others.items()))
    return PreemptionRight(own.name, would_hold, own.guaranteed, beyond, request.priority if mine else None)
