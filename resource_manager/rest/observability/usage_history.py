"""Utilisation, queue and waits over minutes, hours and days, computed from the history."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from dataclasses import dataclass

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Granted,
    InventoryChanged,
    MembersReleased,
    Queued,
    Released,
)
from resource_manager.core.models import KEY_SEPARATOR, MILLI_PER_GPU, Lease
from resource_manager.rest.answers import Trend

BIN_S = 60
KEEP_S = 7 * 86_400
MAX_POINTS = 360


@dataclass(slots=True)
class MinuteBucket:
    """One minute: GPU-milli seconds allocated and installed, queue seconds, and waits that ended in it."""

    allocated_milli_s: float = 0.0
    capacity_milli_s: float = 0.0
    queue_s: float = 0.0
    seconds: float = 0.0
    waits: int = 0
    wait_s: float = 0.0
    longest_wait_s: float = 0.0


class UsageHistory:
    """Usage by minute; `add` takes every change once, in order."""

    def __init__(self, capacity_milli: int = 0) -> None:
        self.bins: OrderedDict[int, MinuteBucket] = OrderedDict()
        self._capacity = capacity_milli
        self._held = 0
        self._waiting: dict[str, float | None] = {}
        """Since when each pending request waits, None for as long as its lease will say."""
        self._at: float | None = None
        self._leases: dict[str, Lease] = {}

    def start_from(self, leases: Iterable[Lease], waiting: Iterable[str], capacity_milli: int) -> None:
        """Set the leases, pending requests and GPUs from before the first change in the history."""
        self._leases = {lease.lease_id: lease for lease in leases}
        self._held = sum(_milli(lease) for lease in self._leases.values())
        self._waiting = dict.fromkeys(waiting)
        self._capacity = capacity_milli

    def add(self, change: Change) -> None:
        self.advance(change.at)
        match change:
            case Granted(lease=lease):
                self._granted(lease, change.at)
            case Released() | Expired():
                self._ended(change)
            case MembersReleased(lease_id=lease_id, fencing_token=fencing_token, ranks=ranks):
                self._members_ended(lease_id, fencing_token, ranks)
            case Queued(request=request):
                self._waiting[request.lease_id] = change.at
            case Cancelled(lease_id=lease_id):
                self._waiting.pop(lease_id, None)
            case InventoryChanged(nodes=nodes):
                self._capacity = MILLI_PER_GPU * sum(len(node.gpus) for node in nodes)

    def advance(self, now: float) -> None:
        """Count the time since the last change with the leases and the queue of then."""
        at = now if self._at is None else max(self._at, now - KEEP_S)
        while at < now:
            end = min((at // BIN_S + 1) * BIN_S, now)
            self._bin(at).seconds += end - at
            self._bin(at).allocated_milli_s += self._held * (end - at)
            self._bin(at).capacity_milli_s += self._capacity * (end - at)
            self._bin(at).queue_s += len(self._waiting) * (end - at)
            at = end
        self._at = now if self._at is None else max(self._at, now)
        while self.bins and next(iter(self.bins)) < (now - KEEP_S) // BIN_S:
            self.bins.popitem(last=False)

    def series(self, hours: float, now: float) -> Trend:
        """Return up to `MAX_POINTS` points of the last hours."""
        self.advance(now)
        step = max(1, int(-(-hours * 3600 // (BIN_S * MAX_POINTS))))
        last = int(now // BIN_S)
        first = last - int(hours * 3600 // BIN_S) + 1
        points: Trend = {"time": [], "allocated": [], "queue": [], "wait": [], "longest": []}
        for start in range(first, last + 1, step):
            bins = [self.bins[i] for i in range(start, start + step) if i in self.bins]
            capacity = sum(b.capacity_milli_s for b in bins)
            seconds = sum(b.seconds for b in bins)
            waits = sum(b.waits for b in bins)
            points["time"].append(start * BIN_S)
            points["allocated"].append(
                round(100 * sum(b.allocated_milli_s for b in bins) / capacity, 2) if capacity else None
            )
            points["queue"].append(round(sum(b.queue_s for b in bins) / seconds, 2) if seconds else None)
            points["wait"].append(round(sum(b.wait_s for b in bins) / waits, 2) if waits else None)
            points["longest"].append(round(max(b.longest_wait_s for b in bins), 2) if waits else None)
        return points

    def _granted(self, lease: Lease, at: float) -> None:
        since = self._waiting.pop(lease.lease_id, None)
        self._leases[lease.lease_id] = lease
        self._held += _milli(lease)
        since = lease.queued_at if since is None else since
        wait_s = 0.0 if since is None else max(lease.granted_at - since, 0.0)
        minute = self._bin(at)
        minute.waits += 1
        minute.wait_s += wait_s
        minute.longest_wait_s = max(minute.longest_wait_s, wait_s)

    def _ended(self, change: Released | Expired) -> None:
        if (lease := self._leases.pop(change.lease_id, None)) is not None:
            self._held -= _milli(lease)

    def _members_ended(self, lease_id: str, fencing_token: int, ranks: tuple[int, ...]) -> None:
        live = self._leases.get(lease_id)
        if live is not None and live.fencing_token == fencing_token:
            key = lease_id
        else:
            key = f"{lease_id}{KEY_SEPARATOR}{fencing_token}"
        if (lease := self._leases.pop(key, None)) is None:
            return
        self._held -= _milli(lease)
        if rest := lease.without(ranks):
            self._leases[rest.key] = rest
            self._held += _milli(rest)

    def _bin(self, at: float) -> MinuteBucket:
        return self.bins.setdefault(int(at // BIN_S), MinuteBucket())


def _milli(lease: Lease) -> int:
    return sum(len(member.gpu_ids) for member in lease.members) * lease.request.gpu_milli
