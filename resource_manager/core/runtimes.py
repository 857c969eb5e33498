"""Learnt runtimes: the last runs of each class of task, bounded, as part of the state."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping

from resource_manager.core.changes import Change, Granted, Outcome, Released
from resource_manager.core.identifiers import BY_HAND
from resource_manager.core.models import Lease, Request

KEPT_RUNTIMES = 20
ENOUGH_RUNTIMES = 3

MAX_CLASSES = 1000
"""Maximum of classes; beyond it, the one that was learnt from longest ago is forgotten."""

JOURNAL_LENGTH = 4096

RESTARTS = "restart_count"
"""Label of a request: how often its job was preempted."""

RAN = "ran_s"
"""Label of a request: the seconds for which its job ran before it was preempted."""

_NUMBER = re.compile("[0-9]+")
_REPEATED = re.compile("#[0-9]+$")


def job_id_of(lease_id: str) -> str:
    """Return the id that all leases of a job share: a replay numbers repeated ones `id#2`, `id#3`."""
    return _REPEATED.sub("", lease_id) if "#" in lease_id else lease_id


def class_of(request: Request) -> str:
    """Return the class of all runs of a task: Airflow, DAG and task, else the id without numbers."""
    labels = request.labels
    if labels.get("dag_id"):
        return "/".join(labels.get(name, "") for name in ("instance", "dag_id", "task_id"))
    return _NUMBER.sub("#", job_id_of(request.lease_id))


def is_one_of_a_kind(request: Request) -> bool:
    """Return whether nothing tells which task a request is of: its id is random, as of `run` and `shell`."""
    return not request.labels.get("dag_id") and BY_HAND.fullmatch(job_id_of(request.lease_id)) is not None


def is_whole(request: Request) -> bool:
    """Return whether a run of the request is one from the begin: a job that was preempted goes on."""
    return request.labels.get(RESTARTS, "0") == "0"


def teaches(request: Request) -> bool:
    """Return whether a run of the request tells how long its task takes; commit.lua does the same."""
    return is_whole(request) and not is_one_of_a_kind(request)


def runs_before(
    runs: Mapping[str, tuple[float, ...]], leases: Iterable[Lease], changes: Iterable[Change]
) -> dict[str, tuple[float, ...]]:
    """Return the runtimes by class without those learnt from the changes, as far as they are still known.

    `leases` are those that ran before the changes.
    """
    running = {lease.lease_id: lease.request for lease in leases}
    learnt: Counter[str] = Counter()
    for change in changes:
        if isinstance(change, Granted):
            running[change.lease.lease_id] = change.lease.request
        elif isinstance(change, Released) and change.outcome == Outcome.SUCCESS:
            request = running.get(change.lease_id)
            if request is not None and teaches(request):
                learnt[class_of(request)] += 1
    before = {name: known[: max(len(known) - learnt[name], 0)] for name, known in runs.items()}
    return {name: known for name, known in before.items() if known}


def run_s(granted_at: float, ended_at: float) -> float:
    """Return how long a task ran, at least a second, in whole milliseconds, which stores keep exactly."""
    return max(math.floor((ended_at - granted_at) * 1000 + 0.5) / 1000, 1.0)


class LearntRuntimes:
    """Runtimes of the last successful runs by class of task, in the order in which they were learnt from."""

    def __init__(self, runs: Mapping[str, Iterable[float]] | None = None) -> None:
        self._runs = {name: tuple(seconds) for name, seconds in (runs or {}).items()}
        self._medians: dict[str, float] = {}
        self._journal: list[str] = []
        self._journal_start = 0

    @property
    def runs(self) -> dict[str, tuple[float, ...]]:
        """The runtimes in seconds by class, the last one last; the class learnt from last is last, too."""
        return dict(self._runs)

    @property
    def classes(self) -> tuple[str, ...]:
        """The classes in the order in which they were learnt from."""
        return tuple(self._runs)

    def runtime_of(self, request: Request) -> float | None:
        """Return the stated runtime in seconds, else the median of the last runs of its class, else None."""
        if request.expected_runtime_s is not None:
            return request.expected_runtime_s
        if not self._runs:
            return None
        name = class_of(request)
        known = self._medians.get(name)
        if known is None and (runs := self._runs.get(name)):
            known = self._medians[name] = statistics.median(runs)
        return known

    def learn(self, name: str, seconds: float) -> dict[str, tuple[float, ...]]:
        """Learn from a run of a class; return what was known before of the classes that it changes."""
        runs = self._runs
        known = runs.pop(name, None)
        if known is not None:
            runs[name] = (*known[1 - KEPT_RUNTIMES :], seconds)
            self._note(name)
            return {name: known}
        before = {}
        if len(runs) >= MAX_CLASSES:
            oldest = next(iter(runs))
            before[oldest] = runs.pop(oldest)
            self._note(oldest)
        runs[name] = (seconds,)
        self._note(name)
        return before

    def unlearn(self, name: str, before: dict[str, tuple[float, ...]], order: tuple[str, ...]) -> None:
        """Take back what was learnt last: `before` is what that returned, `order` the classes before it."""
        del self._runs[name]
        known = self._runs | before
        self._runs = {each: known[each] for each in order}
        for each in (name, *before):
            self._note(each)

    @property
    def mark(self) -> int:
        """The current position in the journal of changed classes, for a later `changed_since`."""
        return self._journal_start + len(self._journal)

    def changed_since(self, mark: int) -> list[str] | None:
        """Return the classes changed since `mark`, with repeats; None: any may have changed."""
        return None if mark < self._journal_start else self._journal[mark - self._journal_start :]

    def _note(self, name: str) -> None:
        self._medians.pop(name, None)
        self._journal.append(name)
        if len(self._journal) > JOURNAL_LENGTH:
            cut = len(self._journal) // 2
            del self._journal[:cut]
            self._journal_start += cut
