"""Order between teams: those inside their guarantee first, then by the share that the next job would make."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Iterable, Iterator
from heapq import heapify, heappop, heappush

from resource_manager.core.models import Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.team_ledger import Account, TeamLedger, milli_of
from resource_manager.scheduling.queue.quotas import all_stay_inside, stays_inside

Level = tuple[bool, float, float]
"""One level of a tree: outside the guarantee, share of the guarantee, part by weight."""

Key = tuple[tuple[Level, ...], int]


def between_teams(ledger: TeamLedger, ordered: Iterable[PendingRequest]) -> Iterator[PendingRequest]:
    """Yield the pending requests with the team whose turn it is first; `ordered` is the order inside a team.

    Next is the team whose first job stays inside its guarantee, then the one of which that job would make the
    smallest share, (held + asked) / guaranteed, compared from the top of the tree down. Teams without a
    guarantee come last, by held + asked for their weight.

    The accounts are read again before each step, so that a caller who grants as it goes counts what started.
    """
    queues: dict[str, deque[PendingRequest]] = {}
    if ledger.rules.preemption:  # else a job could be taken for one that is behind it
        ordered = sorted(ordered, key=lambda pending: -pending.request.priority)
    for pending in ordered:
        queues.setdefault(ledger.of(pending.request).name, deque()).append(pending)
    levels = _Levels(ledger)
    heap = [(levels.key(queue[0]), team) for team, queue in queues.items()]
    heapify(heap)
    while heap:
        key, team = heappop(heap)
        queue = queues[team]
        # What a team holds only grows in one pass, so the first entry that is still true comes next.
        if (current := levels.key(queue[0])) != key:
            heappush(heap, (current, team))
            continue
        pending = queue.popleft()
        yield pending
        if queue:
            heappush(heap, (levels.key(queue[0]), team))


class _Levels:
    """Levels of the teams' next requests, kept until a lease begins or ends: passes in vain ask for few."""

    def __init__(self, ledger: TeamLedger) -> None:
        self.ledger = ledger
        self._known: dict[tuple[str, int, tuple[str, ...]], tuple[Level, ...]] = {}
        self._version = ledger.version

    def key(self, pending: PendingRequest) -> Key:
        """Return the levels with this request as its team's next, from the top of the tree down."""
        if self._version != self.ledger.version:
            self._known.clear()
            self._version = self.ledger.version
        request = pending.request
        shape = (request.team, milli_of(request), request.gpu_types)
        levels = self._known.get(shape)
        if levels is None:
            accounts = reversed(self.ledger.of(request).path)
            levels = tuple(_level(account, request) for account in accounts)
            self._known[shape] = levels
        return levels, pending.sequence


def _level(account: Account, request: Request) -> Level:
    would_hold = account.allocated + milli_of(request)
    weight = account.team.weight
    return (
        not stays_inside(account, request),
        would_hold / account.guaranteed if account.guaranteed else math.inf,
        would_hold / weight if weight else math.inf,
    )


def guaranteed_first(ledger: TeamLedger, ordered: Iterable[PendingRequest]) -> list[PendingRequest]:
    """Return the requests that stay inside their team's guarantee, then the others, each part as `ordered`.

    For orders that compare teams by another share than that of the guarantee.
    """
    added: Counter[str] = Counter()
    inside: list[PendingRequest] = []
    outside: list[PendingRequest] = []
    for pending in ordered:
        accounts = ledger.of(pending.request).path
        if all_stay_inside(accounts, pending.request, added):
            inside.append(pending)
            for account in accounts:
                added[account.name] += milli_of(pending.request)
        else:
            outside.append(pending)
    return inside + outside
