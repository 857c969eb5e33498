"""Longest runtimes: when a lease must end, and how it is told in time to save what it did.

The limit is that of the request or of its team, whichever is shorter. The job gets its signal so long before
it as its grace lasts, at most half of the limit, and is gone when the limit is over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from resource_manager.core.changes import Preempting, Renewed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import LIMITS, MAX_RUNTIME, REQUEUE_AFTER
from resource_manager.core.models import Lease, Request
from resource_manager.core.runtimes import RAN
from resource_manager.core.team_ledger import TeamLedger

RUNTIME_USED = "runtime_used_s"
"""Label of a request: the seconds for which leases that it gave back were held."""

PREEMPTED_AFTER = "preempted_after_s"
"""Label of a request that kept its place: the seconds from its arrival to its last preemption."""


def count_of(labels: Mapping[str, str], name: str) -> int:
    """Return the number in a label, 0 if it has none."""
    text = labels.get(name)
    if text is None:
        return 0
    return int(text) if text.isascii() and text.isdecimal() and len(text) < 10 else 0


def longest_runtime_s(ledger: TeamLedger | None, request: Request) -> float:
    """Return the longest runtime of the request's job, infinite without a limit."""
    of_team = None if ledger is None else ledger.of(request).team.max_runtime_s
    own_s = math.inf if request.max_runtime_s is None else request.max_runtime_s
    return own_s if of_team is None or own_s < of_team else of_team  # asked of every pending request


def whole_limit_s(ledger: TeamLedger | None, request: Request) -> float:
    """Return for how long a first lease of the request may last, infinite without a limit."""
    longest_s = longest_runtime_s(ledger, request)
    return longest_s if request.requeue_after_s is None else min(longest_s, request.requeue_after_s)


def limit_of(ledger: TeamLedger | None, request: Request) -> tuple[float, str]:
    """Return for how long a new lease of the request may last, and which limit ends it.

    What leases took that it gave back counts for the longest runtime; a new lease has a second at least.
    """
    longest_s = longest_runtime_s(ledger, request)
    if longest_s < math.inf:
        longest_s = max(longest_s - count_of(request.labels, RUNTIME_USED), 1.0)
    if request.requeue_after_s is not None and request.requeue_after_s <= longest_s:
        return request.requeue_after_s, REQUEUE_AFTER
    return longest_s, MAX_RUNTIME


def lasts_s(cluster: ClusterState, request: Request) -> float:
    """Return for how long a lease of the request lasts: its runtime, stated or learnt, or to its limit.

    A preempted job goes on from what it saved, so that what it ran before is no part of it; one that ran for
    longer than expected may begin it anew. Infinite if neither is known.
    """
    runtime = cluster.runtimes.runtime_of(request)
    limit_s, _ = limit_of(cluster.ledger, request)
    if runtime is None:
        return limit_s
    left_s = runtime - count_of(request.labels, RAN)
    return min(left_s if left_s > 0 else runtime, limit_s)


def at_limit(ledger: TeamLedger | None, lease: Lease) -> float:
    """Return the time at which the lease is gone at the latest, infinite without a limit."""
    return lease.granted_at + limit_of(ledger, lease.request)[0]


def lease_end(
    ledger: TeamLedger | None, request: Request, granted_at: float, now: float, life_s: float
) -> float:
    """Return the end of a lease granted or renewed for `life_s` now: at the latest when its job is told."""
    return min(now + life_s, _told_at(ledger, request, granted_at))


def renewed_until(ledger: TeamLedger | None, lease: Lease, now: float, life_s: float) -> float:
    """Return the end of a lease that is renewed for `life_s` now.

    One that is preempted is not bounded by a limit any more; if a limit ends it and none of its jobs was
    placed, it ends with its preemption.
    """
    if not lease.preempted_by:
        return lease_end(ledger, lease.request, lease.granted_at, now, life_s)
    is_kept = lease.places or lease.request.quarantine or lease.preempted_by not in LIMITS
    return now + life_s if is_kept else min(now + life_s, lease.preempt_until)


def reached(ledger: TeamLedger | None, lease: Lease, now: float) -> str:
    """Return the limit that ends a lease whose life is over; empty if it was not renewed.

    One whose limit has passed already, and that placed no job which could be told, just ends.
    """
    limit_s, limit = limit_of(ledger, lease.request)
    is_past = now >= lease.granted_at + limit_s and not lease.places
    is_told = lease.expires_at >= _told_at(ledger, lease.request, lease.granted_at)
    return limit if is_told and not (is_past or lease.preempted_by) else ""


def within_grace(ledger: TeamLedger | None, lease: Lease, now: float) -> list[Renewed]:
    """Return the renewal until the end of its preemption of a lease whose limit would end it before that.

    Its owner was told that end, and has not renewed it since: no limit bounds a renewal after that.
    """
    is_bounded = lease.expires_at == _told_at(ledger, lease.request, lease.granted_at)
    if not (lease.preempted_by and is_bounded) or now >= lease.preempt_until:
        return []
    until = lease.preempt_until
    return [Renewed(lease.lease_id, lease.fencing_token, now, until, lease.checkpoint_at)]


def preempted_at_limit(
    ledger: TeamLedger | None, lease: Lease, limit: str, now: float
) -> list[Renewed | Preempting]:
    """Return the preemption of a lease that reached a limit; it lives until the end of its grace."""
    until = now + _grace_s(ledger, lease.request)
    return [
        Renewed(lease.lease_id, lease.fencing_token, now, until, lease.checkpoint_at),
        Preempting(lease.lease_id, lease.fencing_token, limit, until, now),
    ]


def _told_at(ledger: TeamLedger | None, request: Request, granted_at: float) -> float:
    return granted_at + limit_of(ledger, request)[0] - _grace_s(ledger, request)


def _grace_s(ledger: TeamLedger | None, request: Request) -> float:
    return min(request.preempt_grace_s, limit_of(ledger, request)[0] / 2)
