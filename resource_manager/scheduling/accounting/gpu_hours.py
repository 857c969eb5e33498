"""GPU-hours of a history, by what became of them: every hour granted is in exactly one category."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from resource_manager.core.changes import Change, Outcome
from resource_manager.core.cluster import Snapshot
from resource_manager.core.models import MILLI_PER_GPU, Request
from resource_manager.scheduling.accounting.lives import Life, Lives, Wait, lives_of

CATEGORIES = ("used", "idle", "failed", "preempted", "quarantined", "unknown")
"""Categories of granted time. Their sum is the time granted."""

USED, IDLE, FAILED, PREEMPTED, QUARANTINED, UNKNOWN = CATEGORIES

WASTED = (IDLE, FAILED, PREEMPTED, QUARANTINED)
"""Categories of time that gave nothing."""

KEYS = ("team", "user", "dag", "gpu_type", "source")
"""Keys to group by."""

LEASE, SLURM = "lease", "slurm"
"""Values of the key `source`: our own grants, and jobs that Slurm placed, which have the label `launcher`."""

NONE = "(none)"
"""Value of a key that a request does not have."""

_OF_OUTCOME = {
    str(Outcome.SUCCESS): USED,
    str(Outcome.FAILED): FAILED,
    str(Outcome.TIMED_OUT): FAILED,
    str(Outcome.IDLE): IDLE,
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


@dataclass(frozen=True, slots=True)
class GpuHours:
    """Account of a history: segments of leases, waits of requests, and what servers measured of ended leases.

    `measures` are by fencing token.
    """

    segments: list[Segment]
    waits: list[Wait]
    measures: dict[int, Measure]


def account(before: Snapshot, changes: Iterable[Change], now: float) -> GpuHours:
    """Return the account of a history up to now."""
    walk = lives_of(before, changes)
    return GpuHours(
        [segment for life in walk.lives.values() for segment in _segments(walk, life, now)],
        [*walk.waits, *(wait._replace(end=max(now, wait.start)) for wait in walk.pending.values())],
        {token: measure_of(life.measures) for token, life in walk.lives.items() if life.measures},
    )


def _segments(walk: Lives, life: Life, now: float) -> Iterable[Segment]:
    for spell in walk.spells(life, now):
        for gpu_type, milli in spell.milli.items():
            yield Segment(
                life.lease.request,
                life.fencing_token,
                gpu_type or NONE,
                milli / MILLI_PER_GPU,
                spell.start,
                spell.end,
                QUARANTINED if spell.quarantined else _OF_OUTCOME.get(spell.outcome or "", ""),
            )


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
    measures = {**hours.measures, **(measures or {})}
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
    row: Hours, segment: Segment, duration_s: float, measure: Measure | None, prices: Mapping[str, float]
) -> None:
    hours = segment.gpus * duration_s / HOUR_S
    row.granted += hours
    row.leases.add(segment.fencing_token)
    if segment.category in (FAILED, PREEMPTED, QUARANTINED):
        row.by_category[segment.category] += hours
    elif measure is not None:
        row.by_category[USED] += hours * measure.busy
        row.by_category[IDLE] += hours - hours * measure.busy
    else:
        row.by_category[segment.category or UNKNOWN] += hours
    price = prices.get(segment.gpu_type, prices.get("default"))
    row.cost = None if price is None or row.cost is None else row.cost + price * hours


def _values(by: Sequence[str], request: Request, gpu_type: str) -> tuple[str, ...]:
    values = {
        "team": request.team,
        "user": request.owner,
        "dag": request.labels.get("dag_id", ""),
        "gpu_type": gpu_type,
        "source": SLURM if request.labels.get("launcher") == SLURM else LEASE,
    }
    return tuple(values[key] or NONE for key in by)
