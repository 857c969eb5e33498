"""The pending requests of a cluster, in orders that are kept up to date instead of sorted again."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from resource_manager.core.models import Request


@dataclass(frozen=True, slots=True)
class PendingRequest:
    """A request in the queue; `sequence` is its number in the order of arrival."""

    request: Request
    queued_at: float
    sequence: int

    @property
    def lease_id(self) -> str:
        return self.request.lease_id


SortKey = Callable[[PendingRequest], tuple[float, int]]
"""A function to sort by that tells any two requests apart and does not change: it ends with the sequence."""


def arrival(pending: PendingRequest) -> tuple[float, int]:
    """Return the key of the order of arrival."""
    return (pending.sequence, pending.sequence)


Kind = tuple[object, ...]
"""Key of all that decides which leases may be taken for a request and whether it fits then."""


def kind_of(request: Request) -> Kind:
    return (request.team, request.priority, request.preemptible, request.owner, request.shape)


class PendingRequests(dict[str, PendingRequest]):
    """The pending requests by lease id; changed by setting, deleting and `pop` alone.

    `is_in_time` tells that no request was queued, by the clock of its time, before one that arrived earlier;
    once the clock was set back it stays False until nothing is pending. `kinds` and `shapes` have the
    requests by kind and by shape: those of one shape fit the same nodes.
    """

    def __init__(self, pending: Iterable[PendingRequest] = ()) -> None:
        super().__init__((entry.lease_id, entry) for entry in pending)
        self._arrived = sorted(self.values(), key=arrival)
        self._orders: dict[SortKey, list[PendingRequest]] = {arrival: self._arrived}
        self.is_in_time = _is_in_time(self._arrived)
        self.kinds: dict[Kind, dict[str, Request]] = {}
        self.shapes: dict[tuple[object, ...], dict[str, Request]] = {}
        for entry in self.values():
            self._group(entry.request)

    @property
    def last(self) -> PendingRequest | None:
        """The request that arrived last."""
        return self._arrived[-1] if self._arrived else None

    def by(self, key: SortKey) -> list[PendingRequest]:
        """Return the requests sorted by that key: the first time O(n log n), later a copy of what is kept."""
        if key not in self._orders:
            self._orders[key] = sorted(self.values(), key=key)
        return self._orders[key].copy()

    def __setitem__(self, lease_id: str, entry: PendingRequest) -> None:
        if lease_id in self:
            del self[lease_id]
        super().__setitem__(lease_id, entry)
        self._group(entry.request)
        for key, ordered in self._orders.items():
            insort(ordered, entry, key=key)
        if self.is_in_time:
            place = bisect_left(self._arrived, arrival(entry), key=arrival)
            self.is_in_time = _is_in_time(self._arrived[max(place - 1, 0) : place + 2])

    def __delitem__(self, lease_id: str) -> None:
        entry = self[lease_id]
        super().__delitem__(lease_id)
        for groups, key in ((self.kinds, kind_of(entry.request)), (self.shapes, entry.request.shape)):
            del groups[key][lease_id]
            if not groups[key]:
                del groups[key]
        for sort_key, ordered in self._orders.items():
            del ordered[ordered.index(entry, bisect_left(ordered, sort_key(entry), key=sort_key))]
        self.is_in_time = self.is_in_time or not self

    def _group(self, request: Request) -> None:
        self.kinds.setdefault(kind_of(request), {})[request.lease_id] = request
        self.shapes.setdefault(request.shape, {})[request.lease_id] = request

    def pop(self, lease_id: str, default: Any = None) -> Any:
        """Remove and return the request; `default` if there is none."""
        entry = self.get(lease_id)
        if entry is None:
            return default
        del self[lease_id]
        return entry


def _is_in_time(arrived: list[PendingRequest]) -> bool:
    return all(former.queued_at <= latter.queued_at for former, latter in pairwise(arrived))
