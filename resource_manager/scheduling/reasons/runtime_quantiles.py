"""Runtimes as quantiles: those of a task's earlier runs, blended with those of wider classes, and calibrated.

The interval of each estimate is widened, or narrowed, by how often the outcomes of earlier ones fell outside:
adaptive conformal inference (Gibbs and Candès, NeurIPS 2021), on each side, with steps that shrink as in
Angelopoulos, Barber and Bates (ICML 2024). Nothing but runs that are over is learnt from.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from types import MappingProxyType

from resource_manager.core.changes import Change, Expired, Granted, MembersReleased, Outcome, Released
from resource_manager.core.models import Lease, Request
from resource_manager.core.names import is_hold
from resource_manager.core.runtimes import (
    ENOUGH_RUNTIMES,
    KEPT_RUNTIMES,
    class_of,
    is_one_of_a_kind,
    is_whole,
    run_s,
)

MISSED = 0.1
"""Part of the outcomes that should be below an interval, and part that should be above it."""

COVERED = 1 - 2 * MISSED

STATED = "stated"
"""Kind of the classes whose runs are kept as ratios to the runtimes that their requests stated."""

POINTS = 20
"""Number of equal steps between the quantiles that are kept, from the least to the greatest."""

OWN_WEIGHT = 3.0
"""Number of runs of a class as scattered as the wider ones that count as much as those."""

NEW_SHAPE_SPREAD = math.log(2)
"""Widening of an interval, in the logarithm, while runs of the task are over, but none of that shape.

Runs of other shapes may all take equally long and yet tell little: on twice as many GPUs, a run of perfect
speed-up takes half as long.
"""

MAX_CLASSES = 4000
"""Maximum of classes of every width; beyond it, the one that was learnt from longest ago is forgotten."""

FIRST_STEP, LEAST_STEP, STEP_EXPONENT = 0.2, 0.01, 0.6
"""After n outcomes a step is max(FIRST_STEP / n ** STEP_EXPONENT, LEAST_STEP), in the logarithm."""

ROUNDS = 3
"""Number of rounds in which runs that go on are added to those that are over."""

OVERRUN_SHAPE = math.log(2) / math.log(1.1)
"""Shape of the Pareto distribution of a run that is longer than all known ones: in the median, 1.1 times."""


@dataclass(frozen=True, slots=True)
class RuntimeQuantiles:
    """Runtime as quantiles in equal steps from the least to the greatest, as logarithms of seconds.

    `low_s` to `high_s` is the interval that should hold four runs of five.
    """

    log_s: tuple[float, ...]

    @property
    def low_s(self) -> float:
        return self.at(MISSED)

    @property
    def high_s(self) -> float:
        return self.at(1 - MISSED)

    def at(self, level: float) -> float:
        """Return the runtime in seconds at a level from 0 to 1.

        Like runtimes in the state it is in whole milliseconds, so that one that never varies is met exactly.
        """
        return round(math.exp(_at(self.log_s, level)), 3)

    def given(self, elapsed_s: float) -> RuntimeQuantiles:
        """Return the quantiles of a run that takes longer than that."""
        if elapsed_s <= 0 or (log_s := math.log(elapsed_s)) < self.log_s[0]:
            return self
        passed = _level(self.log_s, log_s)
        if passed < 1:
            left = (_at(self.log_s, passed + (1 - passed) * index / POINTS) for index in range(POINTS + 1))
        else:  # the greatest of all is the one at the middle of the last step
            levels = (min(index, POINTS - 0.5) / POINTS for index in range(POINTS + 1))
            left = (log_s - math.log(1 - level) / OVERRUN_SHAPE for level in levels)
        return RuntimeQuantiles(tuple(max(each, log_s) for each in left))

    def beside(self, over: int, elapsed_s: Sequence[float]) -> RuntimeQuantiles:
        """Return the quantiles of so many runs that are over, and of those that have run that long so far.

        The first that are over are the short ones: each that goes on counts with what is left of the
        distribution beyond its time, until that agrees (self-consistency; Efron, Berkeley Symposium 1967).
        """
        found, long_s = self, sorted(each for each in elapsed_s if each > self.at(0.0))
        some_s = long_s[:: 1 + len(long_s) // KEPT_RUNTIMES]
        for _ in range(ROUNDS if some_s else 0):
            points = [(log_s, over + OWN_WEIGHT) for log_s in self.log_s]
            weight = len(long_s) / len(some_s)
            points += ((log_s, weight) for each in some_s for log_s in found.given(each).log_s)
            found = RuntimeQuantiles(_weighted(points))
        return found


@dataclass(slots=True)
class Coverage:
    """Offsets of both ends of an interval, learnt from the outcomes of earlier ones."""

    below: float = 0.0
    above: float = 0.0
    outcomes: int = 0

    def note(self, outcome: float, low: float, high: float) -> None:
        """Learn from an outcome and the interval that was given for it before."""
        self.outcomes += 1
        step = max(FIRST_STEP * self.outcomes**-STEP_EXPONENT, LEAST_STEP)
        self.below += step * ((outcome < low) - MISSED)
        self.above += step * ((outcome > high) - MISSED)


class RuntimeModel:
    """Quantiles of runtimes by class of task, learnt from runs in the order in which they ended.

    A class is a task of a DAG, or an id without its numbers; within it, requests of one team and shape. The
    wider ones are the DAG and all tasks; runs by hand count for all runs of their user on that machine, and
    all tasks. Where a request states its runtime, what is learnt is the ratio of runtime and statement.
    `runs` are runtimes by class, as the state keeps them, to begin with.
    """

    def __init__(self, runs: Mapping[str, Iterable[float]] = MappingProxyType({})) -> None:
        self._coverage = {"": Coverage(), STATED: Coverage()}
        self._logs: dict[tuple[object, ...], deque[float]] = {}
        self._curves: dict[tuple[object, ...], tuple[float, ...]] = {}
        for name, seconds in runs.items():
            for value in seconds:
                for key in _wide_classes("", name):
                    self._add(key, math.log(max(value, 1.0)))

    def estimate(self, request: Request) -> RuntimeQuantiles | None:
        """Return the quantiles of a request's runtime; None if there is too little to tell from."""
        stated_s, name = request.expected_runtime_s, class_of(request)
        if stated_s is not None and is_hold(request.lease_id, request.labels):  # which nobody renews
            return RuntimeQuantiles((math.log(max(stated_s, 1.0)),) * (POINTS + 1))
        known: Sequence[float] | None = None
        kind, base = "", 0.0
        if stated_s is not None:
            kind, base = STATED, math.log(max(stated_s, 1.0))
            known = (0.0,) * (POINTS + 1)
        elif len(self._logs.get(("",), ())) < ENOUGH_RUNTIMES and not self._logs.get(("", "class", name)):
            return None
        wider: deque[float] | None = None
        own = _own_class(kind, name, request)
        for key in (*_wide_classes(kind, name), own):
            if (logs := self._logs.get(key)) is not None:
                known = _blend(known, self._curve(key), _weight(logs, wider))
                wider = logs
        if known is None:
            return None
        is_new_shape = not kind and own not in self._logs and (kind, "class", name) in self._logs
        spread = NEW_SHAPE_SPREAD if is_new_shape else 0.0
        return RuntimeQuantiles(tuple(_calibrated(known, base, self._coverage[kind], spread)))

    def learn(self, request: Request, seconds: float, given: RuntimeQuantiles | None = None) -> None:
        """Learn from a run that ended well, and from the estimate that was given when it began."""
        seconds = max(seconds, 1.0)
        if given is not None:
            kind = "" if request.expected_runtime_s is None else STATED
            self._coverage[kind].note(seconds, given.low_s, given.high_s)
        name, bases = class_of(request), {"": 1.0}
        if request.expected_runtime_s is not None:
            bases[STATED] = max(request.expected_runtime_s, 1.0)
        for kind, base in bases.items():
            keys = (*_wide_classes(kind, name), _own_class(kind, name, request))
            for key in keys[:-2] if is_one_of_a_kind(request) else keys:
                self._add(key, math.log(seconds / base))

    def _add(self, key: tuple[object, ...], log_s: float) -> None:
        logs = self._logs.pop(key, None)
        if logs is None:
            logs = deque(maxlen=KEPT_RUNTIMES)
            if len(self._logs) >= MAX_CLASSES:
                oldest = next(iter(self._logs))
                del self._logs[oldest]
                self._curves.pop(oldest, None)
        self._logs[key] = logs
        logs.append(log_s)
        self._curves.pop(key, None)

    def _curve(self, key: tuple[object, ...]) -> tuple[float, ...]:
        curve = self._curves.get(key)
        if curve is None:
            ordered = sorted(self._logs[key])
            curve = self._curves[key] = tuple(_at(ordered, index / POINTS) for index in range(POINTS + 1))
        return curve


class RunWalk:
    """Walk over a history by which a model learns: `add` takes every change once, in order."""

    def __init__(self, model: RuntimeModel) -> None:
        self.model = model
        self._going: dict[int, tuple[Lease, RuntimeQuantiles | None]] = {}

    def add(self, change: Change) -> None:
        """Estimate a run that begins, or learn from one that ends well."""
        if isinstance(change, Granted):
            lease = change.lease
            self._going[lease.fencing_token] = lease, self.model.estimate(lease.request)
        elif isinstance(change, Released | Expired | MembersReleased):  # what is left then ends like that
            going = self._going.pop(change.fencing_token, None)
            if going is None or not isinstance(change, Released) or change.outcome != Outcome.SUCCESS:
                return
            lease, given = going
            if is_whole(lease.request):
                self.model.learn(lease.request, run_s(lease.granted_at, change.at), given)


def _calibrated(known: Sequence[float], base: float, coverage: Coverage, spread: float) -> Iterator[float]:
    """Yield the quantiles with both halves moved by spread and offsets, never past the median."""
    median, least = known[POINTS // 2], -math.inf
    below, above = spread + coverage.below, spread + coverage.above
    for index, log_s in enumerate(known):
        far = (index / POINTS - 0.5) / (0.5 - MISSED)
        if far < 0:
            log_s = min(log_s + far * below, median)
        else:
            log_s = max(log_s + far * above, median)
        least = max(least, base + log_s)
        yield least


def _wide_classes(kind: str, name: str) -> tuple[tuple[object, ...], ...]:
    """Return the keys of all tasks, of the DAG, if the class is of one, and of the class."""
    dag = name.rpartition("/")[0]
    return (kind,), *(((kind, "dag", dag),) if dag else ()), (kind, "class", name)


def _own_class(kind: str, name: str, request: Request) -> tuple[object, ...]:
    return kind, "own", name, request.team, request.shape


def _weight(own: Sequence[float], wider: Sequence[float] | None) -> float:
    """Return the weight of a class against wider ones: the more runs, and the closer together, the more.

    As in empirical Bayes, the wider ones count by the part of their variance that is also within the class.
    """
    part = 1.0
    if wider is not None and len(own) >= ENOUGH_RUNTIMES and (spread := _variance(wider)) > 0:
        part = min(_variance(own) / spread, 1.0)
    return len(own) / (len(own) + OWN_WEIGHT * part)


def _variance(values: Sequence[float]) -> float:
    mean = sum(values) / len(values)
    return sum((value - mean) ** 2 for value in values) / len(values)


def _blend(known: Sequence[float] | None, own: Sequence[float], weight: float) -> Sequence[float]:
    if known is None:
        return own
    return [weight * new + (1 - weight) * old for new, old in zip(own, known, strict=True)]


def _at(ordered: Sequence[float], level: float) -> float:
    """Return the quantile of values in ascending order, linear between neighbours."""
    place = level * (len(ordered) - 1)
    index = int(place)
    low, high = ordered[index], ordered[min(index + 1, len(ordered) - 1)]
    return low + (high - low) * (place - index)


def _weighted(points: list[tuple[float, float]]) -> tuple[float, ...]:
    """Return the quantiles in equal steps of (value, weight), from the least to the greatest value."""
    points.sort()
    middles = [
        until - weight / 2
        for until, (_, weight) in zip(accumulate(weight for _, weight in points), points, strict=True)
    ]
    step = (middles[-1] - middles[0]) / POINTS
    places = (bisect_left(middles, middles[0] + step * index) for index in range(POINTS + 1))
    return tuple(points[min(place, len(points) - 1)][0] for place in places)


def _level(ordered: Sequence[float], value: float) -> float:
    """Return the level of a value among quantiles in equal steps: 0 below all, 1 from the greatest on."""
    if value >= ordered[-1]:
        return 1.0
    index = bisect_left(ordered, value)
    if not index:
        return 0.0
    low, high = ordered[index - 1], ordered[index]
    return (index - 1 + (value - low) / (high - low)) / (len(ordered) - 1)
