"""When announced demands should be made: by runtimes of the tasks before them, and lags learnt after these.

The lag of a task is the time from the end of the tasks with GPUs before it, or from its announcement, to its
request: all that happens in between, such as tasks without GPUs. It is learnt as runtimes are.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from resource_manager.core.announced import along_the_dag, names_announced
from resource_manager.core.changes import Announced, Change, Expired, Granted, Queued, Released, Withdrawn
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.runtimes import RAN
from resource_manager.scheduling.queue.runtime_limits import count_of
from resource_manager.scheduling.reasons.lease_ends import began_at
from resource_manager.scheduling.reasons.runtime_quantiles import MISSED, RuntimeModel, RuntimeQuantiles

LEVELS = (MISSED, 0.5, 1 - MISSED)

Times = tuple[float, float, float]
"""Earliest, median and latest time, in seconds of the store's clock: four times of five between the outer."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """When an announced demand should be made.

    `times` is None without the history of the task `unknown`, or, if it `waits`, without its expected start.
    """

    announced: Announced
    times: Times | None
    unknown: str = ""
    waits: bool = False

    def at(self, level: float) -> float:
        """Return the time at a level from 0 to 1, between those that are known; infinite if none is."""
        first, median, last = self.times or (math.inf,) * 3
        return (
            first + 2 * level * (median - first)
            if level < 0.5
            else median + (2 * level - 1) * (last - median)
        )


class LagWalk:
    """Walk over a history that learns lags of announced demands: `add` takes each change once, in order."""

    def __init__(self) -> None:
        self._model = RuntimeModel()
        self._going: dict[str, tuple[Announced, RuntimeQuantiles | None]] = {}
        self._before: Counter[str] = Counter()
        """How many announced demands come after each lease id."""
        self._ended: dict[str, float] = {}
        """When the leases last ended after which announced demands come."""

    def add(self, change: Change) -> None:
        """Learn from a request that was announced."""
        match change:
            case Announced():
                self._pop(change.lease_id)
                self._going[change.lease_id] = change, self._model.estimate(_lag_of(change))
                self._before.update(change.after)
            case Withdrawn():
                self._pop(change.lease_id)
            case Granted(lease=lease):
                self._made(lease.lease_id, lease.arrived_at)
            case Queued():
                self._made(change.request.lease_id, change.queued_at)
            case Released() | Expired():
                for name in names_announced(change.lease_id):
                    if name in self._before:
                        self._ended[name] = change.at

    def _made(self, lease_id: str, at: float) -> None:
        for name in names_announced(lease_id):
            if (going := self._going.get(name)) is not None:
                announced, given = going
                ended = max((self._ended.get(each, 0.0) for each in announced.after), default=0.0)
                self._model.learn(_lag_of(announced), at - max(announced.at, ended), given)
                self._pop(name)

    def _pop(self, lease_id: str) -> None:
        for name in self._going.pop(lease_id)[0].after if lease_id in self._going else ():
            self._before[name] -= 1
            if not self._before[name]:
                del self._before[name]
                self._ended.pop(name, None)

    def arrivals(
        self,
        cluster: ClusterState,
        now: float,
        runtime_of: Callable[[Request], RuntimeQuantiles | None],
        starts: Mapping[str, Times],
    ) -> Iterator[Arrival]:
        """Yield when each announced demand should be made; `starts` are known ones of pending requests."""
        ends: dict[str, Times | None] = {}
        """The ends of the tasks before; None if they are not known."""
        unknown: dict[str, tuple[str, bool]] = {}
        """Of tasks before whose ends are not known: the task that this is due to, and whether it waits."""

        def note(name: str, request: Request, begun: Times | None, elapsed_s: float = 0.0) -> None:
            runtime = runtime_of(request)
            end = None
            if begun is not None and runtime is not None:
                left = runtime.given(elapsed_s)
                end = _plus(begun, left)
            other = ends.get(name, end)
            ends[name] = None if end is None or other is None else _latest(end, other)

        before = {name for each in cluster.announced.values() for name in each.after}
        for lease in cluster.leases.values():
            for name in before.intersection(names_announced(lease.lease_id)):
                began = began_at(lease)
                note(name, lease.request, (began,) * 3, now - began)
        for entry in cluster.pending.values():
            for name in before.intersection(names_announced(entry.lease_id)):
                begun, ran_s = starts.get(entry.lease_id), count_of(entry.request.labels, RAN)
                if begun is None:
                    unknown[name] = name, True
                else:
                    first, median, last = begun
                    begun = first - ran_s, median - ran_s, last - ran_s
                note(name, entry.request, begun, ran_s)
        ordered = {each.lease_id: each for each in along_the_dag(cluster.announced)}
        for announced in (ordered | dict(cluster.announced)).values():  # what is in a cycle comes last
            for name in announced.after:
                if name not in ends:
                    at = self._ended.get(name, announced.at)
                    ends[name] = None if name in cluster.announced else (at, at, at)
            arrival = self._arrival(announced, now, ends, unknown)
            if announced.lease_id in before:
                note(announced.lease_id, announced.request, arrival.times)
                if arrival.times is None:
                    unknown[announced.lease_id] = arrival.unknown, arrival.waits
            yield arrival

    def _arrival(
        self,
        announced: Announced,
        now: float,
        ends: Mapping[str, Times | None],
        unknown: Mapping[str, tuple[str, bool]],
    ) -> Arrival:
        ready: Times = (announced.at,) * 3
        for name in announced.after:
            if (end := ends[name]) is None:
                return Arrival(announced, None, *unknown.get(name, (name, False)))
            ready = _latest(ready, end)
        if (lag := self._model.estimate(_lag_of(announced))) is None:
            return Arrival(announced, None, announced.lease_id)
        return Arrival(announced, _latest(_plus(ready, lag.given(now - ready[-1])), (now,) * 3))


def _lag_of(announced: Announced) -> Request:
    """Return the request by whose class the lag is learnt; the runtime that it states is not that."""
    return replace(announced.request, expected_runtime_s=None, utility=None)


def _plus(begun: Times, later: RuntimeQuantiles) -> Times:
    first, median, last = (at + later.at(level) for at, level in zip(begun, LEVELS, strict=True))
    return first, median, last


def _latest(one: Times, other: Times) -> Times:
    first, median, last = map(max, one, other)
    return first, median, last
