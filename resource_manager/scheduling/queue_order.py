"""Queue disciplines: the order of pending requests, backfill and admission, live and in replay alike."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from heapq import heapify, heappop, heappush

from resource_manager.admission import PriceAdmission
from resource_manager.cluster import ClusterState
from resource_manager.errors import PolicyError
from resource_manager.models import MILLI_PER_GPU, Amount, Placement, Request, Waiting
from resource_manager.runtime_history import RuntimeOf, stated_runtime

Arrange = Callable[[ClusterState, float], list[Waiting]]
"""(cluster, now) -> the pending requests in queue order, the next to start first."""

PRIORITY_AGEING_S = 3600.0
"""Time in which a pending request gains one step of priority, so that none starves."""

PATIENCE_S = 86_400.0
"""Requests pending for longer come first in the orders that could otherwise starve a request."""

UNKNOWN_RUNTIME_S = 86_400.0
"""Assumed runtime of a request that states none."""

BACKFILL = "+backfill"
"""Suffix of a queue order's name: requests may overtake if they delay none before them."""


@dataclass(frozen=True, slots=True)
class Order:
    """Queue discipline: the order of pending requests, backfill and admission.

    Without `backfill` the first request that does not fit blocks all behind it. With it, the others may
    start if that delays no request before them (conservative backfill; Mu'alem and Feitelson, IEEE TPDS
    2001), estimated by `runtime_of`. With `admission`, a request whose utility does not exceed its price
    stays pending although it fits, and blocks no other. `rule` describes the order in words.
    """

    arrange: Arrange
    backfill: bool = False
    admission: PriceAdmission | None = None
    rule: str = ""
    runtime_of: RuntimeOf = stated_runtime

    def admits(
        self, cluster: ClusterState, request: Request, placement: Placement, queued_at: float, now: float
    ) -> bool:
        """Return True if the request, which fits the placement, may start there."""
        return self.admission is None or self.admission.admits(cluster, request, placement, queued_at, now)

    def __call__(self, cluster: ClusterState, now: float) -> list[Waiting]:
        """Return the pending requests in queue order, the next to start first."""
        return self.arrange(cluster, now)


def by_arrival(cluster: ClusterState, now: float) -> list[Waiting]:
    """Return pending requests in the order of arrival."""
    return sorted(cluster.waiting.values(), key=lambda waiting: waiting.sequence)


def by_priority(cluster: ClusterState, now: float) -> list[Waiting]:
    """Return pending requests by priority, which gains a step each `PRIORITY_AGEING_S`, then by arrival.

    A request counts as pending for at least as long as any that arrived after it, so requests of equal
    priority keep the order of arrival even if the clock was set back in between.
    """
    arrived = by_arrival(cluster, now)
    if len({waiting.request.priority for waiting in arrived}) < 2:
        return arrived
    keys: list[float] = []
    queued_at = math.inf
    for waiting in reversed(arrived):
        queued_at = min(queued_at, waiting.queued_at)
        keys.append((queued_at - now) / PRIORITY_AGEING_S - waiting.request.priority)
    keys.reverse()
    return [arrived[place] for place in sorted(range(len(arrived)), key=keys.__getitem__)]


def runtime_s(request: Request) -> float:
    """Return the stated runtime of the request, or `UNKNOWN_RUNTIME_S`."""
    expected = request.expected_runtime_s
    return UNKNOWN_RUNTIME_S if expected is None else expected


def by_runtime(cluster: ClusterState, now: float) -> list[Waiting]:
    """Return pending requests by expected runtime, the shortest first; all of it is remaining."""
    return _impatient_first(cluster, now, runtime_s)


def by_service(cluster: ClusterState, now: float) -> list[Waiting]:
    """Return pending requests by expected service, the least runtime times GPUs first.

    Source: Gu et al., Tiresias, NSDI 2019.
    """
    return _impatient_first(
        cluster, now, lambda request: runtime_s(request) * request.gpus * request.gpu_milli / MILLI_PER_GPU
    )


def _impatient_first(cluster: ClusterState, now: float, length: Callable[[Request], float]) -> list[Waiting]:
    def key(waiting: Waiting) -> tuple[float, int]:
        impatient = now - waiting.queued_at > PATIENCE_S
        return (-math.inf if impatient else length(waiting.request), waiting.sequence)

    return sorted(cluster.waiting.values(), key=key)


def by_fair_share(
    cluster: ClusterState, now: float, quotas: Mapping[str, float] | None = None
) -> list[Waiting]:
    """Return pending requests so that the team with the least share relative to its quota is next.

    A team's share is its dominant one: of the resource of which it has the largest part of the cluster
    allocated (Ghodsi et al., Dominant Resource Fairness, NSDI 2011). Teams below their quota come first;
    the others borrow the rest. Within a team the order is that of arrival. `quotas` are shares of the whole
    cluster by team; teams without one divide the remainder evenly.
    """
    impatient: list[Waiting] = []
    queues: dict[str, deque[Waiting]] = {}
    for waiting in by_arrival(cluster, now):
        if now - waiting.queued_at > PATIENCE_S:
            impatient.append(waiting)
        else:
            queues.setdefault(waiting.request.team, deque()).append(waiting)
    if len(queues) <= 1:
        return impatient + [waiting for queue in queues.values() for waiting in queue]
    capacity = _capacity(cluster)
    held: dict[str, Counter[str]] = {team: Counter() for team in queues}
    for lease in cluster.leases.values():
        held.setdefault(lease.request.team, Counter()).update(_demand(lease.request))
    for waiting in impatient:
        held.setdefault(waiting.request.team, Counter()).update(_demand(waiting.request))
    quota_of = _quotas(quotas or {}, held)

    def entry(team: str) -> tuple[bool, float, int, str]:
        share = max((held[team][name] / total for name, total in capacity.items() if total), default=0.0)
        quota = quota_of[team]
        return (share >= quota, share / quota if quota else share, queues[team][0].sequence, team)

    heap = [entry(team) for team in queues]
    heapify(heap)
    ordered = impatient
    while heap:
        team = heappop(heap)[-1]
        waiting = queues[team].popleft()
        ordered.append(waiting)
        held[team].update(_demand(waiting.request))
        if queues[team]:
            heappush(heap, entry(team))
    return ordered


def _demand(request: Request) -> dict[str, Amount]:
    return {"gpu_milli": request.gpus * request.gpu_milli, **request.resources}


def _capacity(cluster: ClusterState) -> Counter[str]:
    """Return the total amounts of the whole cluster."""
    capacity: Counter[str] = Counter()
    for node in cluster.nodes:
        capacity.update({"gpu_milli": MILLI_PER_GPU * len(node.gpu_free), **node.node.resources})
    return capacity


def _quotas(given: Mapping[str, float], teams: Mapping[str, object]) -> dict[str, float]:
    without = [team for team in teams if team not in given]
    rest = max(1.0 - sum(given.values()), 0.0) / len(without) if without else 0.0
    return {team: given.get(team, rest) for team in teams}


fifo = Order(by_arrival, rule="first come, first served")
priority = Order(by_priority, rule="by priority, then first come, first served")
srtf = Order(by_runtime, rule="shortest expected runtime first")
srsf = Order(by_service, rule="least expected GPU time first")
fair_share = Order(by_fair_share, rule="the team with the smallest part of its quota first")

ORDERS: dict[str, Order] = {
    "fifo": fifo,
    "priority": priority,
    "srtf": srtf,
    "srsf": srsf,
    "fair_share": fair_share,
}


def get_order(name: str, quotas: Mapping[str, float] | None = None) -> Order:
    """Return the queue discipline of that name, which may end in `+backfill`; raises `PolicyError`."""
    base = name.removesuffix(BACKFILL)
    if base not in ORDERS:
        known = ", ".join(sorted(ORDERS))
        raise PolicyError(f"unknown queue order {name!r}; known are {known}, each also with {BACKFILL}")
    order = ORDERS[base]
    if quotas and order is fair_share:
        order = replace(order, arrange=partial(by_fair_share, quotas=quotas))
    return replace(order, backfill=name.endswith(BACKFILL))
