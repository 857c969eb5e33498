"""Standings in the queue and verdicts of servers: each agrees with what the allocator does."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Drained,
    Granted,
    InventoryChanged,
    MaintenanceChanged,
    Queued,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import could_ever_fit
from resource_manager.core.maintenance import WEEK_S, Window
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.refusal import RecoveryWindow, RefusalKind, recovering
from resource_manager.core.server_facts import IsDrained, LeftInventory
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.refusal_wording import detail_of, reasons_of
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies import get_policy, select_placement
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.feasibility import explain, refusals_of, standings, verdict
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node, nodes
from tests.scheduling.shared_cluster import Shared

NOW = 1.7e9

FIRST_FIT = get_policy("first_fit")
FIFO = get_order("fifo")
SRTF = get_order("srtf")


def hold(cluster: ClusterState, lease_id: str, on: str, gpus: int, cpus: int = 0) -> None:
    request = Request(lease_id, gpus, resources={"cpus": cpus})
    placement = Placement(on, cluster.by_name[on].pick_gpus(request) or ())
    cluster.apply(Granted(Lease(request, (placement,), cluster.last_fencing_token + 1, 0.0), 0.0))


def queue(cluster: ClusterState, *requests: Request) -> None:
    for number, request in enumerate(requests):
        cluster.apply(Queued(request, float(number), number, float(number)))


@pytest.fixture
def full() -> ClusterState:
    """Nodes a and b with 2 GPUs each, all held, and three requests pending."""
    cluster = ClusterState(nodes("ab"))
    hold(cluster, "x", "a", 2)
    hold(cluster, "y", "b", 2)
    queue(
        cluster,
        Request("slow", 2, expected_runtime_s=100.0),
        Request("never", 3, expected_runtime_s=10.0),
        Request("quick", 1, expected_runtime_s=1.0),
    )
    return cluster


def test_standings_number_the_queue_in_its_order(full: ClusterState) -> None:
    by_arrival = [
        (each.position, each.entry.lease_id) for each in standings(full, SchedulingPass(FIRST_FIT, FIFO, 5.0))
    ]
    assert by_arrival == [(1, "slow"), (2, "never"), (3, "quick")]
    by_runtime = [
        (each.position, each.entry.lease_id) for each in standings(full, SchedulingPass(FIRST_FIT, SRTF, 5.0))
    ]
    assert by_runtime == [(1, "quick"), (2, "never"), (3, "slow")]
    kinds = {
        each.entry.lease_id: each.refusal.kind
        for each in standings(full, SchedulingPass(FIRST_FIT, FIFO, 5.0))
    }
    assert kinds == {
        "slow": RefusalKind.NO_CAPACITY,
        "never": RefusalKind.NEVER_FITS,
        "quick": RefusalKind.NO_CAPACITY,
    }


def test_standings_of_some_are_those_among_all(full: ClusterState) -> None:
    everyone = list(standings(full, SchedulingPass(FIRST_FIT, FIFO, 5.0)))
    some = list(standings(full, SchedulingPass(FIRST_FIT, FIFO, 5.0), only={"quick", "unknown"}))
    assert some == [each for each in everyone if each.entry.lease_id == "quick"]


def test_in_a_recovery_window_all_wait_for_it_but_what_never_fits(full: ClusterState) -> None:
    window = recovering(RecoveryWindow(5.0, 55.0))
    kinds = [each.refusal.kind for each in standings(full, SchedulingPass(FIRST_FIT, FIFO, 5.0, window))]
    assert kinds == [RefusalKind.RECOVERING, RefusalKind.NEVER_FITS, RefusalKind.RECOVERING]


def test_a_refusal_is_that_of_the_request_at_the_end_of_the_queue(full: ClusterState) -> None:
    before = full.snapshot()
    new = [Request("new", 1), Request("slow", 2, expected_runtime_s=100.0), Request("big", 9)]
    refusals = refusals_of(full, new, SchedulingPass(FIRST_FIT, FIFO, 9.0))
    assert {name: refusal.kind for name, refusal in refusals.items()} == {
        "new": RefusalKind.NO_CAPACITY,
        "slow": RefusalKind.NO_CAPACITY,
        "big": RefusalKind.NEVER_FITS,
    }
    assert full.snapshot() == before


def test_a_request_that_fits_but_is_not_first_is_behind_the_queue() -> None:
    cluster = ClusterState(nodes("a"))
    hold(cluster, "x", "a", 1)
    queue(cluster, Request("head", 2))
    refusal = refusals_of(cluster, [Request("t", 1)], SchedulingPass(FIRST_FIT, FIFO, 9.0))["t"]
    assert refusal.kind is RefusalKind.BEHIND_QUEUE
    assert "head bbbb (position 1" in detail_of(refusal)


def test_a_request_that_does_not_wait_is_told_to_come_back_where_it_fits_by_now() -> None:
    """It was refused a moment ago: no pass over the queue grants it."""
    cluster = ClusterState(nodes("a"))
    current = SchedulingPass(FIRST_FIT, FIFO, 9.0)
    found = refusals_of(cluster, [Request("t", 1)], current)["t"]
    assert detail_of(found).endswith("free on a; no request is ahead: it fits by now, ask again")
    hold(cluster, "t", "a", 1)
    assert detail_of(refusals_of(cluster, [Request("t", 1)], current)["t"]) == "it fits by now, ask again"


def test_every_server_answers_in_the_order_of_the_inventory() -> None:
    cluster = ClusterState(nodes("cab"))
    hold(cluster, "x", "a", 1)
    answers = explain(cluster, Request("t", 2))
    assert [(answer.node, answer.server_id, answer.fits, answer.could_fit) for answer in answers] == [
        ("c", 2, True, True),
        ("a", 0, False, True),
        ("b", 1, True, True),
    ]
    assert [answer.reasons for answer in answers if answer.fits] == [(), ()]


def test_all_reasons_of_a_server_are_named_at_once() -> None:
    cluster = ClusterState([Node("a", 0, {"cpus": 8}, (Gpu(0, "V100"), Gpu(1, "V100"))), node("b")])
    hold(cluster, "x", "a", 1, cpus=6)
    short = Request("t", 2, resources={"cpus": 4})
    reasons = verdict(cluster.by_name["a"], short).reasons
    assert reasons_of(reasons, short)[-1] == "2 of 8 CPUs free, 4 requested"
    cluster.apply(Drained("a", 1.0, "new fan"))
    asked = Request("t", 1, resources={"cpus": 9}, gpu_types=("A100",), required_node="b")
    answer = verdict(cluster.by_name["a"], asked)
    assert (answer.fits, answer.could_fit) == (False, False)
    assert reasons_of(answer.reasons, asked) == [
        "drained: new fan",
        "the request is for b only",
        "has no A100",
        "has 8 CPUs in total, 9 requested",
    ]


@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ({"gpu_types": ("A100", "H100"), "gpu_memory": "40GB"}, "has no A100 or H100 with 40GB"),
        ({"gpu_types": ("V100",), "vendor": "amd"}, "has no V100 by amd"),
        ({"gpu_types": tuple("abcde")}, "has no a or b or c or another type"),
    ],
)
def test_a_server_lacks_the_gpus_that_the_refusal_names(kind: dict[str, Any], words: str) -> None:
    cluster = ClusterState([Node("s", 0, {"cpus": 8}, (Gpu(0, "V100", vendor="nvidia"),))])
    request = Request("t", 1, **kind)
    assert reasons_of(verdict(cluster.by_name["s"], request).reasons, request) == [words]


def test_a_failed_and_a_retired_server_say_so() -> None:
    cluster = ClusterState(nodes("ab"))
    hold(cluster, "x", "b", 1)
    cluster.apply(Drained("a", 1.0, failed=True))
    cluster.apply(InventoryChanged((node("a"),), 2.0))
    a, b = explain(cluster, Request("t", 1))
    assert (a.reasons, a.could_fit) == ((IsDrained("", failed=True),), True)
    assert (b.reasons[0], b.could_fit) == (LeftInventory(), False)


@given(
    held=st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 2), st.integers(0, 4)), max_size=3),
    drained=st.sets(st.sampled_from("ab")),
    gpus=st.integers(0, 3),
    cpus=st.integers(0, 9),
    required=st.sampled_from([None, "a", "b"]),
)
def test_a_server_has_a_reason_exactly_if_it_cannot_take_the_request(
    held: list[tuple[str, int, int]], drained: set[str], gpus: int, cpus: int, required: str | None
) -> None:
    cluster = ClusterState(nodes("ab"))
    for number, (on, some_gpus, some_cpus) in enumerate(held):
        if cluster.by_name[on].fits(Request("t", some_gpus, resources={"cpus": some_cpus})):
            hold(cluster, f"x{number}", on, some_gpus, some_cpus)
    for name in drained:
        cluster.apply(Drained(name, 1.0))
    request = Request("t", gpus, resources={"cpus": cpus}, required_node=required)
    answers = explain(cluster, request)
    for answer in answers:
        assert answer.fits is (not answer.reasons)
        assert answer.could_fit is could_ever_fit(cluster.by_name[answer.node].node, request)
    granted = select_placement(cluster, request, FIRST_FIT)
    assert (granted.node if granted else None) == next((a.node for a in answers if a.fits), None)


def test_who_waits_behind_those_that_cannot_start_is_not_told_that_it_starts_next() -> None:
    """A request ahead counted as started, whatever kept it, and let another team's go before its next one."""
    cluster = ClusterState(nodes("abc", 8))
    cluster.apply(TeamsChanged(Teams((Team("a", 8), Team("b", 8))), 0.0))
    current = SchedulingPass(FIRST_FIT, get_order("priority+backfill"), NOW)

    def submit(lease_id: str, gpus: int, on: str, team: str, hours: float) -> None:
        request = Request(lease_id, gpus, required_node=on, team=team, expected_runtime_s=hours * 3600)
        cluster.apply(*allocator.submit(cluster, request, current))

    submit("held", 8, "a", "b", 100.0)
    submit("short", 4, "b", "c", 1.0)
    cluster.apply(Drained("c", NOW))
    submit("a1", 8, "c", "a", 1.0)
    submit("a2", 8, "b", "a", 1.0)
    submit("b1", 2, "b", "b", 10.0)
    found = {standing.entry.lease_id: standing for standing in standings(cluster, current)}
    assert list(found) == ["a1", "a2", "b1"]
    assert detail_of(found["b1"].refusal).endswith("could delay a2 kw4n (position 2, needs 8)")
    ahead = estimate_starts(cluster, current)["b1"]
    assert ahead.at == NOW + 2 * 3600.0


def test_a_request_with_no_place_after_its_victims_is_ahead_like_any_other() -> None:
    shared = Shared(
        Team("vision", 8), Team("speech", 6), letters="ab", gpus=8, order=get_order("fifo+backfill")
    )
    shared.submit("lent", 8, team="nlp", required_node="a", expected_runtime_s=3600.0)
    shared.submit("other", 6, team="speech", required_node="b", expected_runtime_s=3600.0)
    shared.submit("mine", 8, team="vision", expected_runtime_s=3600.0)
    assert shared.preempting() == {"lent": "mine"}
    new = refusals_of(shared.state, [Request("new", 2)], shared.current)["new"]
    assert detail_of(new) == "2 GPUs are free on b; no request is ahead: it fits by now, ask again"
    shared.do([Drained("a", shared.now)])
    shared.submit("behind", 2, team="nlp", expected_runtime_s=7200.0)
    assert "behind" in shared.state.pending
    assert shared.refusal("behind") == (
        "behind_queue",
        "2 GPUs are free on b; starting now could delay mine 3hmc (position 1, needs 8)",
    )


def test_what_windows_never_let_start_is_named_to_nobody_behind_it() -> None:
    cluster = ClusterState(nodes("a", 8))
    window = Window(1, ("a",), 3 * 86_400.0, 3 * 86_400.0 + 60.0, every_s=WEEK_S)
    cluster.apply(MaintenanceChanged((window,), 0.0))
    runs = Request("x", 4, expected_runtime_s=3600.0)
    cluster.apply(Granted(Lease(runs, (Placement("a", (0, 1, 2, 3)),), 1, 0.0), 0.0))
    current = SchedulingPass(FIRST_FIT, get_order("fifo+backfill"), 9.0)
    late = Request("late", 4, expected_runtime_s=36_000.0)
    queue(cluster, Request("never", 8, expected_runtime_s=8 * 86_400.0))
    assert "no request is ahead" in detail_of(refusals_of(cluster, [late], current)["late"])
    cluster.apply(*allocator.enqueue(cluster, [Request("waits", 8, expected_runtime_s=60.0)], 5.0))
    assert "could delay waits" in detail_of(refusals_of(cluster, [late], current)["late"])


def test_requests_alike_but_for_their_limits_are_told_of_a_window_each_by_its_own() -> None:
    cluster = ClusterState(nodes("a", 8))
    cluster.apply(MaintenanceChanged((Window(1, ("a",), 14_400.0, 18_000.0),), 0.0))
    hold(cluster, "x", "a", 8)
    requests = [Request("open", 2), Request("limited", 2, max_runtime_s=1800.0)]
    found = refusals_of(cluster, requests, SchedulingPass(FIRST_FIT, FIFO, 9.0))
    assert [found[each.lease_id].kind for each in requests] == [
        RefusalKind.MAINTENANCE,
        RefusalKind.NO_CAPACITY,
    ]
