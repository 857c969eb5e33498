"""When waiting requests should start, by playing the ends of leases forward; and how sure that is."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum
from itertools import count

from resource_manager import allocator
from resource_manager.cluster import ClusterState
from resource_manager.models import Lease, Queued, Released, Request
from resource_manager.policies import Policy
from resource_manager.queueing import Order

MAX_STEPS = 500
"""Ends of leases looked at; whoever starts later than that gets no estimate."""

OVERDUE_SHARE = 0.1
"""A task past its expected end is thought to run this share of its age longer."""


class Confidence(IntEnum):
    """How sure an estimate is: the weakest of all the ends it rests on."""

    POOR = 1
    FAIR = 2
    GOOD = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Runtime:
    """How long a task should run, and how sure that is."""

    seconds: float
    confidence: Confidence


@dataclass(frozen=True, slots=True)
class Start:
    """When and where a request should start; `at` None if that cannot be told."""

    at: float | None
    node: str | None
    confidence: Confidence


RuntimeOf = Callable[[Request], Runtime | None]

UNKNOWN = Start(None, None, Confidence.POOR)


def estimate_starts(
    cluster: ClusterState,
    policy: Policy,
    order: Order,
    now: float,
    runtime_of: RuntimeOf,
    extra: Iterable[Request] = (),
) -> dict[str, Start]:
    """The expected start of every waiting request, and of `extra` ones as if they queued now.

    A lease ends when its request's `runtime_of` is over, else when its time to live is; the cluster is
    left as it was. Times are seconds of the store's clock.
    """
    starts: dict[str, Start] = {}
    ticket = count()
    with cluster.trial():
        for request in extra:
            cluster.apply(Queued(request, now))
        ends: list[tuple[float, int, Confidence, str, int]] = []

        def expect_end(lease: Lease, at: float) -> None:
            end, confidence = expected_end(lease, at, runtime_of)
            if end < math.inf:
                heapq.heappush(ends, (end, next(ticket), confidence, lease.task_id, lease.fencing_token))

        for lease in cluster.leases.values():
            if not lease.quarantined:
                expect_end(lease, now)
        at, confidence = now, Confidence.GOOD
        for _ in range(MAX_STEPS):
            for lease in _grant(cluster, policy, order, at):
                starts[lease.task_id] = Start(at, lease.placement.node, confidence)
                expect_end(lease, at)
            if not cluster.waiting or not ends:
                break
            at, _, sure, task_id, fencing_token = heapq.heappop(ends)
            confidence = min(confidence, sure)
            cluster.apply(Released(task_id, fencing_token, at))
        for task_id in cluster.waiting:
            starts[task_id] = UNKNOWN
    return starts


def stated_starts(cluster: ClusterState, policy: Policy, order: Order, now: float) -> dict[str, float]:
    """When each waiting task should start by what requests say of their runtimes.

    A task is left out if that cannot be told, as when one of those before it names no runtime.
    """

    def runtime_of(request: Request) -> Runtime | None:
        seconds = request.expected_runtime_s
        return None if seconds is None else Runtime(seconds, Confidence.GOOD)

    starts = estimate_starts(cluster, policy, order, now, runtime_of)
    return {
        task_id: start.at
        for task_id, start in starts.items()
        if start.at is not None and start.confidence > Confidence.POOR
    }


def expected_end(lease: Lease, now: float, runtime_of: RuntimeOf) -> tuple[float, Confidence]:
    """When a lease should end, never before now."""
    runtime = runtime_of(lease.request)
    if runtime is None:
        return max(lease.expires_at, now), Confidence.POOR
    end = lease.granted_at + runtime.seconds
    if end > now:
        return end, runtime.confidence
    return now + max(OVERDUE_SHARE * (now - lease.granted_at), 1.0), Confidence.POOR


def _grant(cluster: ClusterState, policy: Policy, order: Order, at: float) -> list[Lease]:
    """Grants in the trial what fits now, in queue order, as the allocator would."""
    granted: list[Lease] = []
    for waiting, placement in allocator.serve(cluster, policy, order, at):
        change = allocator.grant(cluster, waiting.request, placement, at)
        cluster.apply(change)
        granted.append(change.lease)
    return granted
