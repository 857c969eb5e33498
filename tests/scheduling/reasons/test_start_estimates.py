"""Estimated starts of pending requests, from stated and learnt runtimes, never from a TTL."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Drained,
    Granted,
    Preempting,
    Quarantined,
    Queued,
    Released,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import MAX_RUNTIME, REQUEUE_AFTER
from resource_manager.core.models import Lease, Placement, Request, Utility
from resource_manager.core.runtimes import LearntRuntimes
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.manager.serializers import estimate
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.queue.price_admission import PriceAdmission
from resource_manager.scheduling.reasons import start_estimates
from resource_manager.scheduling.reasons.announced_arrivals import Arrival
from resource_manager.scheduling.reasons.feasibility import standings
from resource_manager.scheduling.reasons.lease_ends import MAX_PLAYS, DrawnEnds
from resource_manager.scheduling.reasons.runtime_quantiles import RuntimeQuantiles
from resource_manager.scheduling.reasons.start_estimates import (
    MAX_STEPS,
    Start,
    estimate_starts,
    forecast_starts,
)
from resource_manager.scheduling.scheduling_pass import Limits, SchedulingPass
from tests.builders import Clock, hold, queue_entry
from tests.scheduling.shared_cluster import Shared

FIRST_FIT, FIFO = get_policy("first_fit"), get_order("fifo")


def busy(*runtimes: float | None, ttl_s: float = 50.0) -> ClusterState:
    """Return a cluster with a full server of 8 GPUs for each runtime, leased to `runs0`, … from 0."""
    cluster = ClusterState(default_inventory(len(runtimes)))
    for number, runtime_s in enumerate(runtimes):
        request = Request(f"runs{number}", 8, ttl_s=ttl_s, expected_runtime_s=runtime_s)
        placement = Placement(f"gpu-server-{number}", tuple(range(8)))
        cluster.apply(Granted(Lease(request, (placement,), number + 1, 0.0, ttl_s), 0.0))
    return cluster


def test_a_ttl_is_not_taken_as_the_end_of_a_lease() -> None:
    cluster = busy(None, None)
    for number in range(3):
        cluster.apply(Queued(Request(f"w{number}", 8, ttl_s=100.0), 1.0, number, 1.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert [starts[f"w{number}"].at for number in range(3)] == [None] * 3
    assert estimate(starts["w0"]) == {
        "at": None,
        "earliest": None,
        "latest": None,
        "after": "",
        "plays": 1,
        "ends_by": None,
        "server_name": None,
        "confidence": "unknown",
        "detail": "the end of runs0 bbbb and 1 more is unknown; state runtimes: expected_runtime, "
        "--expected-runtime",
    }


@pytest.mark.parametrize("order", ["fifo", "fifo+backfill"])
def test_only_starts_that_depend_on_known_runtimes_are_estimated(order: str) -> None:
    cluster = busy(600.0, None)
    cluster.apply(Queued(Request("first", 8), 1.0, 1, 1.0))
    cluster.apply(Queued(Request("second", 8), 2.0, 2, 2.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, get_order(order), 10.0))
    first = starts["first"]
    assert (first.at, first.node, first.after) == (600.0, "gpu-server-0", "runs0 bbbb")
    assert starts["second"].at is None


def test_leases_end_and_gpus_get_clean_while_grants_are_suspended() -> None:
    cluster = busy(None, 25.0)
    cluster.apply(AgentSeen("gpu-server-0", 5.0))
    cluster.apply(Released("runs0", 1, 9.5))
    for number in range(3):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=100.0), 9.0, number, 9.0))

    def starts_at(resumed_at: float) -> list[float | None]:
        starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, resumed_at), since=10.0)
        return [starts[f"w{number}"].at for number in range(3)]

    assert starts_at(10.0) == [11.0, 25.0, 111.0]
    assert starts_at(40.0) == [40.0, 40.0, 140.0]


def test_an_estimate_leaves_the_state_unchanged() -> None:
    cluster = busy(600.0)
    for number in range(3):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=100.0), 1.0, number, 1.0))
    before, ends = cluster.snapshot(), cluster.expired(1e9)
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0), [Request("extra", 2)])
    assert [starts[name].at for name in ("w0", "w1", "w2", "extra")] == [600.0, 700.0, 800.0, 900.0]
    after = cluster.snapshot()
    assert replace(after, pending=()) == replace(before, pending=())
    assert sorted(after.pending, key=lambda entry: entry.sequence) == list(before.pending)
    assert cluster.expired(1e9) == ends


def test_a_learnt_runtime_is_the_end_of_a_lease_and_an_overdue_job_goes_on_for_a_tenth() -> None:
    cluster = busy(None)
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    cluster.runtimes = LearntRuntimes({"runs#": (300.0,)})
    assert estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))["w"].at == 300.0
    assert estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 1_000.0))["w"].at == 1_100.0


def test_other_reasons_for_an_unknown_start() -> None:
    cluster = busy(10.0)
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    cluster.apply(Quarantined("runs0", 1, 5.0))
    assert detail_of(estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))["w"].why) == (
        "runs0 bbbb on gpu-server-0 is quarantined, since its job may still run: release the lease once the "
        "job is known to be gone"
    )
    cluster = busy(10.0)
    cluster.apply(Queued(Request("w", 9), 1.0, 2, 1.0))
    detail = detail_of(estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))["w"].why)
    assert detail == "no server could ever satisfy 9 GPUs: the largest, gpu-server-0, has 8"
    cluster = busy(10.0)
    for number in range(MAX_STEPS + 2):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=1.0), 1.0, number, 1.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert detail_of(starts[f"w{MAX_STEPS + 1}"].why) == f"more than {MAX_STEPS} leases end before it"


def test_the_lease_that_is_named_is_on_a_server_that_could_take_the_request() -> None:
    cluster = busy(None, None, None)
    cluster.apply(Drained("gpu-server-0", 1.0))
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    cluster.apply(Queued(Request("here", 8, required_node="gpu-server-2"), 2.0, 2, 2.0))
    cluster.apply(Queued(Request("closed", 8, required_node="gpu-server-0"), 3.0, 3, 3.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert detail_of(starts["w"].why).startswith("the end of runs1 bbbb and 1 more is unknown; ")
    assert detail_of(starts["here"].why).startswith("the end of runs2 bbbb is unknown; ")
    assert detail_of(starts["closed"].why) == "gpu-server-0 has 0 free but is drained"


def test_a_request_that_only_a_silent_server_could_take_has_no_estimate_and_is_told_so() -> None:
    cluster = busy(600.0, 600.0)
    cluster.apply(AgentLost("gpu-server-0", 70.0, 10.0))
    cluster.apply(Queued(Request("w", 8, required_node="gpu-server-0"), 71.0, 1, 71.0))
    cluster.apply(Queued(Request("x", 8), 72.0, 2, 72.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 80.0))
    assert (starts["w"].at, detail_of(starts["w"].why)) == (
        None,
        "gpu-server-0 has 0 free but has been silent since 1970-01-01T00:00Z",
    )
    assert (starts["x"].at, starts["x"].node) == (600.0, "gpu-server-1")


def test_a_request_behind_another_has_the_same_detail() -> None:
    cluster = busy(None, 600.0)
    cluster.apply(Queued(Request("head", 8, required_node="gpu-server-0"), 1.0, 1, 1.0))
    cluster.apply(Queued(Request("behind", 2), 2.0, 2, 2.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert detail_of(starts["behind"].why) == detail_of(starts["head"].why)
    assert "the end of runs0 bbbb is unknown" in detail_of(starts["head"].why)


def test_a_request_whose_place_is_kept_for_a_preemptor_is_told_so() -> None:
    """It was told that no server has a GPU and a CPU at once, of one with two free ones."""
    shared = Shared(Team("vision", 4), letters="a", gpus=4)
    shared.submit("ends", 2, team="nlp", preempt_grace_s=30.0)
    shared.submit("goes on", 2, team="nlp", preempt_grace_s=30.0)
    shared.submit("mine", 4, team="vision", expected_runtime_s=3600.0)
    shared.release("ends", "SUCCESS")
    shared.tick(40.0)
    shared.submit("next", 1, team="nlp", expected_runtime_s=3600.0)
    start = estimate_starts(shared.state, shared.current)["next"]
    assert (start.at, detail_of(start.why)) == (None, shared.refusal("next")[1])
    assert "is kept for mine" in detail_of(start.why)


def test_a_price_that_is_not_covered_names_no_lease() -> None:
    cluster = ClusterState(default_inventory(1))
    request = Request("holds", 4, resources={"cpus": 32})
    cluster.apply(Granted(Lease(request, (Placement("gpu-server-0", (0, 1, 2, 3)),), 1, 0.0), 0.0))
    worth = Utility(16.0, 7200.0)
    asks = Request("w", 4, resources={"cpus": 32}, expected_runtime_s=3600.0, utility=worth)
    cluster.apply(Queued(asks, 1.0, 1, 1.0))
    limits = Limits(PriceAdmission(1.0, 100.0))
    detail = detail_of(
        estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0, limits=limits))["w"].why
    )
    assert detail == "it is unknown when its utility will exceed its price"


def test_a_request_that_a_quota_stops_is_told_so_and_nobody_behind_it_is_told_its_reason() -> None:
    cluster = busy(None, 600.0, None)
    cluster.apply(TeamsChanged(Teams((Team("small", limit=1),)), 0.0))
    head, small = Request("head", 8, required_node="gpu-server-0"), Request("more", 4, team="small")
    for number, request in enumerate((small, head, Request("behind", 2)), start=1):
        cluster.apply(Queued(request, 1.0, number, 1.0))
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert detail_of(starts["more"].why).startswith("team small may hold 1 GPU")
    assert detail_of(starts["behind"].why).startswith("the end of runs0 bbbb is unknown")


def test_the_copies_of_a_mapped_task_come_in_one_step() -> None:
    """Each took a pass over the queue, in each of forty plays."""
    cluster, steps = busy(600.0), Mock(return_value=True)
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    arrival = Arrival(Announced(Request("map", 1), 0.0, copies=100), (50.0,) * 3)
    current = SchedulingPass(FIRST_FIT, FIFO, 10.0)
    assert estimate_starts(cluster, current, goes_on=steps, arrivals=[arrival])["w"].at == 600.0
    assert steps.call_count == 3


# ---- drawn runtimes ----


def between(low_s: float, high_s: float) -> RuntimeQuantiles:
    """Return quantiles in equal steps of the logarithm."""
    low, high = math.log(low_s), math.log(high_s)
    return RuntimeQuantiles(tuple(low + (high - low) * step / 20 for step in range(21)))


def forecast(
    cluster: ClusterState,
    runtime_of: Callable[[Request], RuntimeQuantiles | None],
    *,
    now: float = 10.0,
    order: str = "fifo",
    extra: Sequence[Request] = (),
    plays: int = MAX_PLAYS,
    wanted: Sequence[str] = (),
    is_known: bool = True,
) -> dict[str, Start]:
    if is_known:  # so that no end is a guess
        cluster.runtimes = LearntRuntimes(dict.fromkeys(("runs#", "w#", "w"), (300.0,)))
    requests = (*(entry.request for entry in cluster.pending.values()), *extra)
    drawn = DrawnEnds(cluster, requests, runtime_of, random.Random(0).random, now)
    looks = iter([True] * 10_000 if plays == MAX_PLAYS else [True] * (3 * (plays + 1)))
    current = SchedulingPass(FIRST_FIT, get_order(order), now)
    return forecast_starts(cluster, current, drawn, extra, lambda: next(looks, False), wanted)


@st.composite
def crowded(draw: st.DrawFn) -> ClusterState:
    """Return two to four servers with leases and pending requests, all of stated runtimes."""
    cluster = ClusterState(default_inventory(draw(st.integers(2, 4))))
    current = SchedulingPass(FIRST_FIT, FIFO, 0.0)
    sizes = draw(st.lists(st.tuples(st.integers(1, 8), st.integers(60, 6000)), min_size=8, max_size=25))
    for number, (gpus, runtime_s) in enumerate(sizes):
        # No two leases end at once: rounding would decide which comes first.
        request = Request(f"t{number}", gpus, expected_runtime_s=runtime_s + number / 97)
        for change in allocator.submit(cluster, request, current):
            cluster.apply(change)
    return cluster


@pytest.mark.thorough
@settings(max_examples=25)
@given(crowded(), st.sampled_from(["fifo", "fifo+backfill", "fair_share"]))
def test_plays_with_runtimes_that_hardly_vary_are_the_play_with_expected_ones(
    cluster: ClusterState, order: str
) -> None:
    def hardly_varying(request: Request) -> RuntimeQuantiles:
        stated_s = request.expected_runtime_s or 0.0
        return RuntimeQuantiles((*[math.log(stated_s)] * 20, math.nextafter(math.log(stated_s), math.inf)))

    exact = estimate_starts(cluster, SchedulingPass(FIRST_FIT, get_order(order), 10.0))
    found = forecast(cluster, hardly_varying, order=order)
    assert found.keys() == exact.keys()
    for lease_id, start in exact.items():
        assert start.at is not None
        assert found[lease_id].plays == MAX_PLAYS
        assert found[lease_id].at == pytest.approx(start.at, abs=0.01)
        assert found[lease_id].node == start.node


def unstated(low_s: float, high_s: float) -> Callable[[Request], RuntimeQuantiles]:
    """Return a function that guesses these runtimes of requests that state none."""

    def runtime_of(request: Request) -> RuntimeQuantiles:
        stated_s = request.expected_runtime_s
        return between(low_s, high_s) if stated_s is None else between(stated_s, stated_s)

    return runtime_of


def test_a_request_behind_one_whose_start_is_unknown_is_not_given_a_guess_either() -> None:
    cluster = busy(None)
    for number in range(3):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=600.0), 1.0, number, 1.0))
    starts = forecast(cluster, unstated(1.0, 2.0), is_known=False)
    assert [start.at for start in starts.values()] == [None] * 3
    assert {detail_of(start.why)[:22] for start in starts.values()} == {"the end of runs0 bbbb "}


def test_a_request_that_others_of_unknown_runtime_may_keep_waiting_is_not_given_a_guess() -> None:
    """In the plays the first gets the server that is free at a guess, and leaves it the other one."""
    cluster, guesses = busy(None, 600.0), {"runs0": between(20.0, 30.0), "first": between(2e3, 3e3)}
    for number, request in enumerate((Request("first", 8), Request("second", 8, expected_runtime_s=10.0))):
        cluster.apply(Queued(request, 1.0, number + 1, 1.0))
    stated = between(600.0, 600.0)
    starts = forecast(cluster, lambda request: guesses.get(request.lease_id, stated), is_known=False)
    assert (starts["first"].at, starts["second"].at) == (600.0, None)


def test_a_start_that_known_ends_allow_is_told_by_these_and_may_come_before() -> None:
    cluster = busy(None, 600.0)
    for number in range(2):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=10.0), 1.0, number + 1, 1.0))
    starts = forecast(cluster, unstated(1.0, 2.0), is_known=False)
    found = [(starts[name].earliest, starts[name].at, starts[name].after) for name in ("w0", "w1")]
    assert found == [(10.0, 600.0, "runs1 bbbb"), (10.0, 610.0, "w0 vnpm")]


@pytest.mark.parametrize("runtimes", [None, between(1.0, 2.0)])
def test_a_lease_of_unknown_runtime_that_a_limit_ends_is_gone_by_then(
    runtimes: RuntimeQuantiles | None,
) -> None:
    cluster = ClusterState(default_inventory(1))
    hold(cluster, Request("train", 8, max_runtime_s=1000.0), "gpu-server-0", *range(8))
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    start = forecast(cluster, lambda request: runtimes, is_known=False)["w"]
    assert (start.earliest, start.at, start.latest) == (10.0, 1000.0, 1000.0)
    assert (start.after[:6], start.ends_by) == ("train ", None), "nothing is known of its own runtime"


@pytest.mark.parametrize("number", [1, MAX_PLAYS])
def test_a_start_that_hangs_on_a_preempted_lease_is_known_whatever_its_runtime(number: int) -> None:
    cluster = busy(None)
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0), Preempting("runs0", 1, "w", 60.0, 5.0))
    runtimes = between(100.0, 1000.0) if number > 1 else None
    start = forecast(cluster, lambda request: runtimes, is_known=False)["w"]
    assert (start.earliest, start.at, start.after) == (60.0, 60.0, "runs0 bbbb")


@pytest.mark.parametrize(
    ("preemptor", "labels", "later_at"),
    [
        ("p", {}, 1100.0),
        (REQUEUE_AFTER, {}, 160.0),  # at the end of the queue
        (MAX_RUNTIME, {}, 160.0),
        ("p", {"launcher": "terminal"}, 160.0),
    ],
)
def test_a_preempted_job_waits_again_in_plays_as_it_will(
    preemptor: str, labels: dict[str, str], later_at: float
) -> None:
    cluster = ClusterState(default_inventory(1))
    victim = Request("victim", 8, expected_runtime_s=1000.0, labels=labels)
    cluster.apply(
        Granted(Lease(victim, (Placement("gpu-server-0", tuple(range(8))),), 1, 0.0), 0.0),
        Queued(Request("p", 8, expected_runtime_s=100.0), 1.0, 1, 1.0),
        Queued(Request("later", 8, expected_runtime_s=1.0), 2.0, 2, 2.0),
        Preempting("victim", 1, preemptor, 60.0, 5.0),
    )
    starts = estimate_starts(cluster, SchedulingPass(FIRST_FIT, FIFO, 10.0))
    assert (starts["p"].at, starts["later"].at) == (60.0, later_at)


def times(start: Start) -> tuple[float, float, float]:
    assert start.earliest is not None
    assert start.at is not None
    assert start.latest is not None
    return start.earliest, start.at, start.latest


def test_the_interval_is_that_of_the_runtimes_and_grows_along_the_queue() -> None:
    cluster = busy(None)
    for number in range(2):
        cluster.apply(Queued(Request(f"w{number}", 8), 1.0, number + 1, 1.0))
    starts = forecast(cluster, lambda request: between(100.0, 1000.0))
    first, second = starts["w0"], starts["w1"]
    assert (first.after, second.after, first.plays) == ("runs0 bbbb", "w0 vnpm", MAX_PLAYS)
    assert times(first) == pytest.approx((126, 316, 794), rel=0.1)
    assert times(second)[2] > times(first)[2]


def test_errors_of_runtimes_do_not_average_out_along_the_queue() -> None:
    cluster = busy(None)
    for number in range(20):
        cluster.apply(Queued(Request(f"w{number}", 8), 1.0, number + 1, 1.0))
    earliest, median, latest = times(forecast(cluster, lambda request: between(100.0, 1000.0))["w19"])
    assert 0.5 < (latest - earliest) / median < 2, "of independent runs it would be a third"


def test_the_one_play_of_certain_runtimes_is_with_those_of_team_and_shape() -> None:
    """The state knows one runtime of a class, whatever the shape: it ends at another time."""
    cluster = busy(None)
    cluster.runtimes = LearntRuntimes({"runs#": (300.0,)})
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    start = forecast(cluster, lambda request: between(700.0, 700.0))["w"]
    assert start.at == pytest.approx(700.0)
    assert start.plays == MAX_PLAYS


def test_what_has_run_for_long_does_not_end_before() -> None:
    cluster = busy(None)
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    earliest, _, latest = times(forecast(cluster, lambda request: between(100.0, 1000.0), now=900.0)["w"])
    assert 900 < earliest < latest < 1000
    overdue = forecast(cluster, lambda request: between(100.0, 1000.0), now=5000.0)["w"]
    assert overdue.at == pytest.approx(5500, rel=0.05)


def test_a_start_that_most_plays_do_not_reach_is_unknown_and_a_bound_that_few_reach_is_open() -> None:
    cluster = busy(None, None)
    cluster.apply(Queued(Request("w", 8, required_node="gpu-server-0"), 1.0, 1, 1.0))

    def only_of_the_second(request: Request) -> RuntimeQuantiles | None:
        return between(10.0, 20.0) if request.lease_id == "runs1" else None

    cluster.leases["runs1"] = replace(
        cluster.leases["runs1"], request=Request("runs1", 8, ttl_s=50.0, team="of another class")
    )
    start = forecast(cluster, only_of_the_second, is_known=False)["w"]
    assert start.at is None
    assert detail_of(start.why).startswith("the end of runs0 bbbb is unknown")


def test_plays_end_with_the_time_and_say_how_many_there_were() -> None:
    cluster = busy(None)
    cluster.runtimes = LearntRuntimes({"runs#": (300.0,)})
    cluster.apply(Queued(Request("w", 8), 1.0, 1, 1.0))
    start = forecast(cluster, lambda request: between(100.0, 1000.0), plays=5)["w"]
    assert 1 < start.plays < MAX_PLAYS


@pytest.mark.parametrize("wanted", ["g0", "g1", "g49", "small"])
def test_one_reason_does_not_cost_those_of_the_whole_queue(
    monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    """With 400 gangs pending on 1,000 servers each `explain` of any reader took five seconds."""
    cluster, current = busy(None, None, 60.0), SchedulingPass(FIRST_FIT, get_order("priority+backfill"), 10.0)
    for number in range(50):
        cluster.apply(Queued(Request(f"g{number}", 8), 1.0, number + 1, 1.0))
    cluster.apply(Queued(Request("small", 1), 2.0, 51, 2.0))
    all_of_them = estimate_starts(cluster, current)
    looked_for: list[str] = []
    reason_of = standings

    def counted(*args: Any, **options: Any) -> Iterator[Any]:
        for standing in reason_of(*args, **options):
            looked_for.append(standing.entry.lease_id)
            yield standing

    monkeypatch.setattr(start_estimates, "standings", counted)
    assert estimate_starts(cluster, current, wanted=[wanted])[wanted] == all_of_them[wanted]
    assert set(looked_for) <= {"g1", wanted}


def test_plays_for_one_request_end_with_its_start() -> None:
    cluster = busy(100.0)
    for number in range(3):
        cluster.apply(Queued(Request(f"w{number}", 8, expected_runtime_s=9.0), 1.0, number + 1, 1.0))
    found = forecast(cluster, lambda request: between(100.0, 1000.0), wanted=["w0"])
    assert found["w0"].plays == MAX_PLAYS
    assert "w1" not in found, "nobody asked for it"


@pytest.mark.parametrize("order", ["priority", "priority+backfill"])
def test_in_a_long_queue_ends_at_about_the_same_time_are_one_step_and_starts_stay_about_the_same(
    order: str,
) -> None:
    draw, cluster = random.Random(0), ClusterState(default_inventory(20))
    current = SchedulingPass(FIRST_FIT, get_order(order), 0.0)

    def estimated(requests: int) -> tuple[dict[str, Start], int]:
        """Return the starts once so many requests are pending, and the number of steps that they took."""
        while len(cluster.pending) < requests:
            runtime_s = draw.lognormvariate(8, 1)
            request = Request(f"t{cluster.sequence}", draw.choice((1, 2, 4)), expected_runtime_s=runtime_s)
            for change in allocator.submit(cluster, request, current):
                cluster.apply(change)
        steps = Mock(return_value=True)
        return estimate_starts(cluster, current, goes_on=steps), steps.call_count

    exact, many = estimated(start_estimates.LONG_QUEUE)
    found, few = estimated(start_estimates.LONG_QUEUE + 1)
    assert 2 * few < many
    ratios = sorted((found[each].at or 0.0) / (exact[each].at or 0.0) for each in exact)
    assert ratios[len(ratios) // 2] == pytest.approx(1.0, abs=0.03)
    assert ratios[len(ratios) // 10] > 0.9
    assert ratios[-len(ratios) // 10] < 1.1


@pytest.fixture
def manager(clock: Clock) -> GPUResourceManager:
    """Manager of one server of 8 GPUs with backfill."""
    return GPUResourceManager(
        Settings(store="memory://"),
        cluster={"order": "fifo+backfill"},
        store=MemoryStore(clock=clock),
        inventory=default_inventory(1, 8, 64),
    )


def learn(manager: GPUResourceManager, clock: Clock, task_id: str, seconds: float, gpus: int = 2) -> None:
    """Run the task three times."""
    for number in range(3):
        manager.allocate_resources(f"{task_id}_{number}", gpus, 1)
        clock.now += seconds
        manager.release_resources(f"{task_id}_{number}", outcome="SUCCESS")


def test_queue_explain_and_backfill_use_the_same_learnt_runtimes(
    manager: GPUResourceManager, clock: Clock
) -> None:
    learn(manager, clock, "long", 600.0, gpus=6)
    learn(manager, clock, "quick", 60.0)
    granted_at = clock.now
    manager.allocate_resources("long_7", 6, 1)
    assert manager.submit("head_1", 8, 1, expected_runtime=100.0)["state"] == "WAITING"
    slow = queue_entry(manager.submit("long_8", 2, 1, expected_runtime=6_000.0))
    assert (slow["kind"], slow["reason"]) == (
        "behind_queue",
        "2 GPUs are free on gpu-server-0; starting now could delay head_1 xjv4 (position 1, needs 8)",
    )
    assert manager.submit("quick_9", 2, 1)["state"] == "RUNNING", "its learnt runtime ends before long_7"
    head = manager.queue()[0]["estimated_start"]
    assert head["at"] == pytest.approx(granted_at + 600.0, abs=1)
    assert (head["after"], head["server_name"], head["plays"]) == ("long_7 c6fp", "gpu-server-0", MAX_PLAYS)
    later = manager.explain("x_1", 8, 1)["estimated_start"]["at"]
    assert head["at"] is not None
    assert later is not None
    assert later > head["at"]
