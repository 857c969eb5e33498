"""Promises about preempted leases, followed change by change beside the state that the checker keeps.

A preempted task goes on: however often its owner asks again, it keeps its place and the count of its restarts
until it ends for another reason. No team inside its guarantee loses a lease to another team: what it holds,
less what is ending already, is added up here lease by lease.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from resource_manager.core.changes import Change, Granted, Outcome, Preempting, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.scheduling.preemption.requeueing import restarts_of


class Preemptions:
    """Leases that were taken for others: by right, told once, and back in the queue at their old place."""

    def __init__(self) -> None:
        self.victim = ""
        """The id of the preempted lease that the change before this one ended."""
        self.count = 0
        self.restarts: dict[tuple[str, int], int] = {}
        """How often each lease's task was preempted before, by lease id and fencing token."""
        self._ended: Lease | None = None
        self._of_task: Counter[str] = Counter()

    def follow(self, cluster: ClusterState, change: Change) -> Iterator[str]:
        """Yield what the next change breaks; the cluster is the state before it."""
        ended, self._ended, self.victim = self._ended, None, ""
        if ended is not None:
            yield from self._queued_again(ended, change, cluster.sequence)
        if isinstance(change, Preempting):
            self.count += bool(change.preemptor)
            yield from _by_right(cluster, change) if change.preemptor else _taken_back(cluster, change)
        elif isinstance(change, Queued) and ended is None:
            self._of_task[change.request.lease_id] = 0
            yield from self._counted(change.request)
        elif isinstance(change, Granted):
            lease_id = change.lease.lease_id
            if lease_id not in cluster.pending:
                self._of_task[lease_id] = 0
            self.restarts[lease_id, change.lease.fencing_token] = self._of_task[lease_id]
            yield from self._counted(change.lease.request)
        elif isinstance(change, Released) and change.outcome == Outcome.PREEMPTED:
            lease = cluster.leases.get(change.lease_id)
            if lease is not None and lease.preempt_until < math.inf:
                self._ended, self.victim = lease, lease.lease_id

    def _queued_again(self, lease: Lease, change: Change, last: int) -> Iterator[str]:
        if not isinstance(change, Queued) or change.request.lease_id != lease.lease_id:
            yield f"{lease.lease_id} was preempted and lost: {change} follows its end"
            return
        place = (lease.granted_at if lease.queued_at is None else lease.queued_at, lease.sequence)
        if not lease.preempted_by and change.at > lease.preempt_until + lease.request.ttl_s:
            place = (change.at, last + 1)  # the preemption was taken back a while ago: at the end
        if (change.queued_at, change.sequence) != place:
            yield f"{lease.lease_id} lost its place in the queue when it was preempted"
        self._of_task[lease.lease_id] += 1
        yield from self._counted(change.request)

    def _counted(self, request: Request) -> Iterator[str]:
        count, told = self._of_task[request.lease_id], restarts_of(request.labels)
        if told != count:
            yield f"{request.lease_id} was preempted {count} times, and is told of {told}"


def _by_right(cluster: ClusterState, change: Preempting) -> Iterator[str]:
    victim, pending = cluster.leases.get(change.lease_id), cluster.pending.get(change.preemptor)
    if victim is None or victim.preempted_by:
        yield f"{change.lease_id} is preempted and holds nothing, or is so already"
    elif pending is None:
        yield f"{change.lease_id} is preempted for {change.preemptor}, which does not wait"
    elif pending.request.team == victim.request.team:
        if victim.request.priority >= pending.request.priority:
            yield f"{change.lease_id} is preempted for {change.preemptor} of its team: no more urgent"
    elif (ledger := cluster.ledger) is not None and not change.by_operator:
        taker = ledger.of(pending.request)
        asked = 1000 * pending.request.gpus * pending.request.nodes
        # While others are ending, what is kept for those they end for counts as held.
        if not cluster.preempting and taker.allocated + asked > taker.guaranteed:
            yield f"{change.preemptor} preempts {change.lease_id} beyond the guarantee of its team"
        for team in protected(cluster, victim.request.team, pending.request.team):
            yield f"{change.lease_id} is preempted although team {team} is inside its guarantee"


def _taken_back(cluster: ClusterState, change: Preempting) -> Iterator[str]:
    victim = cluster.leases.get(change.lease_id)
    if victim is None or not victim.preempted_by:
        yield f"the preemption of {change.lease_id} is taken back, and it is not preempted"
    elif victim.preempted_by in cluster.pending:
        yield f"the preemption of {change.lease_id} is taken back, and {victim.preempted_by} waits for it"


def protected(cluster: ClusterState, team: str, taker: str) -> Iterator[str]:
    """Yield the teams that are inside their guarantee, of a victim's and those above it up to the taker's.

    A guarantee counts as far as those above it do.
    """
    above = set(_upwards(cluster, taker))
    levels = [name for name in _upwards(cluster, team) if name not in above]
    guaranteed = {rules.name: rules.guaranteed for rules in cluster.teams.teams}
    for place, name in enumerate(levels):
        holds = sum(
            len(member.gpu_ids) * lease.request.gpu_milli / 1000
            for lease in (*cluster.leases.values(), *cluster.remainders.values())
            if name in _upwards(cluster, lease.request.team) and not lease.preempted_by
            for member in lease.members
        )
        if holds <= min(guaranteed.get(each, 0) for each in levels[place:]):
            yield name


def _upwards(cluster: ClusterState, team: str) -> list[str]:
    """Return the team and those above it; those without rules are one."""
    parents = {rules.name: rules.parent for rules in cluster.teams.teams}
    if team not in parents:
        return [""]
    found = [team]
    while parent := parents[found[-1]]:
        found.append(parent)
    return found
