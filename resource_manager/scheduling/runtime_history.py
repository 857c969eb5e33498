"""History of earlier leases: the expected runtime of a task, and the service that a job has attained."""

from __future__ import annotations

import re
import statistics
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import IntEnum

from resource_manager.core.changes import Change, Expired, Granted, MembersReleased, Outcome, Released
from resource_manager.core.models import MILLI_PER_GPU, Lease, Request

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


AttainedOf = Callable[[Request], float]
"""(request) -> GPU seconds that earlier leases of the same job took."""


def nothing_attained(request: Request) -> float:
    """Return 0: the service attained if nothing is known of earlier leases."""
    return 0.0


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


def job_key(lease_id: str) -> str:
    """Return the id that all leases of a job share: a replay numbers repeated ones `id#2`, `id#3`."""
    return re.sub(r"#\d+$", "", lease_id)


class RuntimeHistory:
    """Runtimes of ended tasks and service of unfinished jobs: a fold of the changes, bounded in tasks.

    Add each change once, in order. It is not part of the state: two processes may have learnt from
    different parts of the history, and then estimate and backfill differently, both safely.
    """

    def __init__(self) -> None:
        self._runs: OrderedDict[str, deque[float]] = OrderedDict()
        self._medians: dict[str, Runtime] = {}
        self._attained: OrderedDict[str, float] = OrderedDict()
        self._live: dict[str, Lease] = {}

    def add(self, change: Change) -> None:
        """Learn from a change.

        A lease released with outcome SUCCESS tells how long its task ran. One that expired, or was released
        with an outcome such as FAILED, adds to the service that its job has attained; other ends end the job.
        """
        match change:
            case Granted(lease=lease):
                self._live[lease.lease_id] = lease
            case MembersReleased(lease_id=lease_id, fencing_token=fencing_token):
                broken = self._live.get(lease_id)
                if broken is not None and broken.fencing_token == fencing_token:
                    del self._live[lease_id]
                    self._attain(broken, max(change.at - broken.granted_at, 1.0))
            case Released() | Expired():
                lease_of = self._live.pop(change.lease_id, None)
                if lease_of is None or lease_of.fencing_token != change.fencing_token:
                    return
                seconds = max(change.at - lease_of.granted_at, 1.0)
                outcome = change.outcome if isinstance(change, Released) else Outcome.FAILED
                if outcome == Outcome.SUCCESS:
                    self._learn(task_key(lease_of.request), seconds)
                if outcome in ("", Outcome.SUCCESS):
                    self._attained.pop(job_key(change.lease_id), None)
                else:
                    self._attain(lease_of, seconds)

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

    def attained_gpu_s(self, request: Request) -> float:
        """Return the GPU seconds of the leases with which the job did not end."""
        return self._attained.get(job_key(request.lease_id), 0.0) if self._attained else 0.0

    def _attain(self, lease: Lease, seconds: float) -> None:
        request, key = lease.request, job_key(lease.lease_id)
        gpus = request.gpus * request.gpu_milli / MILLI_PER_GPU * len(lease.members)
        self._attained[key] = self._attained.get(key, 0.0) + gpus * seconds
        self._attained.move_to_end(key)
        while len(self._attained) > MAX_TASKS:
            self._attained.popitem(last=False)

    def _learn(self, key: str, seconds: float) -> None:
        runs = self._runs.setdefault(key, deque(maxlen=KEPT_RUNTIMES))
        runs.append(seconds)
        sure = Confidence.GOOD if len(runs) >= ENOUGH_RUNTIMES else Confidence.FAIR
        self._medians[key] = Runtime(statistics.median(runs), sure)
        self._runs.move_to_end(key)
        while len(self._runs) > MAX_TASKS:
            forgotten, _ = self._runs.popitem(last=False)
            del self._medians[forgotten]
