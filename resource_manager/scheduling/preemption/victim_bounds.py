"""Bounds of what preemption could free for a request, so that a search that must be in vain is not made.

They follow from the state and the time alone, and are kept beside the state: each step looks at the nodes
that changed. What they exclude has no victims in whatever order these are searched for, so a process that has
just started decides as one that has kept them for days.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Hashable, Iterable, Iterator
from typing import NamedTuple

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, can_meet
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request
from resource_manager.core.node_state import NodeState
from resource_manager.core.pending import Kind
from resource_manager.core.team_ledger import Account, TeamLedger, held_milli, milli_of
from resource_manager.scheduling.placement.gang_slots import slots
from resource_manager.scheduling.preemption.victim_right import Planned, Right
from resource_manager.scheduling.queue.quotas import Stop, StopKind, stop_of

MAX_KEPT = 2048
"""The most kinds of requests of which something is kept."""

ROUNDING = 1.0 + 1e-9
"""Factor by which sums of amounts are taken to be larger, so that rounding hides no capacity."""


class _Takeable(NamedTuple):
    """Leases of one node that may be preempted for somebody, by team; `key` tells whether it changed."""

    key: tuple[Hashable, ...]
    by_team: dict[str, list[Lease]]


class VictimBounds:
    """Answers, for requests of any team, whether the leases that it may take could make room for it."""

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._forget(None, -math.inf)

    def _forget(self, ledger: TeamLedger | None, now: float) -> None:
        count = len(self._cluster.nodes)
        self._ledger = ledger
        self._now = now
        self._mark = -1
        self._due = [math.inf] * count
        self._of_teams: dict[str, dict[Account, dict[str, float]]] = {}
        self._in_vain: dict[Kind, int] = {}
        self._judged: dict[Kind, bool] = {}
        self._groups: dict[Kind, _Group] = {}
        self._shapes: dict[Kind, _Shape] = {}
        self.nodes = [_Takeable((), {})] * count
        self.teams: dict[str, Counter[int]] = {}
        """The number of members that may be taken of each team, by the priority of their leases."""
        self.milli: Counter[tuple[str, int]] = Counter()
        """What they hold in thousandths of GPUs, by team and priority."""
        self.changed: list[int] = []
        """Positions of all nodes, then of those that changed, with repeats; its length tells states apart."""

    @classmethod
    def of(cls, cluster: ClusterState, now: float) -> VictimBounds:
        """Return the bounds that are kept beside the cluster, for the state that it is in now."""
        bounds: VictimBounds | None = cluster.policy_cache.get(cls)
        if bounds is None:
            bounds = cluster.policy_cache[cls] = cls(cluster)
        bounds._follow(now)
        return bounds

    def exclude(self, kind: Kind, request: Request, planned: Planned) -> bool:
        """Return True if no leases that a request of that kind may take could make room for it."""
        if self.is_in_vain(kind):
            return True
        lower = [priority for priority in self.teams.get(request.team, ()) if priority < request.priority]
        # Of priorities with the same leases below them one is judged for all.
        alike = (request.team, tuple(lower), request.preemptible, request.owner, request.shape)
        if alike not in self._judged:
            self._judged[alike] = self._excludes(request, lower, planned)
        if self._judged[alike]:
            self.was_in_vain(kind)
        return self._judged[alike]

    def _excludes(self, request: Request, lower: list[int], planned: Planned) -> bool:
        cluster, ledger = self._cluster, self._cluster.ledger
        assert ledger is not None
        stop = stop_of(ledger, request)
        if stop is not None and stop.kind is StopKind.RUNTIME:  # others of its kind may state a shorter one
            stop = None
        own_milli = sum(self.milli[request.team, priority] for priority in lower)
        right = Right(cluster, request, self._now, planned)
        caps: dict[str, float] = {}
        for account, of_teams in self._others(request, right).items():
            if right.begins(account, own_milli):
                caps |= of_teams
        if stop is not None and not self._may_be_lifted(stop, request, own_milli, caps):
            return True
        if not (caps or lower):
            return True
        most = max(lower, default=None)
        key = (request.team, most, frozenset(caps))
        group = self._groups.get(key)
        if group is None:
            group = self._groups[key] = _Group(self, request.team, most)
        group.follow(cluster, caps)
        shape = self._shapes.get((request.shape, key))
        if shape is None:
            shape = self._shapes[request.shape, key] = _Shape(request)
        return not shape.may_fit(cluster, group, self.changed)

    def is_in_vain(self, kind: Kind) -> bool:
        """Return True if the search for that kind of request was in vain in a state equal to this one."""
        return self._in_vain.get(kind) == len(self.changed)

    def was_in_vain(self, kind: Kind) -> None:
        """Remember that search until a lease, a node or a rule changes, or a lease may be taken newly."""
        self._in_vain[kind] = len(self.changed)

    def _others(self, request: Request, right: Right) -> dict[Account, dict[str, float]]:
        """Return the teams that may lose leases to the request's, with how much of each, by what decides."""
        if request.team not in self._of_teams:
            found = self._of_teams[request.team] = {}
            for team in self.teams:
                if team != request.team and (most := right.most_of(team)) > 0:
                    found.setdefault(right.decides(team), {})[team] = most
        return self._of_teams[request.team]

    def _may_be_lifted(self, stop: Stop, request: Request, own_milli: int, caps: dict[str, float]) -> bool:
        """Return True if enough may be taken of the teams under the quota that stops the request."""
        account, asked, ledger = stop.account, milli_of(request), self._ledger
        assert ledger is not None
        if stop.kind is StopKind.GUARANTEE:
            return False  # it counts only what must not be taken
        if stop.kind is StopKind.OWNER or account.limit is None:
            return own_milli > 0
        below = (team for team in caps if account in ledger.named(team).path)
        freed = own_milli + sum(self.milli[team, each] for team in below for each in self.teams[team])
        return account.allocated + asked - freed <= account.limit

    def _follow(self, now: float) -> None:
        cluster = self._cluster
        positions = cluster.changed_since(self._mark)
        is_other = positions is None or cluster.ledger is not self._ledger or now < self._now
        if is_other or max(len(self._shapes), len(self._in_vain), len(self.changed) // 64) > MAX_KEPT:
            self._forget(cluster.ledger, now)
            positions = [*range(len(self.nodes))]
        before, self._now = len(self.changed), now
        due = (position for position, at in enumerate(self._due) if at <= now)
        for position in dict.fromkeys((*(positions or ()), *due)):
            self._read(position)
        self._mark = cluster.mark
        if len(self.changed) != before:
            self._of_teams.clear()
            self._judged.clear()

    def _read(self, position: int) -> None:
        """Read a node again, and note if it has changed."""
        state = self._cluster.nodes[position]
        by_team: dict[str, list[Lease]] = {}
        of_leases: list[Hashable] = []
        due = math.inf
        ledger = self._ledger
        assert ledger is not None
        for lease in state.leases.values():
            request = lease.request
            may_be_taken = request.preemptible and not (lease.quarantined or lease.preempted_by)
            if may_be_taken:
                protected_s = ledger.min_runtime_s(request.team)
                if lease.granted_at > self._now - protected_s:
                    may_be_taken, due = False, min(due, lease.granted_at + protected_s)
                else:
                    by_team.setdefault(request.team, []).append(lease)
            of_leases += (
                lease.key,
                lease.fencing_token,
                len(lease.members),
                lease.checkpoint_at,
                may_be_taken,
            )
        self._due[position] = due
        free = (*state.gpu_free.values(), *state.free.values(), *state.closed_gpus)
        before, node = self.nodes[position], _Takeable((state.is_open, *free, *of_leases), by_team)
        if node.key != before.key:
            self.nodes[position] = node
            self.changed.append(position)
            self._count(state, before, -1)
            self._count(state, node, 1)

    def _count(self, state: NodeState, node: _Takeable, sign: int) -> None:
        for team, leases in node.by_team.items():
            numbers = self.teams.setdefault(team, Counter())
            for lease in leases:
                priority, members = lease.request.priority, [*lease.on(state.name)]
                held = sum(len(member.gpu_ids) for member in members) * lease.request.gpu_milli
                numbers[priority] += sign * len(members)
                self.milli[team, priority] += sign * held
                if not numbers[priority]:
                    del numbers[priority], self.milli[team, priority]
            if not numbers:
                del self.teams[team]


class _Group:
    """What could be free of each node for all requests that may take the same leases."""

    def __init__(self, bounds: VictimBounds, team: str, most: int | None) -> None:
        self._bounds = bounds
        self._team = team
        self._most = most
        self._caps: dict[str, float] = {}
        self._done = 0
        self.capacity = [FreeCapacity({}, {})] * len(bounds.nodes)
        self.milli = [0.0] * len(bounds.nodes)
        """The most thousandths of GPUs that may be free of each node, as no team loses all it has."""

    def follow(self, cluster: ClusterState, caps: dict[str, float]) -> None:
        """Bring it up to date; `caps` is how much each team is beyond its guarantee."""
        changed = self._bounds.changed
        if self._done == len(changed):
            return
        most = MILLI_PER_GPU * len(cluster.whole_free_masks)
        caps = {team: min(cap, most) for team, cap in caps.items()}
        positions = dict.fromkeys(changed[self._done :])
        again: Iterable[int] = positions if caps == self._caps else range(len(self.milli))
        self._done, self._caps = len(changed), caps
        for position in positions:
            self.capacity[position] = self._capacity(cluster.nodes[position])
        for position in again:
            self.milli[position] = self._milli(cluster.nodes[position])

    def _taken(self, state: NodeState) -> Iterator[tuple[str, list[Lease]]]:
        for team, leases in self._bounds.nodes[state.index].by_team.items():
            if team == self._team:
                if self._most is not None:
                    yield team, [lease for lease in leases if lease.request.priority <= self._most]
            elif team in self._caps:
                yield team, leases

    def _capacity(self, state: NodeState) -> FreeCapacity:
        gpus, amounts = dict(state.gpu_free), dict(state.free)
        for _, leases in self._taken(state):
            for lease in leases:
                for member in lease.on(state.name):
                    for gpu_id in state.gpu_ids_of(member):
                        if gpu_id in gpus and gpu_id not in state.closed_gpus:
                            gpus[gpu_id] += lease.request.gpu_milli
                    for name, amount in lease.request.resources.items():
                        amounts[name] = amounts.get(name, 0) + amount
        return FreeCapacity(gpus, {name: amount * ROUNDING for name, amount in amounts.items()})

    def _milli(self, state: NodeState) -> float:
        free: float = state.free_milli
        for team, leases in self._taken(state):
            held = [held_milli(lease) for lease in leases]
            cap = self._caps.get(team, math.inf) if team != self._team else math.inf
            free += min(sum(held), cap + max(held, default=0))
        return free


class _Shape:
    """The nodes on which a request of one shape may fit once what a group may take has ended."""

    def __init__(self, request: Request) -> None:
        self._request = request
        self._members: dict[int, int] = {}
        self._done = 0

    def may_fit(self, cluster: ClusterState, group: _Group, changed: list[int]) -> bool:
        """Return True if the request, or enough members of the gang, may fit."""
        request = self._request
        for position in dict.fromkeys(changed[self._done :]):
            if members := self._members_on(cluster.nodes[position], group.capacity[position]):
                self._members[position] = members
            else:
                self._members.pop(position, None)
        self._done = len(changed)
        one = request.gpus * request.gpu_milli
        count: Counter[str] = Counter()
        for position, members in self._members.items():
            if members := min(members, int(group.milli[position] // one)) if one else members:
                labels = cluster.nodes[position].node.labels
                domain = labels[request.same] if request.same else ""
                count[domain] += members
                if count[domain] >= request.nodes:
                    return True
        return False

    def _members_on(self, state: NodeState, free: FreeCapacity) -> int:
        node, request = state.node, self._request
        if not state.is_open or not can_meet(node, request):
            return 0
        is_apart = request.same and request.same not in node.labels
        return 0 if is_apart else slots(node, request, free)
