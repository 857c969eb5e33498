"""Replays of jobs that wait for maintenance windows, also after the last event of the workload."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import count
from typing import Any
from unittest.mock import Mock

import pytest

from resource_manager.core.changes import MaintenanceChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Request
from resource_manager.core.teams import Teams
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.queue.windows import open_spans
from simulator.errors import SimulationError
from simulator.openings import first_opening
from simulator.replay import job_courses
from simulator.replay.job_runs import JobRun
from simulator.replay.replay import Replay
from simulator.replay.workload import EventBatch, Job, Workload
from tests.builders import nodes

HOUR = 3600.0
NIGHTLY = Window(1, ("a",), 22 * HOUR, 24 * HOUR, every_s=24 * HOUR)


def play(
    *jobs: Job,
    order: str = "fifo",
    windows: tuple[Window, ...] = (NIGHTLY,),
    checkpoint_s: float = HOUR,
    letters: str = "a",
) -> list[JobRun]:
    """Return how the jobs run of which the last comes at 600 s."""
    batches = (
        EventBatch(0.0, external=[MaintenanceChanged(windows, 0.0)]),
        EventBatch(500.0, arrivals=list(jobs[:1])),
        EventBatch(600.0, arrivals=list(jobs[1:])),
    )
    workload = Workload("made", ClusterState(nodes(letters, 4)).snapshot(), batches)
    rules = Teams(preemption=True) if any(window.preempt for window in windows) else None
    record = Replay(workload, first_fit, get_order(order), rules, checkpoint_s=checkpoint_s).run()
    return list(record.job_runs.values())


NUMBERS = count()


def job(hours: float, *, preemptible: bool = False) -> Job:
    """Return a job of all GPUs, whose runtime is stated unless it is preemptible or endless."""
    stated_s = None if preemptible or hours == math.inf else hours * HOUR
    name = f"j{next(NUMBERS)}"
    request = Request(name, 4, expected_runtime_s=stated_s, preemptible=preemptible, preempt_grace_s=0.0)
    return Job(request, 0.0, hours * HOUR)


@pytest.mark.parametrize("order", ["fifo", "priority+backfill"])
def test_jobs_that_wait_for_a_window_start_when_it_is_over_however_long_after_the_last_event(
    order: str,
) -> None:
    """Those of the second and third night were told to have no start."""
    runs = play(*(job(20.0) for _ in range(70)), order=order)
    assert [each.started_at for each in runs] == [500.0, *(24 * HOUR * number for number in range(1, 70))]


def test_a_window_preempts_also_after_the_last_event() -> None:
    window = Window(1, ("a",), 22 * HOUR, 24 * HOUR, every_s=24 * HOUR, preempt=True)
    before = Window(2, ("a",), 10 * HOUR, 11 * HOUR)
    [long] = play(job(30.0, preemptible=True), windows=(window, before))
    assert [part.ended_at for part in long.parts] == [22 * HOUR]
    assert (long.started_at, long.ended_at) == (24 * HOUR, (24 + 30 - 21) * HOUR)


def test_a_window_preempts_also_what_starts_when_nothing_else_was_due() -> None:
    windows = (
        Window(1, ("a",), 26 * HOUR, 40 * HOUR),
        Window(2, ("a",), 50 * HOUR, 52 * HOUR, preempt=True),
    )
    _, long = play(job(20.0, preemptible=True), job(30.0, preemptible=True), windows=windows)
    assert [(part.lease.granted_at, part.ended_at) for part in long.parts] == [(40 * HOUR, 50 * HOUR)]


@pytest.mark.parametrize("first_h", [1.0, math.inf])
def test_a_job_that_no_window_or_a_job_without_an_end_lets_start_ends_no_replay(first_h: float) -> None:
    first, *rest = play(job(first_h), job(23.0), job(2.0))
    assert first.started_at == 500.0
    assert [each.started_at for each in rest] == [None, None if first_h == math.inf else 500.0 + HOUR]


def test_a_server_that_opens_while_another_is_taken_for_good_is_waited_for() -> None:
    window = Window(1, ("b",), 30 * HOUR, 100 * HOUR)
    endless, other = play(job(math.inf), job(48.0), windows=(window,), letters="ab")
    assert (endless.started_at, other.started_at) == (500.0, 100 * HOUR)


def test_a_job_that_each_window_preempts_before_it_saves_anything_ends_the_replay_with_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(job_courses, "MAX_LOOKS", 30)
    window = Window(1, ("a",), 22 * HOUR, 24 * HOUR, every_s=24 * HOUR, preempt=True)
    with pytest.raises(SimulationError, match="not all jobs ended within 30 maintenance windows"):
        play(job(30.0, preemptible=True), windows=(window,), checkpoint_s=48 * HOUR)


def test_a_replay_that_is_as_recorded_looks_for_no_window_after_the_last_event(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Nothing is decided then, and a look at a long queue takes its time."""
    looks = Mock(return_value=math.inf)
    monkeypatch.setattr(job_courses, "first_opening", looks)
    batches = (
        EventBatch(0.0, external=[MaintenanceChanged((NIGHTLY,), 0.0)]),
        EventBatch(5 * HOUR, arrivals=[job(20.0)]),
    )
    for is_recorded in (True, False):
        start = ClusterState(nodes("a", 4)).snapshot()
        Replay(Workload("made", start, batches, is_recorded=is_recorded), first_fit, get_order("fifo")).run()
        assert looks.called is not is_recorded


def test_what_no_window_of_one_period_lets_start_is_looked_at_in_no_later_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A job without an end takes all, and each night is as the one before: a hundred were looked at."""
    looks = Mock(wraps=first_opening)
    monkeypatch.setattr(job_courses, "first_opening", looks)
    _, waits = play(job(math.inf), job(20.0))
    assert waits.started_at is None
    assert 1 <= looks.call_count <= 4


def test_an_opening_is_looked_for_once_of_servers_under_the_same_windows_and_not_beyond_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All openings of a hundred windows were, of each server for each runtime: a replay took hours to end."""
    spans, servers, day = Mock(), nodes("abcdefghij", 4), 24 * HOUR

    def counted(*args: Any) -> Iterator[Any]:
        for span in open_spans(*args):
            spans(span)
            yield span

    monkeypatch.setattr("simulator.openings.open_spans", counted)
    names = tuple(each.name for each in servers)
    nightly = (
        Window(number, names, number * day - 2 * HOUR, number * day, every_s=7 * day)
        for number in range(1, 8)
    )
    cluster = ClusterState(servers)
    cluster.apply(MaintenanceChanged(tuple(nightly), 0.0))
    waiting = [Request(f"w{number}", 4, expected_runtime_s=HOUR + number) for number in range(30)]
    assert first_opening(cluster, waiting, 5 * HOUR, after=5 * HOUR) == day
    assert spans.call_count < 100
