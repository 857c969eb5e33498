"""When waiting requests should start, by playing the ends of leases forward; and how sure that is."""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import count

from resource_manager import allocator
from resource_manager.cluster import ClusterState
from resource_manager.models import Lease, Queued, Released, Request
from resource_manager.policies import Policy
from resource_manager.queueing import Order
from resource_manager.refusal import short
from resource_manager.runtime_history import Confidence, RuntimeOf

MAX_STEPS = 500
"""Ends of leases looked at; whoever starts later than that gets no estimate."""

TOO_FAR = f"more than {MAX_STEPS} leases end before it"

OVERDUE_SHARE = 0.1
"""A task past its expected end is thought to run this share of its age longer."""


@dataclass(frozen=True, slots=True)
class Start:
    """When and where a request should start; `at` None if that cannot be told, and `detail` why not."""

    at: float | None
    node: str | None
    confidence: Confidence
    detail: str = ""


UNKNOWN = Start(None, None, Confidence.POOR)


def estimate_starts(
    cluster: ClusterState,
    policy: Policy,
    order: Order,
    now: float,
    extra: Iterable[Request] = (),
) -> dict[str, Start]:
    """The expected start of every waiting request, and of `extra` ones as if they queued now.

    A lease ends when its runtime by `order.runtime_of` is over. One whose runtime nobody knows has no end:
    its time to live is renewed while the job runs and says nothing. The cluster is left as it was. Times
    are seconds of the store's clock.
    """
    starts: dict[str, Start] = {}
    endless: list[str] = []
    too_far = False
    ticket = count()
    with cluster.trial():
        for request in extra:
            cluster.apply(Queued(request, now))
        if not cluster.waiting:
            return starts
        ends: list[tuple[float, int, Confidence, str, int]] = []

        def expect_end(lease: Lease, at: float) -> None:
            end = None if lease.quarantined else expected_end(lease, at, order.runtime_of)
            if end is None:
                endless.append(lease.task_id)
            else:
                heapq.heappush(ends, (end[0], next(ticket), end[1], lease.task_id, lease.fencing_token))

        for lease in cluster.leases.values():
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
        else:
            too_far = True
        unknown = Start(None, None, Confidence.POOR, TOO_FAR if too_far else _why_unknown(endless))
        for task_id in cluster.waiting:
            starts[task_id] = unknown
    return starts


def expected_end(lease: Lease, now: float, runtime_of: RuntimeOf) -> tuple[float, Confidence] | None:
    """When a lease should end, never before now, and how sure that is; None if nobody knows its runtime."""
    runtime = runtime_of(lease.request)
    if runtime is None:
        return None
    end = lease.granted_at + runtime.seconds
    if end > now:
        return end, runtime.confidence
    return now + max(OVERDUE_SHARE * (now - lease.granted_at), 1.0), Confidence.POOR


def _why_unknown(endless: list[str]) -> str:
    if not endless:
        return "no lease that ends would make room for it"
    others = f" and {len(endless) - 1} more" if len(endless) > 1 else ""
    return (
        f"nobody knows when {short(endless[0])}{others} will end; "
        "state runtimes: expected_runtime, --expected-runtime"
    )


def _grant(cluster: ClusterState, policy: Policy, order: Order, at: float) -> list[Lease]:
    """Grants in the trial what fits now, in queue order, as the allocator would."""
    granted: list[Lease] = []
    for waiting, placement in allocator.serve(cluster, policy, order, at):
        change = allocator.grant(cluster, waiting.request, placement, at)
        cluster.apply(change)
        granted.append(change.lease)
    return granted
