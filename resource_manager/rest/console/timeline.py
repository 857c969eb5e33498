"""Timeline: which lease had which GPUs in the last hours, and what should come next."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from resource_manager.core.changes import Outcome
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.core.names import is_hold, name_of
from resource_manager.core.node_state import NodeState
from resource_manager.manager.answer_words import duration, name_in_words
from resource_manager.manager.serializers import interval_in_words
from resource_manager.rest.console import cells
from resource_manager.rest.console.colours import Colour
from resource_manager.rest.service import Service
from resource_manager.scheduling.accounting.lives import Lives
from resource_manager.scheduling.reasons.lease_ends import expected_end

AHEAD = 0.5
"""Part of the past hours that is shown of the coming ones, where something is to come."""

MIN_PART = 0.2
"""Least part of the width for what was, and for what is to come."""

LANE = 9
"""Height of one GPU in pixels."""

WAITING_LANE = 18
MAX_WAITING = 4
"""Expected starts shown on one server."""

MAX_ENDED = 2000
"""Most members shown of leases that have ended: bars of more would cover one another, and each open page asks
again."""

NARROW = 8.0
"""Width in percent below which the name stands in the paler part of a bar."""

ENDED_ON_TIME = "ended on time"

ENDS = {
    **dict.fromkeys((Outcome.SUCCESS.value, ENDED_ON_TIME), ("past", "✔")),
    **dict.fromkeys(("FAILED", "expired", "PREEMPTED", "EVICTED", "TIMED_OUT"), ("past failed", "✖")),
}
"""Classes and mark of a bar, by outcome; others were stopped or released."""

MAX_TICKS = 5
STEPS_S = (10, 30, 60, 120, 300, 600, 1200, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800)
"""Times between two ticks."""


@dataclass(frozen=True, slots=True)
class Span:
    """Time of a lease on GPUs of one server; `outcome` is None while it runs, `why` tells of its end."""

    lease: Lease
    node: str
    gpu_ids: tuple[int, ...]
    start: float
    end: float
    outcome: str | None = None
    why: str = ""


@dataclass(frozen=True, slots=True)
class Bar:
    """Bar of a row: `x` and `width` in percent, `y` and `height` in pixels; no `lease_id` for maintenance.

    `token` is that of the lease, whose id another may have by now; none of a pending request.
    """

    x: float
    width: float
    y: int
    height: int
    classes: str
    label: str
    title: str
    lease_id: str
    token: int | None = None


@dataclass(slots=True)
class Row:
    """One server: its bars, from the first GPU down, then the expected starts."""

    server_id: int
    name: str
    is_open: bool
    height: int
    bars: list[Bar] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Window:
    """Time shown, in seconds since the epoch."""

    start: float
    now: float
    end: float

    def percent(self, at: float) -> float:
        """Return the place of a time, from 0 to 100."""
        return 100 * min(max((at - self.start) / (self.end - self.start), 0.0), 1.0)

    @property
    def ticks(self) -> list[tuple[float, str]]:
        """Places and words of now and of round times before and after it."""
        shown_s = self.end - self.start
        step_s = next((step for step in STEPS_S if shown_s <= MAX_TICKS * step), STEPS_S[-1])
        first = math.ceil((self.start - self.now) / step_s)
        aways = (step_s * i for i in range(first, math.floor((self.end - self.now) / step_s) + 1))
        ticks = [(self.percent(self.now + away), _words(away)) for away in aways]
        return [(x, words) for x, words in ticks if 4 <= x <= 96]  # the words stand in the middle


def _words(away_s: float) -> str:
    """Return `now`, `2 h ago` or `in 30 min` for a round time."""
    if not away_s:
        return "now"
    amount, unit = next(
        (abs(away_s) / size, unit)
        for unit, size in (("d", 86_400), ("h", 3600), ("min", 60), ("s", 1))
        if abs(away_s) >= size
    )
    return f"in {amount:g} {unit}" if away_s > 0 else f"{amount:g} {unit} ago"


def past(lives: Lives, start: float, names: Collection[str]) -> tuple[list[Span], bool]:
    """Return the members of leases that ended after `start` on these servers, and whether those are all.

    They are the last `MAX_ENDED`.
    """
    ends = [
        (life, end, member)
        for life in lives.lives.values()
        for end in life.ends
        if end.at >= start
        for _, member in end.ranked
        if member.node in names
    ]
    last = sorted(ends, key=lambda each: each[1].at)[-MAX_ENDED:]
    spans = [
        Span(
            life.lease,
            member.node,
            member.gpu_ids,
            life.granted.granted_at,
            end.at,
            _expired(life.lease) if end.expired else end.outcome or "ended",
            "".join([f", {end.reason}" if end.reason else "", f", by {end.by}" if end.by else ""]),
        )
        for life, end, member in last
    ]
    return spans, len(spans) == len(ends)


def _expired(lease: Lease) -> str:
    """Return what its time that is over means: the end of a hold, else that nobody renewed it."""
    return ENDED_ON_TIME if is_hold(lease.lease_id, lease.request.labels) else "expired"


def look_at(service: Service, names: Sequence[str], hours: float) -> dict[str, Any]:
    """Return the window and a row for each of these servers."""
    entries = service.manager.queue()

    def view(cluster: ClusterState, now: float) -> Any:
        states = [cluster.by_name[name] for name in names if name in cluster.by_name]
        colours = cells.colours_of(cluster, [lease for state in states for lease in state.leases.values()])
        running = [each for state in states for each in _running(state, colours, now, cluster)]
        rows: dict[str, Row] = {}
        for state in states:
            height = LANE * max(len(state.gpu_free), 2)
            rows[state.name] = Row(state.node.server_id, state.name, state.is_open, height)
        lanes = {state.name: {gpu_id: i for i, gpu_id in enumerate(state.gpu_free)} for state in states}
        windows = [
            window for window in cells.coming_maintenance(cluster, now) if rows.keys() & set(window.servers)
        ]
        ended, are_all = past(service.watch.lives, now - 3600 * hours, rows.keys())
        return now, running, ended, are_all, rows, lanes, windows

    now, running, ended, are_all, rows, lanes, windows = service.watch.read(view)
    since = now - 3600 * hours
    begun = [span.start for span in ended] + [span.start for span, _, _ in running]
    coming = [end for _, _, end in running if end is not None] + [each.end for each in windows]
    coming += [entry["estimated_start"]["at"] or now for entry in entries]
    # A chart shows what there is.
    past_s = now - max(since, min(begun, default=now) - 60)
    ahead_s = min(max(coming, default=now) + 60 - now, AHEAD * 3600 * hours)
    past_s, ahead_s = max(past_s, MIN_PART * ahead_s), max(ahead_s, MIN_PART * past_s)
    window = Window(now - past_s, now, now + ahead_s)
    for each in windows:
        for name in rows.keys() & set(each.servers):
            _add_maintenance(rows[name], window, each)
    for span in ended:
        kind, mark = ENDS.get(span.outcome or "", ("past stopped", "■"))
        _add(rows[span.node], lanes[span.node], window, span, kind, mark=f"{mark} ")
    for span, classes, end in running:
        is_short = end is not None and window.percent(now) - window.percent(span.start) < NARROW
        _add(rows[span.node], lanes[span.node], window, span, classes, bare=is_short)
        if end is not None:
            later = replace(span, start=now, end=end, outcome="expected to end")
            _add(rows[span.node], lanes[span.node], window, later, f"{classes} later", bare=not is_short)
    for entry in entries:
        _add_waiting(rows, window, entry)
    is_empty = not (ended or running or entries or windows)
    most = None if are_all else MAX_ENDED
    return {"window": window, "rows": list(rows.values()), "is_empty": is_empty, "most": most}


def _running(
    state: NodeState, colours: Mapping[str, Colour], now: float, cluster: ClusterState
) -> list[tuple[Span, str, float | None]]:
    found = []
    for lease in state.leases.values():
        end = expected_end(lease, now, cluster)
        for member in lease.on(state.name):
            span = Span(lease, state.name, state.gpu_ids_of(member), lease.granted_at, now)
            classes = cells.css_classes(colours[lease.key]) + (" quarantined" if lease.quarantined else "")
            found.append((span, classes, end))
    return found


def _add(
    row: Row,
    lanes: Mapping[int, int],
    window: Window,
    span: Span,
    classes: str,
    *,
    bare: bool = False,
    mark: str = "",
) -> None:
    """Add a bar for each run of neighbouring GPUs of a span."""
    x = window.percent(span.start)
    width = max(window.percent(span.end) - x, 0.15)
    places = sorted(lanes[gpu_id] for gpu_id in span.gpu_ids if gpu_id in lanes)
    lease, name = span.lease, name_of(span.lease)
    words = span.outcome or "running"
    title = f"{name}: {words}, {duration(span.end - span.start)}{span.why}"
    while places:
        run = [places.pop(0)]
        while places and places[0] == run[-1] + 1:
            run.append(places.pop(0))
        height = LANE * len(run) - 1
        of_team = f"{lease.request.team} / " if lease.request.team else ""
        label = "" if bare or height < LANE else f"{mark}{of_team}{name}"
        place = LANE * run[0]
        row.bars.append(
            Bar(x, width, place, height, classes, label, title, lease.lease_id, lease.fencing_token)
        )


def _add_maintenance(row: Row, window: Window, maintenance: cells.Maintenance) -> None:
    """Add a time in which the server takes no leases."""
    x = window.percent(maintenance.begin)
    if x >= 100:
        return
    length = duration(maintenance.end - maintenance.begin)
    title = f"maintenance for {length}" + (f": {maintenance.reason}" if maintenance.reason else "")
    width = max(window.percent(maintenance.end) - x, 0.5)
    row.bars.append(Bar(x, width, 0, row.height, "window", "maintenance", title, ""))


def _add_waiting(rows: Mapping[str, Row], window: Window, entry: Any) -> None:
    """Add the expected start of a pending request to its server, unless it has `MAX_WAITING`."""
    start = entry["estimated_start"]
    row = rows.get(start["server_name"] or "")
    if start["at"] is None or row is None or start["at"] > window.end:
        return
    if sum("expected" in bar.classes for bar in row.bars) >= MAX_WAITING:
        return
    end = start["at"] + (entry["expected_runtime_s"] or window.end)
    x = window.percent(start["at"])
    width = max(window.percent(end) - x, 0.5)
    name = name_in_words(entry)
    sure = interval_in_words(start, window.now)
    title = f"{name}: should start in {duration(start['at'] - window.now)} ({sure})"
    y, height = row.height + 2, WAITING_LANE - 3
    row.bars.append(Bar(x, width, y, height, "expected", name, title, entry["task_id"]))
    row.height += WAITING_LANE
