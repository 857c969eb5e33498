"""Fair use with memory: what teams held, with half-life, and the orders that compare it.

`fair_usage` is Slurm's classic fair share, F = 2^(-U/S) with the effective usage over the tree; `fair_tree`
is Slurm's level fair share, S/U among siblings, depth first (slurm.schedmd.com/classic_fair_share.html and
fair_tree.html). S are the weights, normalised among siblings.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush
from itertools import groupby

from resource_manager.core.changes import ENDS, Change, Granted, MembersReleased, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.core.pending import PendingRequest
from resource_manager.core.team_ledger import Account, Use, at_time, held_use, milli_of


@dataclass(slots=True)
class Share:
    """One account in a tree: its shares, its own use without that of those below it, and these."""

    name: str
    shares: float = 1.0
    use: float = 0.0
    below: list[Share] = field(default_factory=list)

    @property
    def total(self) -> float:
        """The use of the account and all below it."""
        return self.use + sum(child.total for child in self.below)


def fair_usage_factors(tops: Sequence[Share]) -> dict[str, float]:
    """Return F = 2^(-effective use / normalised shares) of each account, 1 for one that used nothing.

    The effective use of an account is its own part of all use, moved towards its parent's by its part of the
    siblings' shares; at the top it is its own part. Without shares F is 0.
    """
    everything = sum(account.total for account in tops)
    factors: dict[str, float] = {}

    def visit(accounts: Sequence[Share], part: float, above: float | None) -> None:
        total_shares = sum(account.shares for account in accounts)
        for account in accounts:
            own = account.shares / total_shares if total_shares else 0.0
            actual = account.total / everything if everything else 0.0
            effective = actual if above is None else actual + (above - actual) * own
            normalised = part * own
            factors[account.name] = 2.0 ** (-effective / normalised) if normalised else 0.0
            visit(account.below, normalised, effective)

    visit(tops, 1.0, None)
    return factors


def level_fair_shares(accounts: Sequence[Share]) -> list[tuple[float, Share]]:
    """Return S/U of siblings, both among themselves: infinite for one that used nothing, 0 without shares."""
    shares = sum(account.shares for account in accounts)
    uses = sum(account.total for account in accounts)
    found: list[tuple[float, Share]] = []
    for account in accounts:
        own = account.shares / shares if shares else 0.0
        used = account.total / uses if uses else 0.0
        found.append((0.0 if not own else own / used if used else math.inf, account))
    return found


def fair_tree_ranks(tops: Sequence[Share]) -> dict[str, int]:
    """Return the rank of each account, from 0 for the one whose turn it is; equal ones share a rank.

    Siblings are compared by their level fair share, the greater first; all below an account come before all
    below its next sibling. What is below siblings that are equal is compared together, each by its share
    among its own siblings, and the first of it has the rank of an equal sibling that has nothing below it.
    """
    ranks: dict[str, int] = {}
    rank = -1

    def visit(levels: list[tuple[float, Share]], is_tied: bool) -> None:
        nonlocal rank
        levels.sort(key=lambda found: -found[0])
        for _, found in groupby(levels, key=lambda found: found[0]):
            equal = [account for _, account in found]
            if not is_tied:
                rank += 1
            ranks.update((account.name, rank) for account in equal)
            is_tied = is_tied or not all(account.below for account in equal)
            if below := [entry for account in equal for entry in level_fair_shares(account.below)]:
                visit(below, is_tied)
            is_tied = False

    visit(level_fair_shares(tops), False)
    return ranks


def shares_of(cluster: ClusterState, now: float) -> list[Share]:
    """Return the teams as a tree of shares, with their decayed use up to now."""
    ledger = cluster.ledger
    if ledger is None:
        return []
    half_life_s = ledger.rules.half_life_s
    uses = {name: account.use.at_time(now, half_life_s) for name, account in ledger.accounts.items()}
    for lease in (*cluster.leases.values(), *cluster.remainders.values()):
        rate = ledger.rate_of(lease, cluster.by_name)
        uses[ledger.of(lease.request).name] += held_use(rate, now - lease.granted_at, half_life_s)

    def share(account: Account) -> Share:
        return Share(
            account.name,
            account.team.weight,
            uses[account.name],
            [share(child) for child in account.children],
        )

    return [share(account) for account in ledger.tops]


def by_fair_usage(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests with those of the team with the greatest fair share factor first."""
    factors = fair_usage_factors(shares_of(cluster, now))
    return _between(cluster, {name: -factor for name, factor in factors.items()})


def by_fair_tree(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests with those of the team that comes first in the fair tree first."""
    return _between(cluster, fair_tree_ranks(shares_of(cluster, now)))


def _between(cluster: ClusterState, turns: Mapping[str, float]) -> list[PendingRequest]:
    """Return pending requests by the turns of their teams; equal turns by what the teams hold by weight.

    Use alone grows only with time: without that one team would get two grants at one instant.
    """
    ordered = sorted(cluster.pending.values(), key=lambda pending: pending.sequence)
    ledger = cluster.ledger
    if ledger is None:
        return ordered
    if ledger.rules.preemption:
        ordered.sort(key=lambda pending: -pending.request.priority)
    queues: dict[str, list[PendingRequest]] = {}
    for pending in reversed(ordered):
        queues.setdefault(ledger.of(pending.request).name, []).append(pending)
    held = {name: ledger.accounts[name].allocated for name in queues}

    def entry(team: str) -> tuple[bool, float, float, int, str]:
        weight = ledger.accounts[team].team.weight
        by_weight = held[team] / weight if weight else math.inf
        return (not weight, turns[team], by_weight, queues[team][-1].sequence, team)

    heap = [entry(team) for team in queues]
    heapify(heap)
    found: list[PendingRequest] = []
    while heap:
        team = heappop(heap)[-1]
        pending = queues[team].pop()
        found.append(pending)
        held[team] += milli_of(pending.request)
        if queues[team]:
            heappush(heap, entry(team))
    return found


def uses_after(cluster: ClusterState, changes: Iterable[Change]) -> dict[str, Use]:
    """Return the decayed use after the changes of one commit: of teams whose leases end, or that get rules.

    A store that keeps the changes in effect, and not the fold of all, keeps it beside them.
    """
    if (ledger := cluster.ledger) is None:
        return {}
    uses: dict[str, Use] = {}
    begun: dict[tuple[str, int], Lease] = {}
    for change in changes:
        if isinstance(change, TeamsChanged):
            uses = at_time(ledger.uses | uses, change.at, ledger.rules.half_life_s)
        elif isinstance(change, Granted):
            begun[change.lease.lease_id, change.lease.fencing_token] = change.lease
        elif isinstance(change, ENDS):
            key = (change.lease_id, change.fencing_token)
            if (lease := begun.get(key) or cluster.holding(*key)) is None:
                continue
            if isinstance(change, MembersReleased):
                ended = tuple(member for rank, member in lease.ranked if rank in change.ranks)
                lease = replace(lease, members=ended)
            account = ledger.of(lease.request)
            use = uses.get(account.name, account.use)
            uses[account.name] = ledger.use_after(use, lease, change.at, cluster.by_name)
    return uses
