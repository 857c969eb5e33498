"""Ledger of what each team holds, kept up to date with the leases, so that a request costs a few lookups."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import NamedTuple

from resource_manager.core.models import MILLI_PER_GPU, Lease, Request
from resource_manager.core.node_state import NodeState
from resource_manager.core.teams import Team, Teams, milli_of_gpus

LN_2 = math.log(2.0)

UNNAMED = ""
"""Account of all teams that the rules do not name: they share one remainder."""


def milli_of(request: Request) -> int:
    """Return the thousandths of GPUs that a lease of the request holds, over all its members."""
    return request.nodes * request.gpus * request.gpu_milli


def held_milli(lease: Lease) -> int:
    """Return the thousandths of GPUs that a lease holds, over the members that it still has."""
    members = lease.members
    gpus = len(members[0].gpu_ids) if len(members) == 1 else sum(len(member.gpu_ids) for member in members)
    return gpus * lease.request.gpu_milli


class Use(NamedTuple):
    """Decayed use in weighted GPU seconds, and the time for which it was computed, in seconds."""

    amount: float
    at: float

    def at_time(self, at: float, half_life_s: float) -> float:
        """Return what is left of it at a later time."""
        return self.amount * 2.0 ** ((self.at - at) / half_life_s) if self.amount else 0.0


def at_time(uses: Mapping[str, Use], at: float, half_life_s: float) -> dict[str, Use]:
    """Return what is left of the use of teams at a later time."""
    return {team: Use(use.at_time(at, half_life_s), at) for team, use in uses.items()}


NO_USE = Use(0.0, 0.0)
NO_USES: Mapping[str, Use] = MappingProxyType({})


def held_use(rate: float, seconds: float, half_life_s: float) -> float:
    """Return the decayed use of holding `rate` weighted GPUs for so long, as of the end of that time."""
    return rate * half_life_s / LN_2 * -math.expm1(-max(seconds, 0.0) * LN_2 / half_life_s)


@dataclass(eq=False, repr=False, slots=True)
class Account:
    """Account of what one team and those below it hold, in milli of GPUs: read it, never write it.

    `fixed` is the part that may not be preempted, `by_type` and `fixed_by_type` are the parts of both by type
    of GPU where guarantees are by type, and `by_owner` by owner (a team's own leases only). `use` is the
    decayed use by the team's own leases that have ended.
    """

    team: Team
    guaranteed: int = field(init=False)
    limit: int | None = field(init=False)
    parent: Account | None = None
    children: list[Account] = field(default_factory=list)
    allocated: int = 0
    fixed: int = 0
    by_type: dict[str, int] = field(default_factory=dict)
    fixed_by_type: dict[str, int] = field(default_factory=dict)
    by_owner: dict[str, int] = field(default_factory=dict)
    use: Use = NO_USE
    path: tuple[Account, ...] = ()
    """The account and those above it."""

    def __post_init__(self) -> None:
        self.guaranteed = milli_of_gpus(self.team.guaranteed)
        self.limit = None if self.team.limit is None else milli_of_gpus(self.team.limit)

    @property
    def name(self) -> str:
        return self.team.name


class TeamLedger:
    """Accounts of all teams under one set of rules, with these leases."""

    __slots__ = ("_is_typed", "accounts", "rules", "tops", "version")

    def __init__(self, rules: Teams, leases: Iterable[Lease], nodes: Mapping[str, NodeState]) -> None:
        self.rules = rules
        self.version = 0
        """Number of leases counted so far: it grows whenever an account changes."""
        self.accounts = {team.name: Account(team) for team in rules.teams}
        self.accounts.setdefault(UNNAMED, Account(Team(UNNAMED)))
        for account in self.accounts.values():
            if account.team.parent:
                account.parent = self.accounts[account.team.parent]
                account.parent.children.append(account)
        for account in self.accounts.values():
            path = [account]
            while above := path[-1].parent:
                path.append(above)
            account.path = tuple(path)
        self.tops = [account for account in self.accounts.values() if account.parent is None]
        self._is_typed = any(team.guaranteed_by_type for team in rules.teams)
        for lease in leases:
            self.add(lease, nodes)

    def of(self, request: Request) -> Account:
        return self.named(request.team)

    def named(self, team: str) -> Account:
        return self.accounts.get(team) or self.accounts[UNNAMED]

    def add(self, lease: Lease, nodes: Mapping[str, NodeState]) -> None:
        self._count(lease, nodes, 1)

    def remove(self, lease: Lease, nodes: Mapping[str, NodeState]) -> None:
        self._count(lease, nodes, -1)

    def min_runtime_s(self, team: str) -> float:
        """Return for how long a lease of the team is not preempted after its grant, in seconds."""
        own_s = self.named(team).team.min_runtime_s
        return self.rules.min_runtime_s if own_s is None else own_s

    def rate_of(self, lease: Lease, nodes: Mapping[str, NodeState]) -> float:
        """Return the GPUs of a lease, each times the weight of its type."""
        weights = self.rules.gpu_weights
        if not weights:
            return held_milli(lease) / MILLI_PER_GPU
        types = gpu_types_of(lease, nodes)
        return sum(weights.get(name, 1.0) * milli for name, milli in types.items()) / MILLI_PER_GPU

    def use_after(self, use: Use, lease: Lease, at: float, nodes: Mapping[str, NodeState]) -> Use:
        """Return a team's use after its lease ended at that time, given its use before."""
        half_life_s = self.rules.half_life_s
        held = held_use(self.rate_of(lease, nodes), at - lease.granted_at, half_life_s)
        return Use(use.at_time(at, half_life_s) + held, at)

    def take_over(self, uses: Mapping[str, Use]) -> None:
        """Set the use by ended leases of those of these teams that have an account."""
        for team, use in uses.items():
            if team in self.accounts:
                self.accounts[team].use = use

    @property
    def uses(self) -> dict[str, Use]:
        """The use of each team that has any."""
        return {name: account.use for name, account in self.accounts.items() if account.use.amount}

    def _count(self, lease: Lease, nodes: Mapping[str, NodeState], sign: int) -> None:
        request = lease.request
        milli = sign * held_milli(lease)
        if not milli:
            return
        self.version += 1
        own = self.of(request)
        types = gpu_types_of(lease, nodes) if self._is_typed else {}
        for account in own.path:
            account.allocated += milli
            counted = [account.by_type]
            if not request.preemptible:
                account.fixed += milli
                counted.append(account.fixed_by_type)
            for gpu_type, part in types.items():
                for by_type in counted:
                    by_type[gpu_type] = by_type.get(gpu_type, 0) + sign * part
        left = own.by_owner.get(request.owner, 0) + milli
        if left:
            own.by_owner[request.owner] = left
        else:
            own.by_owner.pop(request.owner, None)


def gpu_types_of(lease: Lease, nodes: Mapping[str, NodeState]) -> dict[str, int]:
    """Return the thousandths of GPUs that the lease holds by type of GPU."""
    found: dict[str, int] = {}
    for member in lease.members:
        state = nodes[member.node]
        if len(state.gpu_types) == 1:
            types = state.gpu_types * len(member.gpu_ids)
        else:  # by the devices of the grant, which may have other numbers now
            kinds = {gpu.gpu_id: gpu.gpu_type for gpu in state.node.gpus}
            types = tuple(kinds.get(gpu_id, "") for gpu_id in state.gpu_ids_of(member))
            types += ("",) * (len(member.gpu_ids) - len(types))
        for gpu_type in types:
            found[gpu_type] = found.get(gpu_type, 0) + lease.request.gpu_milli
    return found
