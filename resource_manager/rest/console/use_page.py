"""Use: the GPU-hours over time and by team, user, DAG or GPU type, from the same report as the command's."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from time import gmtime, strftime
from typing import Any, Generic, TypeVar

from resource_manager.fleet.server_use import measures_of
from resource_manager.manager.answer_words import duration
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.plurals import counted
from resource_manager.manager.queue_view import CHEAP_S
from resource_manager.manager.report import Accounts, ReportQuery
from resource_manager.manager.results import SlurmJob
from resource_manager.manager.server_views import most_wasted, wasted
from resource_manager.manager.slurm_jobs import is_live
from resource_manager.scheduling.accounting.gpu_hours import CATEGORIES

HEIGHT = 180
"""Height of the chart in pixels."""

T = TypeVar("T")

MAX_AGE_S = 60.0
"""Most age of an account, or of another value, that takes a while to make."""

MAX_PART = 0.1
"""Most part of the time that goes into making it."""

MIN_SHOWN_S = 600.0
"""Shortest time that the chart shows."""


class AgedCache(Generic[T]):
    """Last value that `make` returned, kept for all who ask for as long as it takes too much time to make."""

    def __init__(
        self, make: Callable[[GPUResourceManager], T], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._make = make
        self._clock = clock
        self._lock = threading.Lock()
        self._last: T | None = None
        self._good_until = 0.0
        self._usable_until = 0.0

    def of(self, manager: GPUResourceManager) -> T:
        """Return a value at most `MAX_AGE_S` old, of one that is soon made the newest.

        While another is made the last one is good for `MAX_AGE_S` more, so that no threads wait for it.
        """
        began = self._clock()
        if self._last is not None and began < self._usable_until and self._lock.locked():
            return self._last
        with self._lock:
            began = self._clock()
            if self._last is None or began >= self._good_until:
                self._last = self._make(manager)
                ended = self._clock()
                self._good_until = self._usable_until = ended
                if (cost_s := ended - began) > CHEAP_S:
                    self._good_until += min(cost_s / MAX_PART, MAX_AGE_S)
                    self._usable_until = self._good_until + MAX_AGE_S
            return self._last


class AccountsCache(AgedCache[Accounts]):
    """Last account: that of a long history takes a while."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(lambda manager: manager.accounts(), clock)


class SlurmCache(AgedCache[list[SlurmJob]]):
    """Last list of the jobs on Slurm that wait or run: callers may tell of tens of thousands."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__(lambda manager: [job for job in manager.slurm_jobs() if is_live(job)], clock)


@dataclass(frozen=True, slots=True)
class Part:
    """Part of a column of the chart: `x` and `width` in percent, `y` and `height` in pixels."""

    category: str
    x: float
    width: float
    y: float
    height: float
    title: str


def look_at(accounts: Accounts, manager: GPUResourceManager, query: ReportQuery) -> dict[str, Any]:
    """Return the rows, the columns of the chart, and who wasted most."""
    measures = measures_of(manager)
    report = accounts.report(query, measures=measures, prices=manager.prices())
    begun = min((segment.start for segment in accounts.hours.segments), default=accounts.now)
    # The chart starts at what there is.
    shown_s = min(query.since, max(accounts.now - begun, MIN_SHOWN_S))
    starts, columns = accounts.series(shown_s, measures=measures)
    most = most_wasted(report["rows"])
    sums = [sum(columns[name][i] for name in CATEGORIES) for i in range(len(starts))]
    step_s = shown_s / len(starts)
    top = top_of(max(sums, default=0.0) * 3600 / step_s)
    return {
        "report": report,
        "most": None if most is None else (most, wasted(most)),
        "wasted": wasted,
        "parts": _parts(columns, len(sums), top, step_s),
        "top": top,
        "begins_s": shown_s,
        "begins_at": strftime("%Y-%m-%d %H:%M UTC", gmtime(accounts.now - shown_s)),
        "is_all": MIN_SHOWN_S < shown_s < query.since,
        "categories": CATEGORIES,
    }


def top_of(gpus: float) -> float:
    """Return the top of the axis: the least round number, of a GPU and more, that is not below."""
    power = 10 ** math.floor(math.log10(max(gpus, 1.0)))
    return next(float(step * power) for step in (1, 2, 3, 4, 6, 8, 10) if gpus <= step * power * (1 + 1e-9))


def _parts(columns: dict[str, list[float]], count: int, top: float, step_s: float) -> list[Part]:
    """Return the columns; an axis up to `top` GPUs has the height of the chart."""
    found = []
    for i in range(count):
        y = float(HEIGHT)
        for name in CATEGORIES:
            height = HEIGHT * columns[name][i] * 3600 / step_s / top
            if height:
                y -= height
                x = 100 * i / count
                gpus = counted(round(columns[name][i] * 3600 / step_s, 1), "GPU")
                title = f"{gpus} {name} for {duration(step_s)}"
                found.append(Part(name, x, 96 / count, y, height, title))
    return found
