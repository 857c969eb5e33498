"""How long a request should run: what it states, else what earlier runs of the same task took."""

from __future__ import annotations

import re
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from resource_manager.models import Change, Expired, Granted, Lease, Released, Request

KEPT_RUNTIMES = 20
ENOUGH_RUNTIMES = 3
MAX_TASKS = 10_000

CUT_SHORT = frozenset({"FAILED", "CANCELLED"})
"""Outcomes of runs that say nothing about how long the task takes."""


class Confidence(IntEnum):
    """How sure an estimate is: the weakest of all the ends it rests on."""

    POOR = 1
    FAIR = 2
    GOOD = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Runtime:
    """How long a task should run, and how sure that is."""

    seconds: float
    confidence: Confidence


RuntimeOf = Callable[[Request], Runtime | None]
"""The runtime of a request; None if nobody knows."""


def stated_runtime(request: Request) -> Runtime | None:
    """The runtime that the request states itself."""
    seconds = request.expected_runtime_s
    return None if seconds is None else Runtime(seconds, Confidence.GOOD)


def task_key(request: Request) -> str:
    """Name what makes two requests runs of the same task: its DAG and task, else its id without numbers."""
    labels = request.labels
    if labels.get("dag_id"):
        return f"{labels['dag_id']}/{labels.get('task_id', '')}"
    return re.sub(r"\d+", "#", request.task_id)


class RuntimeHistory:
    """The runtimes of tasks that ended: a fold of the changes, bounded in tasks and in runs of each.

    Feed it each change once, in order. It is no part of the state: two processes may have learnt from
    different stretches of the history, and then estimate and backfill differently, each safely.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, deque[float]] = OrderedDict()
        self._medians: dict[str, Runtime] = {}
        self._live: dict[str, Lease] = {}

    def add(self, change: Change) -> None:
        """Learn from a change: a lease that was released tells how long its task ran."""
        match change:
            case Granted(lease=lease):
                self._live[lease.task_id] = lease
            case Released() | Expired():
                lease_of = self._live.pop(change.task_id, None)
                if (
                    lease_of is not None
                    and isinstance(change, Released)
                    and lease_of.fencing_token == change.fencing_token
                    and change.outcome not in CUT_SHORT
                ):
                    self._learn(task_key(lease_of.request), max(change.at - lease_of.granted_at, 1.0))

    def take_over(self, leases: Iterable[Lease]) -> None:
        """Take these for the live leases, where the changes that led to them are not known."""
        self._live = {lease.task_id: lease for lease in leases}

    @property
    def live_count(self) -> int:
        return len(self._live)

    def runtime_of(self, request: Request) -> Runtime | None:
        """The request's own word, else the median of the task's last runs, else None."""
        if request.expected_runtime_s is not None:
            return Runtime(request.expected_runtime_s, Confidence.GOOD)
        return self._medians.get(task_key(request)) if self._medians else None

    def _learn(self, key: str, seconds: float) -> None:
        runs = self._runs.setdefault(key, deque(maxlen=KEPT_RUNTIMES))
        runs.append(seconds)
        sure = Confidence.GOOD if len(runs) >= ENOUGH_RUNTIMES else Confidence.FAIR
        self._medians[key] = Runtime(statistics.median(runs), sure)
        self._runs.move_to_end(key)
        while len(self._runs) > MAX_TASKS:
            forgotten, _ = self._runs.popitem(last=False)
            del self._medians[forgotten]
