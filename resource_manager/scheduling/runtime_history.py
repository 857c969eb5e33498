"""Expected runtime of a request: the one it states, else the median of earlier runs of the same task."""

from __future__ import annotations

import re
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from resource_manager.core.changes import Change, Expired, Granted, MembersReleased, Outcome, Released
from resource_manager.core.models import Lease, Request

KEPT_RUNTIMES = 20
ENOUGH_RUNTIMES = 3
MAX_TASKS = 10_000


class Confidence(IntEnum):
    """Confidence of an estimate: the lowest of all lease ends it depends on."""

    POOR = 1
    FAIR = 2
    GOOD = 3

    def __str__(self) -> str:
        return self.name.lower()


@dataclass(frozen=True, slots=True)
class Runtime:
    """Expected runtime of a task in seconds, with its confidence."""

    seconds: float
    confidence: Confidence


RuntimeOf = Callable[[Request], Runtime | None]
"""(request) -> its expected runtime; None if it is unknown."""


def stated_runtime(request: Request) -> Runtime | None:
    """Return the runtime that the request itself states, or None."""
    seconds = request.expected_runtime_s
    return None if seconds is None else Runtime(seconds, Confidence.GOOD)


def task_key(request: Request) -> str:
    """Return the key that all runs of a task share: Airflow, DAG and task, else the id without numbers."""
    labels = request.labels
    if labels.get("dag_id"):
        return "/".join(labels.get(name, "") for name in ("instance", "dag_id", "task_id"))
    return re.sub(r"\d+", "#", request.lease_id)


class RuntimeHistory:
    """Runtimes of ended tasks: a fold of the changes, bounded in tasks and in runs of each.

    Add each change once, in order. It is not part of the state: two processes may have learnt from
    different parts of the history, and then estimate and backfill differently, both safely.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, deque[float]] = OrderedDict()
        self._medians: dict[str, Runtime] = {}
        self._live: dict[str, Lease] = {}

    def add(self, change: Change) -> None:
        """Learn from a change: a lease released with outcome SUCCESS tells how long its task ran."""
        match change:
            case Granted(lease=lease):
                self._live[lease.lease_id] = lease
            case MembersReleased(lease_id=lease_id, fencing_token=fencing_token):
                broken = self._live.get(lease_id)
                if broken is not None and broken.fencing_token == fencing_token:
                    del self._live[lease_id]
            case Released() | Expired():
                lease_of = self._live.pop(change.lease_id, None)
                if (
                    lease_of is not None
                    and isinstance(change, Released)
                    and lease_of.fencing_token == change.fencing_token
                    and change.outcome == Outcome.SUCCESS
                ):
                    self._learn(task_key(lease_of.request), max(change.at - lease_of.granted_at, 1.0))

    def take_over(self, leases: Iterable[Lease]) -> None:
        """Replace the live leases by these, if the changes that led to them are not available."""
        self._live = {lease.lease_id: lease for lease in leases}

    @property
    def live_count(self) -> int:
        return len(self._live)

    def runtime_of(self, request: Request) -> Runtime | None:
        """Return the stated runtime, else the median of the task's last runs, else None."""
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
