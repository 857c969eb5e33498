"""GPU-hours of a history, by what became of them: every hour granted is in exactly one category."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    GpuCleaned,
    Granted,
    InventoryChanged,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.cluster import Snapshot
from resource_manager.core.models import MILLI_PER_GPU, Lease, Node, Placement, Request

USED, IDLE, FAILED, PREEMPTED, QUARANTINED, UNKNOWN = CATEGORIES = (
    "used",
    "idle",
    "failed",
    "preempted",
    "quarantined",
    "unknown",
)
"""Categories of granted time. Their sum is the time granted."""

WASTED = (IDLE, FAILED, PREEMPTED, QUARANTINED)
"""Categories of time that gave nothing."""

KEYS = ("team", "user", "dag", "gpu_type")
"""Keys to group by."""

NONE = "(none)"
"""Value of a key that a request does not have."""

_OF_OUTCOME = {
    str(Outcome.SUCCESS): USED,
    str(Outcome.FAILED): FAILED,
    str(Outcome.PREEMPTED): PREEMPTED,
    str(Outcome.EVICTED): PREEMPTED,
    str(Outcome.NOT_STARTED): IDLE,
}
"""Category of the time of a lease by its outcome; measured time is split only where it is not lost."""

HOUR_S = 3600.0


class Segment(NamedTuple):
    """Time of one lease on GPUs of one type: `gpus` of them from `start` to `end`, in one category.

    The category is empty while it depends on what the servers measured.
    """

    request: Request
    fencing_token: int
    gpu_type: str
    gpus: float
    start: float
    end: float
    category: str


class Wait(NamedTuple):
    """Time of one request in the queue."""

    request: Request
    start: float
    end: float


@dataclass(frozen=True, slots=True)
class Measure:
    """Measured use of a lease: the part of its time, from 0 to 1, in which it computed; energy if known."""

    busy: float
    energy_kwh: float | None = None


def measure_of(parts: Sequence[tuple[float, float | None]]) -> Measure:
    """Return the measure of a lease whose servers or GPUs measured these: mean of busy, sum of energy."""
    known = [energy_kwh for _, energy_kwh in parts if energy_kwh is not None]
    return Measure(sum(busy for busy, _ in parts) / len(parts), sum(known) if known else None)


@dataclass(slots=True)
class Hours:
    """GPU-hours granted and in each category, hours waited, cost by the price list, and energy.

    `cost` is None if a type has no price, `energy_kwh` if no server measured any.
    """

    granted: float = 0.0
    by_category: dict[str, float] = field(default_factory=lambda: dict.fromkeys(CATEGORIES, 0.0))
    waited: float = 0.0
    leases: set[int] = field(default_factory=set)
    cost: float | None = 0.0
    energy_kwh: float | None = None

    def add(self, category: str, hours: float) -> None:
        """Add GPU-hours of a category, which are granted ones."""
        self.by_category[category] += hours


@dataclass(slots=True)
class _Live:
    """A lease that has not ended: its members, and their parts so far that are not quarantined."""

    lease: Lease
    since: float
    quarantined: bool
    active: list[tuple[float, float]] = field(default_factory=list)


class GpuHours:
    """Account of the leases and waits of a history; `add` takes every change once, in order."""

    def __init__(self, before: Snapshot) -> None:
        self.segments: list[Segment] = []
        self.waits: list[Wait] = []
        self._types = _gpu_types(before.nodes)
        self._measured: dict[int, list[tuple[float, float | None]]] = {}
        self._live = {
            lease.fencing_token: _Live(lease, lease.granted_at, lease.quarantined)
            for lease in (*before.leases, *before.remainders)
        }
        self._pending = {entry.lease_id: (entry.request, entry.queued_at) for entry in before.pending}

    def add(self, change: Change) -> None:
        """Take the next change."""
        match change:
            case Granted(lease=lease):
                self._end_wait(lease.lease_id, change.at)
                self._live[lease.fencing_token] = _Live(lease, lease.granted_at, lease.quarantined)
            case Quarantined() if live := self._live.get(change.fencing_token):
                self._turn(live, change.at, quarantined=True)
            case Renewed() if live := self._live.get(change.fencing_token):
                self._turn(live, change.at, quarantined=change.at > live.lease.preempt_until)
            case Preempting() if live := self._live.get(change.fencing_token):
                until = change.until if change.preemptor else math.inf
                live.lease = replace(live.lease, preempt_until=until)
            case Released(outcome=outcome):
                self._end(change.fencing_token, change.at, outcome)
            case Expired():
                self._end(change.fencing_token, change.at, "")
            case MembersReleased(outcome=outcome, ranks=ranks):
                self._end_members(change.fencing_token, ranks, change.at, outcome)
            case Queued(request=request):
                self._end_wait(request.lease_id, change.at)
                self._pending[request.lease_id] = (request, change.at)  # of a preempted lease a second time
            case Cancelled():
                self._end_wait(change.lease_id, change.at)
            case GpuCleaned(fencing_token=token, busy=busy) if busy is not None:
                self._measured.setdefault(token, []).append((busy, change.energy_kwh))
            case InventoryChanged(nodes=nodes):
                self._types = _gpu_types(nodes)

    def measures(self) -> dict[int, Measure]:
        """Return what the servers measured of ended leases, by fencing token."""
        return {token: measure_of(parts) for token, parts in self._measured.items()}

    def until(self, now: float) -> None:
        """Count the leases and waits that go on up to now."""
        for token in list(self._live):
            self._end(token, now, "")
        for lease_id in list(self._pending):
            self._end_wait(lease_id, now)

    def _turn(self, live: _Live, at: float, *, quarantined: bool) -> None:
        """Begin another part of the lease if it became quarantined or active again."""
        if live.quarantined == quarantined:
            return
        self._close(live, at)
        live.since, live.quarantined = at, quarantined

    def _close(self, live: _Live, at: float) -> None:
        if live.quarantined:
            self._record(live.lease, live.lease.members, live.since, at, QUARANTINED)
        else:
            live.active.append((live.since, at))

    def _end(self, token: int, at: float, outcome: str) -> None:
        live = self._live.pop(token, None)
        if live is not None:
            self._close(live, at)
            self._categorize(live, live.lease.members, outcome)

    def _end_members(self, token: int, ranks: Iterable[int], at: float, outcome: str) -> None:
        """End some members; the rest stays quarantined, and what its job did has the same outcome."""
        live = self._live.get(token)
        if live is None:
            return
        self._close(live, at)
        self._categorize(live, live.lease.members, outcome)
        if (rest := live.lease.without(set(ranks))) is None:
            del self._live[token]
        else:
            self._live[token] = _Live(rest, at, quarantined=True)

    def _categorize(self, live: _Live, members: Sequence[Placement], outcome: str) -> None:
        """Give the active parts of a lease the category of its outcome."""
        category = _OF_OUTCOME.get(outcome, "")
        for start, end in live.active:
            self._record(live.lease, members, start, end, category)

    def _record(
        self, lease: Lease, members: Sequence[Placement], start: float, end: float, category: str
    ) -> None:
        share = lease.request.gpu_milli / MILLI_PER_GPU
        counts: dict[str, float] = {}
        for member in members:
            for gpu_id in member.gpu_ids:
                gpu_type = self._types.get((member.node, gpu_id), "") or NONE
                counts[gpu_type] = counts.get(gpu_type, 0.0) + share
        for gpu_type, gpus in counts.items():
            self.segments.append(
                Segment(lease.request, lease.fencing_token, gpu_type, gpus, start, max(end, start), category)
            )

    def _end_wait(self, lease_id: str, at: float) -> None:
        if (found := self._pending.pop(lease_id, None)) is not None:
            request, queued_at = found
            self.waits.append(Wait(request, queued_at, max(at, queued_at)))


def account(before: Snapshot, changes: Iterable[Change], now: float) -> GpuHours:
    """Return the account of a history up to now."""
    found = GpuHours(before)
    for change in changes:
        found.add(change)
    found.until(now)
    return found


def hours_by(
    hours: GpuHours,
    by: Sequence[str],
    since: float,
    until: float,
    *,
    measures: Mapping[int, Measure] | None = None,
    prices: Mapping[str, float] | None = None,
) -> dict[tuple[str, ...], Hours]:
    """Return the hours between two times by the values of these keys, sorted by them.

    `measures` are by fencing token; `prices` are an hour of a GPU by type, with `default` for all others.
    """
    found: dict[tuple[str, ...], Hours] = {}
    measures = {**hours.measures(), **(measures or {})}
    whole_s: dict[int, float] = {}
    for segment in hours.segments:
        if segment.fencing_token in measures:
            gpu_s = segment.gpus * (segment.end - segment.start)
            whole_s[segment.fencing_token] = whole_s.get(segment.fencing_token, 0.0) + gpu_s
    for segment in hours.segments:
        duration_s = min(segment.end, until) - max(segment.start, since)
        if duration_s <= 0:
            continue
        row = found.setdefault(_values(by, segment.request, segment.gpu_type), Hours())
        measure = measures.get(segment.fencing_token)
        _count(row, segment, duration_s, measure, prices or {})
        if measure is not None and measure.energy_kwh is not None:
            part = segment.gpus * duration_s / whole_s[segment.fencing_token]
            row.energy_kwh = (row.energy_kwh or 0.0) + measure.energy_kwh * part
    for wait in hours.waits:
        waited_s = min(wait.end, until) - max(wait.start, since)
        if waited_s > 0:
            wanted = "|".join(wait.request.gpu_types) or "(any)"
            row = found.setdefault(_values(by, wait.request, wanted), Hours())
            row.waited += waited_s / HOUR_S
    return dict(sorted(found.items()))


def _count(
    row: Hours,
    segment: Segment,
    duration_s: float,
    measure: Measure | None,
    prices: Mapping[str, float],
) -> None:
    hours = segment.gpus * duration_s / HOUR_S
    row.granted += hours
    row.leases.add(segment.fencing_token)
    if segment.category in (FAILED, PREEMPTED, QUARANTINED):
        row.add(segment.category, hours)
    elif measure is not None:
        row.add(USED, hours * measure.busy)
        row.add(IDLE, hours - hours * measure.busy)
    else:
        row.add(segment.category or UNKNOWN, hours)
    price = prices.get(segment.gpu_type, prices.get("default"))
    row.cost = None if price is None or row.cost is None else row.cost + price * hours


def _values(by: Sequence[str], request: Request, gpu_type: str) -> tuple[str, ...]:
    values = {
        "team": request.team,
        "user": request.owner,
        "dag": request.labels.get("dag_id", ""),
        "gpu_type": gpu_type,
    }
    return tuple(values[key] or NONE for key in by)


def _gpu_types(nodes: Iterable[Node]) -> dict[tuple[str, int], str]:
    return {(node.name, gpu.gpu_id): gpu.gpu_type for node in nodes for gpu in node.gpus}
