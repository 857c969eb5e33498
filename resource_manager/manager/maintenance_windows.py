"""Maintenance windows for callers: their form with times as text, its check, and the windows as they are."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, Field, ValidationError

from resource_manager.core.changes import MaintenanceChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import WEEK_S, Window, as_text
from resource_manager.core.names import listed
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.demand import complaint, in_words
from resource_manager.manager.demand_fields import ServerRef, Text
from resource_manager.manager.requests import server_name
from resource_manager.manager.wording import bounded
from resource_manager.scheduling.queue.windows import running

MAX_WINDOWS = 1000
MAX_NAMED = 5
EXAMPLE = "2026-12-01T08:00+01:00"


def _moment(value: object) -> object:
    given = value
    if isinstance(value, str):
        with suppress(ValueError):
            value = datetime.fromisoformat(value.strip())
    if not isinstance(value, datetime):  # nor a number, whose unit and zone nobody has stated
        raise ValueError(f"must be a time such as {EXAMPLE}, got {given!a:.60}")
    if value.utcoffset() is None:
        raise ValueError(f"has no time zone: write it as in {EXAMPLE}, or with Z for UTC")
    if not 1970 <= value.year < 9999:
        raise ValueError("must be in the years 1970 to 9998")
    return value


Moment = Annotated[datetime, BeforeValidator(_moment, json_schema_input_type=str)]


class WindowForm(BaseModel, extra="forbid", strict=True):
    """A maintenance window as somebody asks for it."""

    servers: Annotated[list[ServerRef], Field(min_length=1, max_length=10_000)] = Field(
        description="Servers by name or id."
    )
    begin: Moment = Field(alias="from", description=f"Begin, with a time zone: {EXAMPLE}.")
    until: Moment = Field(description="End, with a time zone.")
    every: Literal["week"] | None = Field(
        default=None, description="week: the window comes again every 7 times 24 hours."
    )
    reason: Text = Field(default="", description="Reason, which those who wait are shown.")
    preempt: bool = Field(
        default=False,
        description="Preempt at the begin what still runs, if the teams file has preemption on.",
    )

    @classmethod
    def of(cls, **values: Any) -> WindowForm:
        """Return the form of a Python caller's values; raises `InvalidRequestError`, the first error."""
        try:
            return cls.model_validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            words = complaint(str(first["loc"][0]), in_words(first))
            raise InvalidRequestError(words) from None


def window_of(cluster: ClusterState, form: WindowForm, now: float) -> Window:
    """Return the window, numbered; raises `InvalidRequestError`."""
    names = tuple(dict.fromkeys(server_name(cluster, ref, "servers") for ref in form.servers))
    begin, end = form.begin.timestamp(), form.until.timestamp()
    every_s = None if form.every is None else WEEK_S
    if end <= begin:
        raise InvalidRequestError("{until} ({}) must be after its begin ({})", as_text(end), as_text(begin))
    if every_s is None and end <= now:
        raise InvalidRequestError("{until} ({}) is over already", as_text(end))
    if every_s is not None and end - begin >= every_s:
        raise InvalidRequestError("{until}: a window of every week must be shorter than a week")
    if sum(window.occurrence(now) is not None for window in cluster.windows) >= MAX_WINDOWS:
        raise InvalidRequestError("there are {} windows already: remove some", MAX_WINDOWS)
    # Never given again, so that a removal that is repeated cannot meet another window.
    number = cluster.version + 1
    return Window(number, names, begin, end, every_s, form.reason, form.preempt)


def same_as(windows: Iterable[Window], window: Window) -> Window | None:
    """Return the one of the windows that differs by its number alone, if there is one."""
    return next((each for each in windows if each == replace(window, window_id=each.window_id)), None)


def replaced(cluster: ClusterState, windows: Iterable[Window], now: float) -> MaintenanceChanged:
    """Return the change to these windows, without those that are over."""
    wanted = tuple(windows)
    before, after = ({window.window_id: window for window in each} for each in (cluster.windows, wanted))
    lines = [
        f"{sign} {_in_words(window)}"
        for sign, one, other in (("-", before, after), ("+", after, before))
        for number, window in one.items()
        if other.get(number) != window
    ]
    kept = tuple(window for window in wanted if window.occurrence(now))
    return MaintenanceChanged(kept, now, lines=bounded(lines))


def _in_words(window: Window) -> str:
    weekly = " every week" if window.every_s is not None else ""
    why = f": {window.reason}" if window.reason else ""
    return (
        f"window {window.window_id}{weekly} from {as_text(window.begin)} until {as_text(window.end)} "
        f"on {listed(window.servers, MAX_NAMED)}{why}"
    )


def view(cluster: ClusterState, now: float) -> list[WindowView]:
    """Return the windows that are open or to come, the next to begin first."""
    live = [window for window in cluster.windows if window.occurrence(now)]
    return [as_view(cluster, window, now) for window in sorted(live, key=lambda w: w.occurrence(now) or ())]


def numbered(cluster: ClusterState, number: int, now: float) -> WindowView | None:
    found = (as_view(cluster, window, now) for window in cluster.windows if window.window_id == number)
    return next(found, None)


def as_view(cluster: ClusterState, window: Window, now: float) -> WindowView:
    """Return one window as plain values, with its times in UTC."""
    begin, end = window.occurrence(now) or (window.begin, window.end)
    return {
        "id": window.window_id,
        "servers": list(window.servers),
        "from": as_text(begin),
        "until": as_text(end),
        "every": None if window.every_s is None else "week",
        "reason": window.reason,
        "preempt": window.preempt,
        "is_open": begin <= now < end,
        "begins_in_s": max(begin - now, 0.0),
        "running": [lease.lease_id for lease in running(cluster, window)],
    }
