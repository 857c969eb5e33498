"""Expiry heap: the ends of leases in order, with lazy removal of outdated entries."""

from __future__ import annotations

import heapq
import math
from collections.abc import Mapping

from resource_manager.core.models import Lease

MIN_LENGTH = 1024
"""Length up to which outdated entries are not removed, because the heap is small."""


class ExpiryHeap:
    """Heap of the ends of `leases`, a mapping that the caller changes.

    Entries of leases that were released or renewed stay in the heap and are skipped when they are due.
    """

    __slots__ = ("_ends", "_leases")

    def __init__(self, leases: Mapping[str, Lease]) -> None:
        self._leases = leases
        self._ends: list[tuple[float, int, str]] = []

    def __len__(self) -> int:
        return len(self._ends)

    def push(self, lease: Lease) -> None:
        """Add the end of a lease, if it has one."""
        if lease.expires_at == math.inf:
            return
        ends = self._ends
        heapq.heappush(ends, (lease.expires_at, lease.fencing_token, lease.lease_id))
        # Entries of released or renewed leases remain: with a long TTL they would accumulate.
        if len(ends) > MIN_LENGTH and len(ends) > 4 * len(self._leases):
            ends[:] = [
                (live.expires_at, live.fencing_token, live.lease_id)
                for live in self._leases.values()
                if live.expires_at != math.inf
            ]
            heapq.heapify(ends)

    def due(self, now: float) -> list[Lease]:
        """Return the leases that end with their TTL, which has passed, the earliest end first."""
        due: list[tuple[float, int, str]] = []
        ends = self._ends
        while ends and ends[0][0] <= now:
            entry = heapq.heappop(ends)
            lease = self._leases.get(entry[2])
            if (
                lease is not None
                and lease.fencing_token == entry[1]
                and lease.expires_at == entry[0]
                and (not lease.quarantined or _is_only_late(lease))
                and (not due or due[-1] != entry)
            ):
                due.append(entry)
        for entry in due:
            heapq.heappush(ends, entry)
        return [self._leases[lease_id] for _, _, lease_id in due]


def _is_only_late(lease: Lease) -> bool:
    """Return whether a quarantined lease is held beyond its preemption, whose owner ends in its TTL."""
    return bool(lease.preempted_by) and not (lease.places or lease.request.quarantine)
