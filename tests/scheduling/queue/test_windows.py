"""Scheduling around maintenance windows: no lease that would cross one begins."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from resource_manager.core.changes import (
    Change,
    Granted,
    JobPlaced,
    MaintenanceChanged,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import WEEK_S, Window
from resource_manager.core.models import JobPlace, Request
from resource_manager.core.refusal import RefusalKind
from resource_manager.core.teams import Teams
from resource_manager.manager.demand import Demand
from resource_manager.manager.refusal_wording import detail_of, reasons_of
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.backfill import MAX_AHEAD
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.queue.spans import Span
from resource_manager.scheduling.queue.windows import (
    closed_for,
    ending,
    open_spans,
    opens_at,
    under_maintenance,
)
from resource_manager.scheduling.reasons.feasibility import explain, refusals_of
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import hold, nodes

FIRST_FIT = get_policy("first_fit")
FIFO, BACKFILL = get_order("fifo"), get_order("fifo+backfill")
HOUR_S = 3600.0


def cluster_with(*windows: Window, names: str = "a") -> ClusterState:
    cluster = ClusterState(nodes(names, 8))
    cluster.apply(MaintenanceChanged(windows, 0.0))
    return cluster


def job(name: str, runtime_s: float | None = None, gpus: int = 2, **more: object) -> Request:
    return replace(Request(name, gpus), expected_runtime_s=runtime_s, **more)  # type: ignore[arg-type]


def submit(cluster: ClusterState, request: Request, now: float, order: object = FIFO) -> list[str]:
    changes = allocator.submit(cluster, request, SchedulingPass(FIRST_FIT, order, now))  # type: ignore[arg-type]
    return apply(cluster, changes)


def apply(cluster: ClusterState, changes: list[Change]) -> list[str]:
    for change in changes:
        cluster.apply(change)
    return [change.lease.lease_id for change in changes if isinstance(change, Granted)]


def test_a_job_that_crosses_waits_with_the_window_in_the_sentence_and_starts_at_its_end() -> None:
    cluster = cluster_with(Window(1, ("a",), 3600.0, 7200.0, reason="new fans"))
    assert submit(cluster, job("long", 3601.0), 0.0) == []
    refusal = refusals_of(cluster, [cluster.pending["long"].request], SchedulingPass(FIRST_FIT, FIFO, 0.0))[
        "long"
    ]
    assert refusal.kind is RefusalKind.MAINTENANCE
    assert "maintenance from 1970-01-01T01:00Z until 1970-01-01T02:00Z: new fans" in detail_of(refusal)
    assert submit(cluster, job("short", 3600.0), 0.0) == ["short"]  # it blocks nobody
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 7199.0))) == []
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 7200.0))) == [
        "long"
    ]
    assert cluster.by_name["a"].is_open


def test_what_runs_on_servers_of_open_windows_is_named_once() -> None:
    windows = (Window(1, ("a",), 0.0, 9.0), Window(2, ("a", "gone"), 0.0, 9.0), Window(3, ("b",), 5.0, 9.0))
    cluster = cluster_with(names="ab")
    assert [submit(cluster, job(name, gpus=8), 0.0) for name in "xy"] == [["x"], ["y"]]
    cluster.apply(MaintenanceChanged(windows, 0.0))
    assert [[lease.lease_id for lease in under_maintenance(cluster, now)] for now in (0.0, 5.0, 9.0)] == [
        ["x"],
        ["x", "y"],
        [],
    ]


def test_another_server_is_taken_and_the_verdict_names_the_window() -> None:
    cluster = cluster_with(Window(1, ("a",), 3600.0, 7200.0), names="ab")
    with closed_for(cluster, job("x", 4000.0), SchedulingPass(FIRST_FIT, FIFO, 0.0)):
        first, second = explain(cluster, job("x", 4000.0))
    assert (first.fits, second.fits) == (False, True)
    assert reasons_of(first.reasons, job("x", 4000.0)) == [
        "maintenance from 1970-01-01T01:00Z until 1970-01-01T02:00Z"
    ]
    submit(cluster, job("x", 4000.0), 0.0)
    assert cluster.leases["x"].placement.node == "b"


@pytest.mark.parametrize(
    ("begin_h", "window_preempts", "preemption", "preemptible", "starts"),
    [
        (7.9, False, False, True, False),
        (8.0, False, False, True, True),
        (1.0, True, True, True, True),
        (1.0, True, True, False, False),
        (1.0, True, False, True, False),
    ],
)
def test_an_unknown_runtime_counts_as_the_guard_unless_the_window_preempts_it(
    begin_h: float, window_preempts: bool, preemption: bool, preemptible: bool, starts: bool
) -> None:
    begin = begin_h * HOUR_S
    cluster = cluster_with(Window(1, ("a",), begin, begin + 60.0, preempt=window_preempts))
    if preemption:
        cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    asked = job("x", None, gpus=0 if not preemptible else 2, preemptible=preemptible)
    assert bool(allocator.allocate(cluster, asked, SchedulingPass(FIRST_FIT, FIFO, 0.0))) == starts
    assert not allocator.allocate(cluster, asked, SchedulingPass(FIRST_FIT, FIFO, begin))


def test_what_is_longer_than_the_time_between_windows_keeps_nothing_from_others() -> None:
    """It never starts there, and would hold back all that it could use."""
    cluster = cluster_with(Window(1, ("a",), HOUR_S, 2 * HOUR_S, every_s=WEEK_S))
    assert submit(cluster, job("long", 8 * 86_400.0, gpus=8), 0.0, BACKFILL) == []
    assert submit(cluster, job("short", 600.0), 0.0, BACKFILL) == ["short"]
    cluster = cluster_with(Window(1, ("a",), HOUR_S, 2 * HOUR_S, every_s=WEEK_S), names="ab")
    hold(cluster, job("unknown", gpus=8), "b", *range(8))
    assert submit(cluster, job("long", 8 * 86_400.0, gpus=8), 0.0, BACKFILL) == []
    assert submit(cluster, job("short", 600.0), 0.0, BACKFILL) == ["short"]
    assert submit(cluster, job("there", 600.0, required_node="b"), 0.0, BACKFILL) == []


@pytest.mark.parametrize(
    ("runtime_s", "every_s", "says"),
    [
        (WEEK_S - HOUR_S, WEEK_S, ""),
        (WEEK_S, WEEK_S, ", which comes again too soon for a run"),
        (
            None,
            8 * HOUR_S,
            ", which comes again too soon for a run of unknown length: state expected_runtime",
        ),
        (None, 9 * HOUR_S, ""),
    ],
)
def test_the_sentence_says_that_no_time_between_windows_is_long_enough(
    runtime_s: float | None, every_s: float, says: str
) -> None:
    cluster = cluster_with(Window(1, ("a",), HOUR_S, 2 * HOUR_S, every_s=every_s, reason="new fans"))
    current = SchedulingPass(FIRST_FIT, FIFO, 0.0)
    assert submit(cluster, job("long", runtime_s), 0.0) == []
    said = detail_of(refusals_of(cluster, [cluster.pending["long"].request], current)["long"])
    assert f"02:00Z{says}: new fans" in said


def test_a_gang_that_windows_never_let_together_keeps_nothing_from_others() -> None:
    cluster = ClusterState(replace(each, address=each.name) for each in nodes("ab", 8))
    cluster.apply(MaintenanceChanged((Window(1, ("a",), HOUR_S, 2 * HOUR_S, every_s=WEEK_S),), 0.0))
    assert submit(cluster, job("gang", 8 * 86_400.0, gpus=8, nodes=2), 0.0, BACKFILL) == []
    assert submit(cluster, job("there", 600.0, required_node="b"), 0.0, BACKFILL) == ["there"]


@pytest.mark.parametrize(
    ("days", "under", "waits_for_both"), [(2, "ab", True), (5, "ab", False), (5, "a", True)]
)
@pytest.mark.parametrize(("names", "same"), [("ab", False), ("abc", True), ("abcd", True)])
def test_a_gang_that_windows_on_several_servers_never_let_together_keeps_nothing_from_others(
    names: str, same: bool, days: int, under: str, waits_for_both: bool
) -> None:
    """Each server alone is open for long enough, but not both at once."""
    rows = {"a": "left", "b": "left", "c": "right", "d": "right"}
    cluster = ClusterState(
        replace(each, address=each.name, labels={"row": rows[each.name]}) for each in nodes(names, 8)
    )
    day = 24 * HOUR_S
    starts = {"a": day, "b": 4 * day}
    windows = (
        Window(n, (x,), at, at + HOUR_S, every_s=WEEK_S)
        for n, (x, at) in enumerate(starts.items())
        if x in under
    )
    cluster.apply(MaintenanceChanged(tuple(windows), 0.0))
    for name in names[2:]:  # it could start there once these have ended
        hold(cluster, job(f"on {name}", gpus=8), name, *range(8))
    gang = job("gang", days * day, gpus=8, nodes=2, same="row" if same else "")
    assert submit(cluster, gang, 0.0, BACKFILL) == []
    there = job("there", 3.5 * day, required_node="b")
    assert submit(cluster, there, 0.0, BACKFILL) == ([] if waits_for_both else ["there"])


@pytest.mark.parametrize("servers", ["a", "ab"])
def test_however_many_never_start_on_a_server_others_do(servers: str) -> None:
    cluster = cluster_with(Window(1, tuple(servers), HOUR_S, 2 * HOUR_S, every_s=WEEK_S), names="ab")
    hold(cluster, job("runs", 9 * 86_400.0, gpus=8), "b", *range(8))
    for number in range(MAX_AHEAD):
        cluster.apply(Queued(job(f"copy_{number}", 8 * 86_400.0), 0.0, number, 0.0))
    assert submit(cluster, job("short", 600.0), 0.0, BACKFILL) == ["short"]


@pytest.mark.parametrize("limit", ["max_runtime_s", "requeue_after_s"])
@pytest.mark.parametrize("runtime_s", [None, 8 * 86_400.0])
def test_a_job_whose_limit_ends_it_before_a_window_crosses_none(limit: str, runtime_s: float | None) -> None:
    cluster = cluster_with(Window(1, ("a",), HOUR_S, 2 * HOUR_S, every_s=WEEK_S))
    late, in_time = ({limit: HOUR_S + more} for more in (1.0, 0.0))
    assert submit(cluster, job("late", runtime_s, **late), 0.0) == []  # type: ignore[arg-type]
    assert submit(cluster, job("x", runtime_s, **in_time), 0.0) == ["x"]  # type: ignore[arg-type]
    again = lease_steps.release(cluster, "x", 10.0, outcome=Outcome.NOT_STARTED)
    assert [change.queued_at for change in again if isinstance(change, Queued)] == [0.0]
    changes = allocator.with_dispatch(cluster, again, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert apply(cluster, changes) == [], "it would begin too late, and be given back and granted for ever"


def test_what_still_runs_at_the_begin_is_preempted_once_and_waits_at_its_old_place() -> None:
    window = Window(7, ("a",), 3600.0, 7200.0, preempt=True)
    cluster = cluster_with(window)
    cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    assert submit(cluster, job("x", preempt_grace_s=60.0), 0.0) == ["x"]
    assert submit(cluster, job("fixed", 3500.0, gpus=0, preemptible=False), 0.0) == ["fixed"]  # it runs on
    assert lease_steps.expire(cluster, 3599.0) == []
    assert lease_steps.expire(cluster, 3600.0) == [Preempting("x", 1, window.preemptor, 3660.0, 3600.0)]
    apply(cluster, lease_steps.expire(cluster, 3600.0))
    assert lease_steps.expire(cluster, 3601.0) == []
    gone = lease_steps.release(cluster, "x", 3610.0, outcome="PREEMPTED")
    assert (
        apply(cluster, allocator.with_dispatch(cluster, gone, SchedulingPass(FIRST_FIT, FIFO, 3610.0))) == []
    )
    assert cluster.pending["x"].queued_at == 0.0
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 7200.0))) == [
        "x"
    ]


def test_a_lease_given_back_before_its_job_began_waits_at_its_old_place_until_the_window_is_over() -> None:
    cluster = cluster_with(Window(7, ("a",), 3600.0, 7200.0))
    assert submit(cluster, job("x", 3500.0, gpus=8), 100.0) == ["x"]
    assert submit(cluster, job("y", 5000.0, gpus=8), 110.0) == []
    gone = lease_steps.release(cluster, "x", 125.0, outcome=Outcome.NOT_STARTED)
    assert (
        apply(cluster, allocator.with_dispatch(cluster, gone, SchedulingPass(FIRST_FIT, FIFO, 125.0))) == []
    )
    waiting = cluster.pending["x"]
    assert (waiting.queued_at, waiting.sequence, waiting.request.labels) == (100.0, 1, {})
    assert [entry.lease_id for entry in FIFO(cluster, 125.0)] == ["x", "y"]
    assert apply(cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, FIFO, 7200.0))) == [
        "x"
    ]


@pytest.mark.parametrize(
    ("launcher", "revoked", "ends"), [("agent", False, True), ("agent", True, False), ("ssh", False, False)]
)
def test_a_window_ends_what_an_agent_runs_also_if_nobody_has_renewed_it(
    launcher: str, revoked: bool, ends: bool
) -> None:
    """Its agent tells and ends it, as while Airflow is stopped; nobody would tell another one."""
    window = Window(7, ("a",), 3600.0, 7200.0, preempt=True)
    cluster = cluster_with(window)
    cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    submit(cluster, job("x", preempt_grace_s=60.0), 0.0)
    cluster.apply(JobPlaced("x", 1, (JobPlace(launcher, "a", "", "m", "/jobs", "1"),), 1.0))
    cluster.apply(Quarantined("x", 1, 600.0, revoked))
    preempted = Preempting("x", 1, window.preemptor, 3660.0, 3600.0)
    assert lease_steps.expire(cluster, 3600.0) == ([preempted] if ends else [])
    cluster.apply(preempted)
    assert lease_steps.expire(cluster, 3700.0) == []
    assert cluster.leases["x"].quarantined


def test_a_request_named_like_a_window_gets_nothing_of_what_it_preempts() -> None:
    """`awaiting_release` and what is reserved are by the preemptor's id, which no request can have."""
    window = Window(7, ("a",), 3600.0, 7200.0, preempt=True)
    cluster = cluster_with(window)
    cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    submit(cluster, job("x", gpus=8), 0.0)
    submit(cluster, job("maintenance 7", 10.0, gpus=8), 0.0)
    apply(cluster, lease_steps.expire(cluster, 3600.0))
    refusals = refusals_of(
        cluster, [cluster.pending["maintenance 7"].request], SchedulingPass(FIRST_FIT, FIFO, 3600.0)
    )
    assert refusals["maintenance 7"].kind is RefusalKind.MAINTENANCE
    with pytest.raises(ValidationError):
        Demand(lease_id=window.preemptor, gpus=1)


def test_a_ttl_tells_nothing_about_the_runtime() -> None:
    cluster = cluster_with(Window(1, ("a",), 3600.0, 7200.0))
    assert not allocator.allocate(cluster, job("x", None, ttl_s=60.0), SchedulingPass(FIRST_FIT, FIFO, 0.0))


def test_a_reservation_begins_after_the_window_and_a_short_job_fills_the_time_before_it() -> None:
    cluster = cluster_with(Window(1, ("a",), 3600.0, 7200.0))
    assert submit(cluster, job("long", 5000.0, gpus=8), 0.0, BACKFILL) == []
    assert submit(cluster, job("later", 5000.0, gpus=1), 0.0, BACKFILL) == []
    assert submit(cluster, job("short", 3000.0, gpus=1), 0.0, BACKFILL) == ["short"]
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, BACKFILL, 0.0))
    assert starts["long"].at == 7200.0


def test_a_window_holds_up_no_reservation_on_another_server() -> None:
    own = Window(2, ("b",), 90_000.0, 93_600.0)
    cluster = cluster_with(Window(1, ("a",), 3600.0, 7200.0), own, names="ab")
    assert submit(cluster, job("runs", 4000.0, gpus=4), 0.0, BACKFILL) == ["runs"]
    assert cluster.leases["runs"].placement.node == "b"
    assert submit(cluster, job("long", 5000.0, gpus=8), 0.0, BACKFILL) == []  # from 4000 on
    assert submit(cluster, job("delays", 5000.0, gpus=4), 0.0, BACKFILL) == []
    assert submit(cluster, job("fills", 4000.0, gpus=4), 0.0, BACKFILL) == ["fills"]


def test_a_gang_is_reserved_where_no_server_of_it_has_a_window() -> None:
    cluster = ClusterState(
        replace(node, address=f"10.0.0.{number}") for number, node in enumerate(nodes("ab", 8), 1)
    )
    cluster.apply(MaintenanceChanged((Window(1, ("b",), 3600.0, 7200.0),), 0.0))
    assert submit(cluster, job("gang", 5000.0, gpus=2, nodes=2), 0.0, BACKFILL) == []
    assert submit(cluster, job("short", 3000.0, gpus=8), 0.0, BACKFILL) == ["short"]
    assert apply(cluster, lease_steps.release(cluster, "short", 3000.0)) == []
    assert apply(
        cluster, allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, BACKFILL, 7200.0))
    ) == ["gang"]


@settings(max_examples=60, deadline=None)
@given(
    windows=st.lists(
        st.builds(
            lambda servers, begin, length, weekly, number: Window(
                number, tuple(sorted(servers)), begin, begin + length, WEEK_S if weekly else None
            ),
            st.sets(st.sampled_from("abc"), min_size=1),
            st.floats(0, 2 * WEEK_S),
            st.floats(1, WEEK_S / 2),
            st.booleans(),
            st.integers(1, 9),
        ),
        max_size=4,
    ),
    jobs=st.lists(
        st.tuples(st.floats(0, WEEK_S), st.floats(1, WEEK_S), st.integers(0, 8)), min_size=1, max_size=12
    ),
    order=st.sampled_from([FIFO, BACKFILL]),
)
def test_no_lease_with_a_known_runtime_crosses_a_window(
    windows: list[Window], jobs: list[tuple[float, float, int]], order: object
) -> None:
    cluster = cluster_with(*windows, names="abc")
    for number, (at, runtime_s, gpus) in enumerate(sorted(jobs)):
        submit(cluster, job(f"j{number}", runtime_s, gpus), at, order)
        for lease in cluster.leases.values():
            runtime = lease.request.expected_runtime_s
            assert runtime is not None
            for window in windows:
                if lease.placement.node in window.servers:
                    assert window.crossed(lease.granted_at, runtime) is None
    assert all(state.is_open for state in cluster.nodes)
    allocator.check(cluster)


def test_a_cluster_without_windows_does_not_try_anything() -> None:
    class Untried(ClusterState):
        trial = None  # type: ignore[assignment]

    cluster = Untried.from_snapshot(cluster_with().snapshot())
    assert allocator.allocate(cluster, job("x"), SchedulingPass(FIRST_FIT, FIFO, 0.0))
    assert not any(
        isinstance(change, Queued)
        for change in allocator.allocate(cluster, job("y"), SchedulingPass(FIRST_FIT, FIFO, 0.0))
    )


def test_a_server_opens_once_no_window_keeps_the_request_from_starting() -> None:
    first, second = Window(1, ("a",), 1000.0, 2000.0), Window(2, ("a",), 2050.0, 3000.0, preempt=True)
    cluster = cluster_with(first, second)

    def opens(asked: Request, at: float, guard_s: float = 500.0) -> float:
        return opens_at(cluster, "a", asked, at, guard_s)

    assert [opens(job("x", 100.0), at) for at in (900.0, 901.0, 1950.0)] == [900.0, 3000.0, 3000.0]
    assert [opens(job("x"), at) for at in (500.0, 501.0)] == [500.0, 3000.0]
    assert opens(job("x"), 501.0, 40.0) == 501.0
    assert opens(job("x"), 961.0, 40.0) == 2000.0
    cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    assert opens(job("x"), 501.0) == 2000.0  # the second window preempts it
    assert opens(job("x"), 2049.9) == 2049.9  # until the very begin
    assert opens(job("x", preemptible=False), 501.0) == 3000.0
    assert opens_at(cluster, "b", job("x"), 1500.0, 500.0) == 1500.0


def test_spans_of_starts_are_cut_where_windows_close_the_server() -> None:
    cluster = cluster_with(Window(1, ("a",), 1000.0, 2000.0))
    spans = [(0.0, 950.0, False, 2), (950.0, math.inf, False, 1)]

    def opened(server: str) -> list[Span]:
        return list(open_spans(cluster, server, job("x", 100.0), spans, 500.0))

    assert opened("a") == [(0.0, 900.0, True, 2), (2000.0, math.inf, False, 1)]
    assert opened("b") == spans


def test_every_open_window_that_preempts_ends_what_runs_there_once() -> None:
    first = Window(1, ("b",), 100.0, 200.0)  # it preempts nothing
    second = Window(2, ("a",), 100.0, 200.0, preempt=True)
    third = Window(3, ("a", "b"), 100.0, 200.0, preempt=True)
    cluster = cluster_with(first, second, third, names="ab")
    cluster.apply(TeamsChanged(Teams(preemption=True), 0.0))
    for name, gpus in (("x", 8), ("y", 8)):
        assert submit(cluster, job(name, 50.0, gpus=gpus), 0.0) == [name]
    found = [(change.lease_id, change.preemptor) for change in ending(cluster, 150.0)]
    assert found == [("x", second.preemptor), ("y", third.preemptor)]
