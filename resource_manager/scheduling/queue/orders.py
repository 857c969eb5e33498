"""Queue disciplines: the order of pending requests and backfill, live and in replay alike."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush

from resource_manager.core.announced import along_the_dag, names_announced
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Amount, Request
from resource_manager.core.pending import PendingRequest, arrival
from resource_manager.core.runtimes import job_id_of
from resource_manager.core.team_ledger import UNNAMED
from resource_manager.errors import PolicyError
from resource_manager.scheduling.accounting.decayed_use import by_fair_tree, by_fair_usage
from resource_manager.scheduling.queue.quotas import shares_by_weight
from resource_manager.scheduling.queue.team_order import between_teams, guaranteed_first

Ordering = Callable[[ClusterState, float], list[PendingRequest]]
"""(cluster, now) -> the pending requests in queue order, the next to start first."""

PRIORITY_AGEING_S = 3600.0
"""Time in which a pending request gains one step of priority, so that none starves."""

STARVATION_LIMIT_S = 86_400.0
"""Requests pending for longer come first in the orders that could otherwise starve a request."""

FIRST_QUEUE_GPU_S = 57_600.0
"""GPU seconds (16 GPU-hours) of attained service from which a job is in Tiresias' second queue."""

UNKNOWN_RUNTIME_S = 86_400.0
"""Assumed runtime of a request that states none."""

BACKFILL_SUFFIX = "+backfill"
"""Suffix of a queue order's name: requests may overtake if they delay none before them."""


@dataclass(frozen=True, slots=True)
class QueueDiscipline:
    """Queue discipline: the order of pending requests, and backfill.

    Without `backfill` the first request that does not fit blocks all behind it. With it, the others may
    start if that delays no request before them (conservative backfill; Mu'alem and Feitelson, IEEE TPDS
    2001), by the runtimes that are stated or learnt. `rule` describes the order in words.

    Where teams have rules, those inside their guarantee come first, and the order applies inside a team. An
    order that `compares_teams` itself decides between the others too. One that `uses_runtimes` has nothing to
    go by where requests state none; `with_quotas` arranges by stated shares of teams.
    """

    arrange: Ordering
    backfill: bool = False
    rule: str = ""
    compares_teams: bool = False
    uses_runtimes: bool = False
    with_quotas: Callable[[Mapping[str, float]], Ordering] | None = None

    def __call__(self, cluster: ClusterState, now: float) -> list[PendingRequest]:
        """Return the pending requests in queue order, the next to start first."""
        return list(self.starting(cluster, now))

    def starting(self, cluster: ClusterState, now: float) -> Iterable[PendingRequest]:
        """Yield the pending requests in queue order, while the caller grants those that start."""
        ordered = self.arrange(cluster, now)
        if cluster.ledger is None or len(ordered) < 2:
            return ordered
        if self.compares_teams:
            return guaranteed_first(cluster.ledger, ordered)
        return between_teams(cluster.ledger, ordered)


def by_arrival(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests in the order of arrival."""
    return cluster.pending.by(arrival)


def by_priority(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests by priority, which gains a step each `PRIORITY_AGEING_S`, then by arrival.

    A request counts as pending for at least as long as any that arrived after it, so requests of equal
    priority keep the order of arrival even if the clock was set back in between.
    """
    if cluster.pending.is_in_time:
        return cluster.pending.by(_aged)
    arrived = by_arrival(cluster, now)
    keys: list[float] = []
    queued_at = math.inf
    for pending in reversed(arrived):
        queued_at = min(queued_at, pending.queued_at)
        keys.append((queued_at - now) / PRIORITY_AGEING_S - pending.request.priority)
    keys.reverse()
    return [arrived[place] for place in sorted(range(len(arrived)), key=keys.__getitem__)]


def _aged(pending: PendingRequest) -> tuple[float, int]:
    """Return the key of the order by priority: all age alike, so the order of two never changes."""
    return (pending.queued_at / PRIORITY_AGEING_S - pending.request.priority, pending.sequence)


def runtime_s(request: Request) -> float:
    """Return the stated runtime of the request, or `UNKNOWN_RUNTIME_S`."""
    expected = request.expected_runtime_s
    return UNKNOWN_RUNTIME_S if expected is None else expected


def by_runtime(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests by expected runtime, the shortest first; all of it is remaining."""
    return _starved_first(cluster, now, runtime_s)


def by_deadline(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests by slack, the least first: the time to the deadline beyond their runtime.

    Those without a deadline, and those that cannot meet it any more, follow by priority.
    """

    def slack_s(pending: PendingRequest) -> float:
        if now - pending.queued_at > STARVATION_LIMIT_S:
            return -math.inf
        if (deadline_at := pending.request.deadline_at) is None:
            return math.inf
        left_s = deadline_at - now - (cluster.runtimes.runtime_of(pending.request) or 0.0)
        return left_s if left_s >= 0 else math.inf

    return sorted(by_priority(cluster, now), key=slack_s)


def by_critical_path(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests by arrival, each as much earlier as the work is long that waits for it.

    That is its runtime and those of the announced demands after it, along the longest path: the upward rank
    of HEFT (Topcuoglu, Hariri and Wu, IEEE TPDS 2002). It is 0 where nothing comes after it, and an unknown
    runtime counts as 0. A step of priority is worth `PRIORITY_AGEING_S`. All of it is `STARVATION_LIMIT_S` at
    most: it is the callers' word.
    """
    follows: dict[str, float] = {}
    """The length of the longest path after each lease id."""
    runtime_of = cluster.runtimes.runtime_of
    for announced in reversed([*along_the_dag(cluster.announced)]):
        rank_s = (runtime_of(announced.request) or 0.0) + follows.get(announced.lease_id, 0.0)
        for name in announced.after:
            follows[name] = max(follows.get(name, 0.0), rank_s)

    def key(pending: PendingRequest) -> tuple[float, int]:
        path_s = max(
            (follows[name] for name in names_announced(pending.lease_id) if name in follows), default=None
        )
        rank_s = 0.0 if path_s is None else path_s + (runtime_of(pending.request) or 0.0)
        at, sequence = _aged(pending)
        return at - min(rank_s, STARVATION_LIMIT_S) / PRIORITY_AGEING_S, sequence

    return sorted(cluster.pending.values(), key=key)


def by_service(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests by expected service, the least runtime times GPUs first.

    Source: Gu et al., Tiresias, NSDI 2019.
    """
    return _starved_first(
        cluster,
        now,
        lambda request: runtime_s(request) * request.nodes * request.gpus * request.gpu_milli / MILLI_PER_GPU,
    )


def by_attained_service(cluster: ClusterState, now: float) -> list[PendingRequest]:
    """Return pending requests in two queues: jobs that attained less than `FIRST_QUEUE_GPU_S` come first.

    Service is what earlier leases of the job took, those that failed, expired or were preempted. Within a
    queue the order is that of arrival. Source: Gu et al., Tiresias, NSDI 2019 (discretised, two queues).
    """
    attained = cluster.attained
    most_ms = FIRST_QUEUE_GPU_S * 1000
    return _starved_first(
        cluster, now, lambda request: attained.get(job_id_of(request.lease_id), 0) >= most_ms
    )


def _starved_first(
    cluster: ClusterState, now: float, length: Callable[[Request], float]
) -> list[PendingRequest]:
    def key(pending: PendingRequest) -> tuple[float, int]:
        starved = now - pending.queued_at > STARVATION_LIMIT_S
        return (-math.inf if starved else length(pending.request), pending.sequence)

    return sorted(cluster.pending.values(), key=key)


def by_fair_share(
    cluster: ClusterState, now: float, quotas: Mapping[str, float] | None = None
) -> list[PendingRequest]:
    """Return pending requests so that the team with the least share relative to its quota is next.

    A team's share is its dominant one: of the resource of which it has the largest part of the cluster
    allocated (Ghodsi et al., Dominant Resource Fairness, NSDI 2011). Teams below their quota come first;
    the others borrow the rest. Within a team the order is that of arrival. `quotas` are shares of the whole
    cluster by team; teams without one share the remainder as one team, however many names they have. Without
    any quotas each team has the same share. Rules of teams give quotas by their weights.
    """
    if cluster.ledger is not None:
        quotas = shares_by_weight(cluster.ledger)

    def account(request: Request) -> str:
        return request.team if not quotas or request.team in quotas else UNNAMED

    starved: list[PendingRequest] = []
    queues: dict[str, deque[PendingRequest]] = {}
    for pending in by_arrival(cluster, now):
        if now - pending.queued_at > STARVATION_LIMIT_S:
            starved.append(pending)
        else:
            queues.setdefault(account(pending.request), deque()).append(pending)
    if len(queues) <= 1:
        return starved + [pending for queue in queues.values() for pending in queue]
    capacity: Counter[str] = Counter()
    for node in cluster.nodes:
        capacity.update({"gpu_milli": MILLI_PER_GPU * len(node.gpu_free), **node.node.resources})
    held: dict[str, Counter[str]] = {team: Counter() for team in queues}
    for lease in cluster.leases.values():
        held.setdefault(account(lease.request), Counter()).update(_demand(lease.request))
    for rest in cluster.remainders.values():
        held.setdefault(account(rest.request), Counter()).update(_demand(rest.request, len(rest.members)))
    for pending in starved:
        held.setdefault(account(pending.request), Counter()).update(_demand(pending.request))
    quota_of = _quotas(quotas or {}, held)

    def entry(team: str) -> tuple[bool, float, int, str]:
        share = max((held[team][name] / total for name, total in capacity.items() if total), default=0.0)
        quota = quota_of[team]
        return (share >= quota, share / quota if quota else share, queues[team][0].sequence, team)

    heap = [entry(team) for team in queues]
    heapify(heap)
    ordered = starved
    while heap:
        team = heappop(heap)[-1]
        pending = queues[team].popleft()
        ordered.append(pending)
        held[team].update(_demand(pending.request))
        if queues[team]:
            heappush(heap, entry(team))
    return ordered


def _demand(request: Request, members: int = 0) -> dict[str, Amount]:
    """Return the amounts of all members of the request, or of so many."""
    one: dict[str, Amount] = {"gpu_milli": request.gpus * request.gpu_milli, **request.resources}
    times = members or request.nodes
    return one if times == 1 else {name: times * amount for name, amount in one.items()}


def _quotas(given: Mapping[str, float], teams: Mapping[str, object]) -> dict[str, float]:
    without = [team for team in teams if team not in given]
    rest = max(1.0 - sum(given.values()), 0.0) / len(without) if without else 0.0
    return {team: given.get(team, rest) for team in teams}


fifo = QueueDiscipline(by_arrival, rule="first come, first served")
priority = QueueDiscipline(by_priority, rule="by priority, then first come, first served")

ORDERS: dict[str, QueueDiscipline] = {
    "fifo": fifo,
    "priority": priority,
    "srtf": QueueDiscipline(by_runtime, rule="shortest expected runtime first", uses_runtimes=True),
    "srsf": QueueDiscipline(by_service, rule="least expected GPU time first", uses_runtimes=True),
    "fair_share": QueueDiscipline(
        by_fair_share,
        rule="the team with the smallest part of its quota first",
        compares_teams=True,
        with_quotas=lambda quotas: partial(by_fair_share, quotas=quotas),
    ),
    "fair_usage": QueueDiscipline(
        by_fair_usage,
        rule="the team that used least of its share, with half-life, first",
        compares_teams=True,
    ),
    "fair_tree": QueueDiscipline(
        by_fair_tree, rule="by level fair share down the tree of teams, with half-life", compares_teams=True
    ),
    "tiresias": QueueDiscipline(by_attained_service, rule="jobs that used less than 16 GPU-hours first"),
    "deadline": QueueDiscipline(by_deadline, rule="least time to the deadline beyond the runtime first"),
    "critical_path": QueueDiscipline(
        by_critical_path, rule="first come, earlier by the work that its DAG has after it, and by priority"
    ),
}


def get_order(name: str, quotas: Mapping[str, float] | None = None) -> QueueDiscipline:
    """Return the queue discipline of that name, which may end in `+backfill`; raises `PolicyError`."""
    base = name.removesuffix(BACKFILL_SUFFIX)
    if base not in ORDERS:
        known = ", ".join(sorted(ORDERS))
        raise PolicyError(
            f"unknown queue order {name!r}; known are {known}, each also with {BACKFILL_SUFFIX}"
        )
    order = ORDERS[base]
    if quotas and order.with_quotas is not None:
        order = replace(order, arrange=order.with_quotas(quotas))
    return replace(order, backfill=name.endswith(BACKFILL_SUFFIX))
