"""Preemption: whose leases end for whom, in which order, and that nobody loses a lease in vain."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resource_manager.core.changes import (
    AgentSeen,
    Cancelled,
    Change,
    Drained,
    Expired,
    GpuClosed,
    Granted,
    InventoryChanged,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import IDLE
from resource_manager.core.models import JobPlace, Lease, Placement, Request, Spread
from resource_manager.core.name_lookup import name_in
from resource_manager.core.pending import PendingRequest
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import InvalidRequestError, NotPreemptibleError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.preemption.preempting import STUCK_AFTER_S, held_back, would_preempt
from resource_manager.scheduling.preemption.victims import find_victims
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.queue.runtime_limits import preempted_at_limit
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.scheduling.shared_cluster import GREEDY, Shared

HOUR_S, DAY_S = 3600.0, 86_400.0


def test_a_team_inside_its_guarantee_takes_back_what_another_borrows() -> None:
    shared = Shared(Team("vision", 2), Team("nlp", 2))
    for name in ("x", "y", "z"):
        shared.submit(name, team="nlp")
    shared.submit("own", team="vision")
    changes = shared.submit("mine", team="vision", preempt_grace_s=10.0)
    (taken,) = [change for change in changes if isinstance(change, Preempting)]
    newest = shared.state.leases["z"]
    assert taken == Preempting("z", newest.fencing_token, "mine", shared.now + 60.0, shared.now)
    assert shared.refusal("mine") == (
        "awaiting_release",
        "waits for z 3hmc on a to end, preempted for it; within 60 s",
    )
    ended = shared.release("z")
    assert [type(change) for change in ended] == [Released, Queued, Granted]
    assert set(shared.state.leases) == {"x", "y", "own", "mine"}


def test_a_preemptor_says_how_many_leases_it_waits_for_and_how_long_at_most() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 2, team="nlp", preempt_grace_s=30.0)
    shared.submit("y", 2, team="nlp", preempt_grace_s=10.0)
    shared.submit("mine", 4, team="vision")
    ends = "waits for y f462 on a and 1 more to end, preempted for it; within"
    assert shared.refusal("mine")[1] == f"{ends} 30 s"
    shared.now += 40.0  # nobody has looked yet
    assert shared.refusal("mine")[1] == f"{ends} 0 s"


def test_only_a_strictly_higher_priority_takes_a_lease_of_its_own_team() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="vision", priority=1)
    shared.submit("same", 4, team="vision", priority=1)
    shared.tick(1e6)  # an aged priority is not a stated one
    assert shared.preempting() == {}
    shared.submit("more", 4, team="vision", priority=2)
    assert shared.preempting() == {"x": "more"}


def test_a_team_that_would_exceed_its_guarantee_takes_nothing_from_others() -> None:
    shared = Shared(Team("vision", 2), Team("nlp", 1))
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 3, team="vision", priority=9)
    assert shared.preempting() == {}
    assert shared.refusal("mine")[0] == "no_capacity"


def test_a_team_inside_its_guarantee_loses_nothing() -> None:
    shared = Shared(Team("vision", 2), Team("nlp", 2), gpus=2)
    shared.submit("x", 2, team="nlp")
    shared.submit("mine", 2, team="vision")
    assert shared.preempting() == {}


def test_a_team_loses_nothing_more_once_it_is_down_to_its_guarantee() -> None:
    shared = Shared(Team("vision", 4), Team("nlp", 2))
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp")
    shared.submit("large", 4, team="vision")
    assert shared.preempting() == {}


def test_of_leases_that_began_together_the_one_that_arrived_last_is_taken() -> None:
    shared = Shared(Team("vision", 1), gpus=2)
    shared.submit("before", 2, team="nlp")
    shared.submit("b", team="nlp")
    shared.submit("a", team="nlp")
    shared.release("before", Outcome.SUCCESS)
    shared.submit("mine", team="vision")
    assert shared.preempting() == {"a": "mine"}


def test_what_is_not_preemptible_or_quarantined_is_never_taken() -> None:
    shared = Shared(Team("vision", 3), Team("nlp", 1))
    shared.submit("fixed", 1, team="nlp", preemptible=False)
    shared.submit("lost", 1, team="nlp", ttl_s=10.0, quarantine=True)
    shared.submit("x", 2, team="nlp")
    shared.tick(20.0)
    assert shared.state.leases["lost"].quarantined
    shared.submit("large", 3, team="vision")
    assert shared.preempting() == {}
    shared.submit("mine", 2, team="vision")
    assert shared.preempting() == {"x": "mine"}


def test_a_lease_is_protected_for_its_teams_minimum_runtime() -> None:
    shared = Shared(Team("vision", 4), Team("nlp", min_runtime_s=100.0), min_runtime_s=10_000.0)
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    shared.tick(50.0)
    assert shared.preempting() == {}
    shared.tick(50.0)
    assert shared.preempting() == {"x": "mine"}


def test_a_request_waits_for_free_capacity_before_it_preempts() -> None:
    shared = Shared(Team("vision", 4), delay_s=30.0)
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 2, team="vision")
    shared.submit("quick", 2, team="vision", preemption_delay_s=0.0)
    assert shared.preempting() == {"x": "quick"}
    shared.tick(30.0)
    assert set(shared.preempting().values()) == {"quick"}  # what it leaves is enough for both
    shared.release("x")
    assert set(shared.state.leases) == {"mine", "quick"}


def test_a_victim_waits_for_free_capacity_again_before_it_preempts() -> None:
    """Its request is an old one: else each victim takes the next one's lease at once."""
    shared = Shared(Team("vision", 4), letters="ab", delay_s=10.0)
    shared.submit("victim", 4, team="nlp", priority=1)
    shared.submit("other", 4, team="nlp")
    shared.tick(11.0)
    shared.submit("mine", 4, team="vision", required_node="a", preemption_delay_s=0.0)
    shared.release("victim")
    shared.tick(9.0)
    assert shared.preempting() == {}
    shared.tick(1.0)
    assert shared.preempting() == {"other": "victim"}


def test_a_request_that_does_not_wait_preempts_nobody() -> None:
    shared = Shared(Team("vision", 4), delay_s=30.0)
    shared.submit("x", 4, team="nlp")
    shared.submit("waits", 4, team="nlp")
    asked = Request("asks", 2, team="vision", preemption_delay_s=0.0)
    assert (
        allocator.allocate_in_order(shared.state, [asked], SchedulingPass(first_fit, fifo, shared.now + 60.0))
        == []
    )


def test_victims_are_of_the_team_most_over_then_of_low_priority_little_lost_and_new() -> None:
    shared = Shared(Team("vision", 4), Team("some", 1), Team("most", 1), gpus=8)
    shared.submit("s1", team="some")
    shared.submit("s2", team="some")
    for name, priority in (("m1", 1), ("m2", 0), ("m3", 0), ("m4", 0), ("m5", 0), ("m6", 5)):
        shared.submit(name, team="most", priority=priority)
    shared.do([Renewed("m2", shared.state.leases["m2"].fencing_token, shared.now, checkpoint_at=shared.now)])
    shared.submit("mine", 3, team="vision")
    assert [change.lease_id for change in shared.changes if isinstance(change, Preempting)] == [
        "m2",
        "m5",
        "m4",
    ]


def test_a_checkpoint_is_kept_by_later_renewals() -> None:
    shared = Shared()
    shared.submit("x")
    shared.do(lease_steps.renew(shared.state, "x", shared.now, checkpoint_at=shared.now - 5.0))
    saved_at = shared.now - 5.0
    shared.do(lease_steps.renew(shared.state, "x", shared.now + 1.0))
    shared.do(lease_steps.renew(shared.state, "x", shared.now + 2.0, checkpoint_at=saved_at - 1.0))
    assert shared.state.leases["x"].checkpoint_at == saved_at


def test_nobody_is_taken_in_vain() -> None:
    shared = Shared(Team("vision", 4), letters="ab")
    shared.submit("fixed", 1, team="vision", preemptible=False, required_node="a")
    for name, place in (("x", "a"), ("y", "b"), ("z", "b")):
        shared.submit(name, 2, team="nlp", required_node=place)
    shared.submit("mine", 3, team="vision", required_node="a")
    assert shared.preempting() == {"x": "mine"}
    other = Shared(Team("vision", 4))
    other.submit("fixed", 1, team="vision", preemptible=False)
    other.submit("x", 3, team="nlp")
    other.submit("mine", 4, team="vision")  # even all of them would not make room
    assert other.preempting() == {}


def test_what_preempted_leases_freed_is_kept_for_their_preemptor() -> None:
    shared = Shared(Team("vision", 4), order=GREEDY)
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp")
    shared.submit("mine", 4, team="vision")
    assert set(shared.preempting()) == {"x", "y"}
    shared.submit("small", 1, team="other", expected_runtime_s=1.0)
    shared.release("x")
    assert set(shared.state.leases) == {"y"}
    assert shared.refusal("small")[0] == "behind_queue"
    assert shared.refusal("mine")[0] == "awaiting_release"
    shared.release("y")
    assert set(shared.state.leases) == {"mine"}


def test_the_part_of_a_gpu_that_a_victim_freed_is_kept_until_the_others_have_ended() -> None:
    shared = Shared(Team("vision", 1), gpus=1, order=GREEDY)
    for name in ("x", "y"):
        shared.submit(name, team="nlp", gpu_milli=500)
    shared.submit("mine", team="vision")
    shared.submit("small", team="other", gpu_milli=250, expected_runtime_s=1.0)
    assert set(shared.preempting()) == {"x", "y"}
    ended = shared.release("x")  # its own request, which waits again, would fit as well
    assert [type(change) for change in ended] == [Released, Queued]
    shared.release("y")
    assert set(shared.state.leases) == {"mine"}


@pytest.mark.parametrize("sizes", [(400, 600), (500, 500)])
def test_a_gang_on_one_gpu_keeps_what_its_first_victim_freed_once(sizes: tuple[int, int]) -> None:
    shared = Shared(Team("vision", 1), gpus=1, order=GREEDY)
    shared.do([InventoryChanged((replace(shared.state.node("a").node, address="10.0.0.1"),), shared.now)])
    for name, gpu_milli in zip("xy", sizes, strict=True):
        shared.submit(name, team="nlp", gpu_milli=gpu_milli)
    shared.submit("mine", team="vision", gpu_milli=500, nodes=2, spread=Spread.PACK)
    assert set(shared.preempting()) == {"x", "y"}
    assert [type(change) for change in shared.release("x")] == [Released, Queued]
    with held_back(shared.state, shared.current):
        assert shared.state.node("a").gpu_free == {0: 0}
    shared.release("y")
    assert set(shared.state.leases) == {"mine"}


def test_of_a_gpu_that_is_free_in_part_a_preemptor_keeps_only_what_its_victims_will_not_free() -> None:
    shared = Shared(Team("vision", 1), gpus=1, order=GREEDY)
    for name, gpu_milli in (("x", 700), ("y", 300)):
        shared.submit(name, team="nlp", gpu_milli=gpu_milli)
    for name, gpu_milli in (("more", 700), ("less", 300)):
        shared.submit(name, team="vision", gpu_milli=gpu_milli)
    assert shared.preempting() == {"x": "more", "y": "less"}
    shared.release("y")
    assert set(shared.state.leases) == {"x", "less"}


@pytest.mark.parametrize(
    ("asked", "first", "free_gpus", "free_cpus"),
    [
        # Of its 50 CPUs, 10 are still held by the lease that ends.
        (Request("mine", 4, team="vision", resources={"cpus": 50}), "x", 0, 14),
        (Request("mine", 3, team="vision", resources={"cpus": 5}), "x", 0, 54),
        (Request("mine", 1, team="vision", resources={"cpus": 60}, gpu_milli=500), "x", 1, 4),
        # Its place is on the GPUs that are not free yet: the rest of the server is for everybody.
        (Request("mine", 1, team="vision", resources={"cpus": 60}, gpu_milli=500), "y", 2, 4),
    ],
)
def test_of_what_is_free_a_preemptor_keeps_its_need_less_what_its_victims_hold(
    asked: Request, first: str, free_gpus: int, free_cpus: int
) -> None:
    shared = Shared(Team("vision", 4), order=GREEDY)
    for name in sorted("xy", key=lambda name: name != first):
        lent = Request(name, 2, team="nlp", resources={"cpus": {"x": 40, "y": 10}[name]})
        shared.do(allocator.submit(shared.state, lent, SchedulingPass(first_fit, GREEDY, shared.now)))
    shared.do(allocator.submit(shared.state, asked, SchedulingPass(first_fit, GREEDY, shared.now)))
    assert set(shared.preempting()) == {"x", "y"}
    shared.release("x")
    assert "mine" in shared.state.pending
    with held_back(shared.state, SchedulingPass(first_fit, GREEDY, shared.now)) as kept_for:
        assert list(kept_for) == ["mine"]
        for gpus, cpus, fits in ((0, free_cpus, True), (0, free_cpus + 1, False)):
            asked = Request("other", gpus, resources={"cpus": cpus})
            assert (next(shared.state.candidates(asked), None) is not None) is fits
        for gpus, fits in ((free_gpus, True), (free_gpus + 1, False)):
            assert (next(shared.state.candidates(Request("other", gpus)), None) is not None) is fits


def test_a_gang_keeps_what_is_free_on_each_of_its_servers() -> None:
    shared = Shared(Team("vision", 6), letters="abc", gpus=2, order=GREEDY)
    servers = tuple(replace(state.node, address=state.name) for state in shared.state.nodes)
    shared.do([InventoryChanged(servers, shared.now)])
    for name in "xyz":
        shared.submit(name, 2, team="nlp")
    shared.submit("mine", 2, team="vision", nodes=3)
    for name in "xy":
        shared.release(name)
        shared.submit(f"after-{name}", 1, team="nlp", expected_runtime_s=1.0)
    assert set(shared.state.leases) == {"z"}
    shared.release("z")
    assert set(shared.state.leases) == {"mine"}


def kept_for_a_preemptor(
    expected_runtime_s: float | None, others_s: float | None, *, learnt: bool = False
) -> Shared:
    """Return servers a, of which 7 GPUs are kept for a request of 8, and b, of which 6 are busy."""
    shared = Shared(Team("vision", 8), Team("speech", 6), letters="ab", gpus=8, order=GREEDY)
    shared.now = 1.7e9
    if learnt:
        shared.submit("mine", 8, team="vision")
        shared.release("mine", Outcome.SUCCESS)
    shared.submit("seven", 7, team="nlp", expected_runtime_s=10 * HOUR_S)
    shared.submit("one", 1, team="nlp", expected_runtime_s=10 * HOUR_S, preempt_grace_s=HOUR_S)
    shared.submit("busy", 6, team="speech", expected_runtime_s=others_s)
    shared.submit("mine", 8, team="vision", expected_runtime_s=expected_runtime_s)
    assert set(shared.preempting()) == {"seven", "one"}
    shared.release("seven", Outcome.SUCCESS)
    shared.submit("ahead", 7, team="nlp", expected_runtime_s=HOUR_S)
    return shared


@pytest.mark.parametrize("nodes", [1, 2])
def test_the_reason_names_the_preemptor_for_which_free_gpus_are_kept(nodes: int) -> None:
    shared = kept_for_a_preemptor(600.0, None)
    servers = tuple(replace(state.node, address=state.name) for state in shared.state.nodes)
    shared.do([InventoryChanged(servers, shared.now)])
    shared.submit("small", 2, team="nlp", expected_runtime_s=HOUR_S)
    shared.submit("next", 3, team="nlp", nodes=nodes, expected_runtime_s=HOUR_S)
    kind, why = shared.refusal("next")
    mine = name_in(shared.state, "mine")
    assert kind == "behind_queue"
    assert why.endswith(
        f"a would fit it, but what is free there is kept for {mine}, for which leases are being preempted"
    )
    assert why.startswith("0 of the 2 servers needed have 3 GPUs and 1 CPU free; ") == (nodes == 2)


@pytest.mark.parametrize(
    ("expected_runtime_s", "others_s"),
    [
        (20 * HOUR_S, 370.0),
        (600.0, 1200.0),  # it begins after the grace
    ],
)
def test_what_is_kept_for_a_preemptor_is_expected_to_be_free_once_that_has_run(
    expected_runtime_s: float, others_s: float
) -> None:
    """It was kept from the year 1970 on, so that it seemed about to be free to who plans ahead."""
    shared = kept_for_a_preemptor(expected_runtime_s, others_s)
    shared.submit("small", 2, team="nlp", expected_runtime_s=10 * HOUR_S)
    assert set(shared.state.leases) == {"one", "busy"}
    assert shared.refusal("small")[0] == "behind_queue"
    shared.submit("brief", 2, team="nlp", expected_runtime_s=300.0)
    assert set(shared.state.leases) == {"one", "busy", "brief"}
    shared.release("brief", Outcome.SUCCESS)
    shared.release("busy", Outcome.SUCCESS)
    assert "ahead" in shared.state.leases


def test_a_preemptor_that_waits_beyond_the_grace_is_expected_to_run_from_now_on() -> None:
    shared = kept_for_a_preemptor(expected_runtime_s=600.0, others_s=5 * HOUR_S)
    shared.now += 4.9 * HOUR_S  # its victim's end is not known yet
    shared.submit("small", 2, team="nlp", expected_runtime_s=500.0)
    assert shared.refusal("small")[0] == "behind_queue"


def test_a_preemptor_is_expected_to_run_for_as_long_as_was_learnt() -> None:
    shared = kept_for_a_preemptor(expected_runtime_s=None, others_s=None, learnt=True)
    shared.submit("small", 2, team="nlp", expected_runtime_s=HOUR_S)
    assert "small" in shared.state.leases


def test_what_is_preempted_is_expected_to_be_free_once_its_preemptor_has_run() -> None:
    """Its victim's own end is not that of what it holds: a reservation there would come to nothing."""
    shared = Shared(Team("vision", 4), letters="ab", order=GREEDY)
    shared.submit("victim", 4, team="nlp", expected_runtime_s=300.0, required_node="a")
    shared.submit("busy", 2, team="nlp", expected_runtime_s=HOUR_S, required_node="b")
    mine = {"expected_runtime_s": 10 * HOUR_S, "required_node": "a"}
    shared.submit("mine", 4, team="vision", **mine)
    assert shared.preempting() == {"victim": "mine"}
    shared.submit("head", 4, team="nlp", expected_runtime_s=HOUR_S)
    shared.submit("long", 2, team="nlp", expected_runtime_s=10 * HOUR_S)
    assert "long" not in shared.state.leases, "it would delay the head, which goes to b in an hour"
    shared.submit("brief", 2, team="nlp", expected_runtime_s=HOUR_S / 2)
    assert "brief" in shared.state.leases


def test_a_preemptor_of_unknown_runtime_is_named_where_nothing_overtakes() -> None:
    """What is kept for it was named instead, with a control character."""
    shared = kept_for_a_preemptor(expected_runtime_s=None, others_s=None)
    shared.submit("small", 2, team="nlp", expected_runtime_s=HOUR_S)
    kind, why = shared.refusal("small")
    mine = name_in(shared.state, "mine")
    assert kind == "behind_queue"
    assert why.endswith(f"the runtime of {mine} is unknown, so nothing overtakes it")


def with_requests_in_vain(count: int, **more: object) -> Shared:
    """Return a cluster with requests at the head of the queue that bounds do not exclude, but are in vain.

    Of nlp's two leases of two GPUs only one is beyond its guarantee, and three GPUs are asked for.
    """
    shared = Shared(Team("vision", 8), Team("audio", 1), Team("nlp", 3), letters="ab")
    for number in range(2):
        shared.submit(f"theirs-{number}", 2, team="nlp", required_node="a")
        shared.submit(f"lent-{number}", 2, team="rest", required_node="b")
    for number in range(count):
        vain = {"owner": f"kim-{number}", "priority": 5, "required_node": "a", **more}
        shared.submit(f"vain-{number}", 3, team="vision", **vain)
    return shared


def test_requests_in_vain_keep_neither_other_teams_nor_their_own_from_what_is_theirs() -> None:
    shared = with_requests_in_vain(40)
    shared.submit("hers", 1, team="audio", required_node="b")
    assert shared.preempting() == {"lent-1": "hers"}
    asked = Request("mine", 2, team="vision", required_node="b")
    would = would_preempt(shared.state, asked, SchedulingPass(first_fit, fifo, shared.now))
    assert [lease.lease_id for lease in would] == ["lent-0"]
    shared.submit("mine", 2, team="vision", required_node="b")
    for _ in range(40):
        shared.tick(1.0)
    assert shared.preempting() == {"lent-1": "hers", "lent-0": "mine"}


@pytest.mark.thorough
@pytest.mark.parametrize("seconds", [1.0, 5.0, 8.0, 10.0, 13.0, 60.0])
def test_each_kind_of_request_has_its_turn_whatever_the_time_between_passes(seconds: float) -> None:
    shared = with_requests_in_vain(64)
    shared.submit("mine", 2, team="vision", required_node="b")
    for _ in range(100):
        shared.tick(seconds)
    assert set(shared.preempting().values()) == {"mine"}


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Ids of the requests for which leases that would have to end were searched."""
    ids: list[str] = []

    def counting(cluster: ClusterState, pending: PendingRequest, *rest: object) -> list[Lease]:
        ids.append(pending.lease_id)
        return find_victims(cluster, pending, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr("resource_manager.scheduling.preemption.preempting.find_victims", counting)
    return ids


def test_a_search_in_vain_is_not_made_again_until_something_changes(searched: list[str]) -> None:
    shared = with_requests_in_vain(3)
    searched.clear()
    shared.tick()
    shared.submit("more", 3, team="vision", owner="kim-0", priority=5, required_node="a")
    shared.do(lease_steps.renew(shared.state, "theirs-0", shared.now))
    shared.tick()
    assert searched == []
    for change in (
        lambda: shared.do(lease_steps.renew(shared.state, "theirs-0", shared.now, checkpoint_at=shared.now)),
        lambda: shared.release("lent-0", "SUCCESS"),
        lambda: shared.do([TeamsChanged(shared.state.teams, shared.now)]),
        lambda: shared.do([Drained("b", shared.now)]),
    ):
        searched.clear()
        change()
        shared.tick()
        assert searched == ["vain-0", "vain-1", "vain-2"]


def test_a_request_that_only_its_age_makes_a_victim_is_found_once_it_is_old_enough() -> None:
    shared = Shared(Team("vision", 4), min_runtime_s=100.0)
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    for _ in range(49):
        assert shared.tick(2.0) == []
    shared.tick(1.0)
    assert shared.preempting() == {"x": "mine"}


def test_what_is_planned_for_a_colleague_costs_a_team_no_lease_inside_its_guarantee() -> None:
    """With what `theirs` is to get the team would be beyond its guarantee; `held` alone is within it."""
    shared = Shared(Team("nlp", 3), Team("vision", 1), Team("rest", 3), letters="ab")
    shared.submit("fixed", 3, team="rest", preemptible=False, required_node="b")
    shared.submit("x", 4, team="other", required_node="a")
    shared.submit("theirs", 3, team="nlp", required_node="a")
    shared.submit("held", 1, team="nlp", required_node="b")
    shared.submit("mine", 1, team="vision", required_node="b")
    assert shared.preempting() == {"x": "theirs"}
    shared.release("x")
    assert shared.preempting() == {"held": "mine"}  # now it holds four, and is beyond


@pytest.mark.parametrize("victim", ["x", "y"])
def test_a_preemptor_that_fits_already_does_not_wait_for_its_victim(victim: str) -> None:
    shared = Shared(Team("vision", 8), letters="ab")
    for name in ("x", "y"):
        shared.submit(name, 4, team="nlp", priority=0 if name == victim else 1)
    shared.submit("mine", 4, team="vision")
    assert shared.preempting() == {victim: "mine"}
    shared.release("y" if victim == "x" else "x", Outcome.SUCCESS)
    assert set(shared.state.leases) == {victim, "mine"}
    assert shared.preempting() == {}
    shared.release(victim)
    assert set(shared.state.leases) == {victim, "mine"}  # nobody waits for what it held


@pytest.fixture
def two_preemptors() -> Shared:
    """A cluster on which `large` waits for the end of x and y on a, and `small` for that of z on b."""
    shared = Shared(Team("vision", 4), Team("audio", 2), Team("rest", 2), letters="ab")
    shared.submit("fixed", 2, team="rest", preemptible=False, required_node="b")
    shared.submit("x", 2, team="nlp", required_node="a")
    shared.submit("y", 2, team="nlp", required_node="a")
    shared.submit("z", 2, team="nlp", required_node="b")
    shared.submit("large", 4, team="vision")
    shared.submit("small", 2, team="audio")
    assert shared.preempting() == {"x": "large", "y": "large", "z": "small"}
    return shared


def test_a_preemptor_takes_nothing_early_of_what_another_is_to_get(two_preemptors: Shared) -> None:
    shared = two_preemptors
    shared.release("x")
    assert shared.refusal("small")[0] == "awaiting_release"
    shared.release("y")
    assert "large" in shared.state.leases


def test_a_preemptor_whose_victims_have_ended_takes_nothing_of_what_another_is_to_get(
    two_preemptors: Shared,
) -> None:
    shared = two_preemptors
    shared.release("x")
    shared.release("z")
    assert shared.state.leases["small"].placement.node == "b", "half of a is kept for the other one"
    shared.release("y")
    assert "large" in shared.state.leases


def test_nothing_is_taken_of_what_is_only_planned() -> None:
    """`mine` is to get what `x` holds: there is no lease of it yet that `more` could take."""
    shared = Shared(Team("vision", 4), Team("nlp", 2))
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    changes = shared.submit("more", 4, team="vision", priority=5)
    assert [type(change) for change in changes] == [Queued]
    assert shared.preempting() == {"x": "mine"}


def test_a_search_for_who_waits_for_other_leases_is_made_once_a_pass(searched: list[str]) -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("idle", 2, team="nlp")
    shared.submit("small", 2, team="vision")
    shared.do(list(preempted_at_limit(shared.state.ledger, shared.state.leases["idle"], IDLE, shared.now)))
    for number in range(20):
        shared.submit(f"large-{number}", 4, team="vision", priority=1)
    searched.clear()
    shared.tick()
    assert shared.preempting() == {"idle": IDLE}
    assert searched == ["large-0"]


def test_two_that_wait_take_a_victim_each_in_one_pass() -> None:
    shared = Shared(Team("vision", 4), delay_s=10.0)
    for name in ("x", "y"):
        shared.submit(name, 2, team="nlp")
    for name in ("first", "second"):
        shared.submit(name, 2, team="vision")
    shared.tick(20.0)
    assert shared.preempting() == {"y": "first", "x": "second"}


@pytest.mark.parametrize("closed", [(), (1,)])
def test_nobody_is_preempted_for_who_waits_for_other_leases_to_end_then(closed: tuple[int, ...]) -> None:
    """The victim would end before they do, start again where it was, and be preempted again."""
    shared = Shared(Team("vision", 4), gpus=4 + len(closed))
    shared.submit("idle", 2, team="nlp")
    shared.submit("small", 2, team="vision")
    ends = preempted_at_limit(shared.state.ledger, shared.state.leases["idle"], IDLE, shared.now)
    shared.do([*ends, *(GpuClosed("a", gpu_id, "", "xid 79", shared.now) for gpu_id in closed)])
    shared.submit("large", 4, team="vision", priority=1)
    assert shared.preempting() == {"idle": IDLE}
    assert would_preempt(shared.state, shared.state.pending["large"].request, shared.current) == []
    shared.release("idle", Outcome.IDLE)
    assert shared.preempting() == {"small": "large"}
    shared.release("small")
    assert set(shared.state.leases) == {"large"}


def test_an_operator_takes_nothing_for_a_request_that_is_to_get_its_place_already() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp")
    shared.submit("mine", 2, team="vision")
    (victim,) = shared.preempting()
    (other,) = {"x", "y"} - {victim}
    with pytest.raises(NotPreemptibleError, match="need not wait"):
        lease_steps.preempt(
            shared.state, other, SchedulingPass(first_fit, fifo, shared.now), preemptor="mine"
        )


def cancel(shared: Shared, lease_id: str) -> list[Change]:
    cancelled = [Cancelled(lease_id, shared.now)]
    return shared.do(
        allocator.with_dispatch(shared.state, cancelled, SchedulingPass(first_fit, shared.order, shared.now))
    )


def test_a_cancelled_preemptor_keeps_nothing_and_its_victims_run_on() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp", preempt_grace_s=10.0)
    shared.submit("mine", 4, team="vision")
    shared.release("x")
    token = shared.state.leases["y"].fencing_token
    until = shared.state.leases["y"].preempt_until
    _, taken_back, granted = cancel(shared, "mine")
    assert taken_back == Preempting("y", token, "", until, shared.now)
    assert isinstance(granted, Granted)
    assert granted.lease.lease_id == "x"  # the victim that ended goes on
    shared.tick(60.0)
    shared.do(lease_steps.renew(shared.state, "y", shared.now))
    assert not shared.state.leases["y"].quarantined
    assert ClusterState.from_snapshot(shared.state.snapshot()).snapshot() == shared.state.snapshot()


@pytest.mark.parametrize(("after_s", "keeps"), [(0.0, True), (DAY_S, False)])
def test_a_victim_that_was_told_in_vain_has_its_old_place_only_if_it_ends_then(
    after_s: float, keeps: bool
) -> None:
    """Its caller's word would put it before all others for as long as it lasts."""
    shared = Shared(Team("vision", 4))
    shared.submit("x", 2, team="nlp", ttl_s=600.0)
    arrived_at = shared.now
    shared.submit("y", 2, team="nlp", priority=1)
    shared.submit("mine", 2, team="vision")
    cancel(shared, "mine")
    shared.now += after_s
    [_, queued] = lease_steps.release(shared.state, "x", shared.now, outcome=Outcome.PREEMPTED)
    assert isinstance(queued, Queued)
    assert queued.queued_at == (arrived_at if keeps else shared.now)


@pytest.mark.parametrize("holder", ["ada@host", "Ada Lovelace@console"])
def test_a_preempted_hold_has_no_job_that_could_end_and_ends_itself(holder: str) -> None:
    shared = Shared(Team("vision", 4))
    shared.submit(f"hand:{holder}/0123abcd", 4, team="nlp", preempt_grace_s=10.0)
    shared.submit("mine", 4, team="vision")
    assert shared.tick(10.0) == []
    released, granted = shared.tick(1.0)
    assert isinstance(released, Released)
    assert released.outcome == Outcome.EVICTED, "nobody would attend it a second time"
    assert isinstance(granted, Granted)
    assert granted.lease.lease_id == "mine"
    assert not shared.state.pending


def test_what_has_a_job_is_no_hold_whatever_its_id_says() -> None:
    """Its GPUs stay allocated, and what is due to end does so for all others."""
    shared = Shared(Team("vision", 4))
    shared.submit(name := "hand:eve@desk/0123abcd", 4, team="nlp", preempt_grace_s=10.0)
    token, places = shared.state.leases[name].fencing_token, [JobPlace("ssh", machine="a")]
    shared.do(lease_steps.place_job(shared.state, name, places, shared.now, fencing_token=token))
    shared.submit("mine", 4, team="vision")
    assert shared.tick(11.0) == [Quarantined(name, token, shared.now)]


def test_a_lease_that_expires_while_it_is_preempted_makes_room() -> None:
    shared = Shared(Team("vision", 4))
    shared.submit("x", 4, team="nlp", ttl_s=20.0)
    shared.submit("mine", 4, team="vision")
    changes = shared.tick(30.0)
    assert [type(change) for change in changes] == [Expired, Granted]


def test_preemption_is_off_without_a_file_that_turns_it_on() -> None:
    shared = Shared(Team("vision", 4))
    shared.do([TeamsChanged(Teams((Team("vision", 4),)), 0.0)])
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    shared.tick(1e6)
    assert shared.preempting() == {}


def test_in_a_tree_the_highest_teams_below_the_common_parent_decide() -> None:
    """A child without a guarantee lives on its parent's; every level of a victim's side must be over."""
    teams = (Team("d1", 2), Team("d2", 2), Team("p", parent="d1"), Team("q", 1, parent="d2"))
    shared = Shared(*teams, Team("r", parent="d2"))
    shared.submit("x", 1, team="q")
    shared.submit("y", 3, team="r")
    shared.submit("mine", 2, team="p")
    assert shared.preempting() == {"y": "mine"}
    sibling = Shared(*teams, Team("r", parent="d2"))
    sibling.submit("x", 4, team="r")
    sibling.submit("mine", 1, team="q")
    assert sibling.preempting() == {"x": "mine"}


def test_a_guarantee_by_type_takes_back_gpus_of_that_type_only() -> None:
    from resource_manager.core.models import Gpu, Node

    state = ClusterState(
        [
            Node("a", 0, {}, tuple(Gpu(i, "A100") for i in range(2))),
            Node("h", 1, {}, tuple(Gpu(i, "H100") for i in range(2))),
        ]
    )
    rules = Teams((Team("vision", 2, {"A100": 2}), Team("nlp", 2, {"H100": 2})), True, 0.0, 0.0)
    state.apply(TeamsChanged(rules, 0.0))
    for name, place in (("x", "a"), ("y", "h")):
        request = Request(name, 2, team="nlp", required_node=place)
        for change in allocator.submit(state, request, SchedulingPass(first_fit, fifo, 1.0)):
            state.apply(change)
    for change in allocator.submit(
        state, Request("mine", 2, team="vision"), SchedulingPass(first_fit, fifo, 2.0)
    ):
        state.apply(change)
    assert state.preempting == {"x"}


def test_a_team_at_its_limit_may_take_its_own_leases_wherever_they_are() -> None:
    shared = Shared(Team("vision", limit=2), letters="ab")
    shared.submit("x", 2, team="vision", required_node="a")
    shared.submit("mine", 2, team="vision", required_node="b", priority=1)
    assert shared.preempting() == {"x": "mine"}
    shared.release("x")
    assert set(shared.state.leases) == {"mine"}


def test_a_server_that_cleans_its_gpus_is_counted_as_free_after_the_end() -> None:
    shared = Shared(Team("vision", 4))
    shared.do([AgentSeen("a", 0.0)])
    shared.submit("x", 4, team="nlp")
    shared.submit("mine", 4, team="vision")
    assert shared.preempting() == {"x": "mine"}


def test_what_would_be_preempted_is_said_without_doing_it() -> None:
    shared = Shared(Team("vision", 4), delay_s=1000.0)
    shared.submit("x", 2, team="nlp")
    request = Request("mine", 4, team="vision")
    before = shared.state.snapshot()
    victims = would_preempt(shared.state, request, SchedulingPass(first_fit, fifo, shared.now))
    assert [lease.lease_id for lease in victims] == ["x"]
    assert shared.state.snapshot() == before


def test_who_is_served_already_would_preempt_nobody_and_another_would_take_the_rest() -> None:
    shared = Shared(Team("vision", 8), letters="ab", delay_s=1000.0)
    shared.submit("x", 4, team="nlp")
    shared.submit("y", 4, team="nlp")
    shared.submit("mine", 4, team="vision", preemption_delay_s=0.0)
    assert shared.preempting() == {"y": "mine"}
    for request, taken in (
        (shared.state.pending["mine"].request, []),
        (Request("b", 4, team="vision"), ["x"]),
    ):
        victims = would_preempt(shared.state, request, SchedulingPass(first_fit, fifo, shared.now))
        assert [lease.lease_id for lease in victims] == taken


def test_quarantined_preemptions_do_not_count_as_making_room_twice() -> None:
    shared = Shared(Team("vision", 4), order=GREEDY)
    shared.submit("x", 4, team="nlp", preempt_grace_s=1.0)
    shared.submit("mine", 2, team="vision")
    shared.submit("second", 2, team="vision")
    assert shared.preempting() == {"x": "mine"}
    shared.tick(5.0)
    assert [change for change in shared.tick(100.0) if isinstance(change, Preempting)] == []
    shared.release("x", "")
    assert set(shared.state.leases) == {"mine", "second"}


def test_a_request_waits_for_no_victim_that_is_stuck_but_takes_another() -> None:
    """Its server has died: what ends meanwhile would go to smaller requests for days."""
    shared = Shared(Team("vision", 4), letters="ab")
    shared.submit("stuck", 4, team="nlp", quarantine=True, preempt_grace_s=1.0)
    shared.submit("other", 4, team="nlp", priority=1)
    shared.submit("mine", 4, team="vision")
    shared.tick(2.0)
    assert shared.state.leases["stuck"].quarantined
    shared.tick(STUCK_AFTER_S - 1.0)
    assert shared.preempting() == {"stuck": "mine"}, "it may end a little late"
    shared.tick()
    assert shared.preempting() == {"stuck": "mine", "other": "mine"}
    shared.release("other")
    assert "mine" in shared.state.leases


def test_a_placement_in_the_trial_is_not_left_behind() -> None:
    shared = Shared(Team("vision", 2), letters="ab", gpus=2)
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp")
    shared.submit("mine", 2, team="vision")
    (victim,) = shared.preempting()
    assert shared.state.by_name["a"].leases.keys() | shared.state.by_name["b"].leases.keys() == {"x", "y"}
    assert shared.state.leases[victim].members == (Placement("ab"["xy".index(victim)], (0, 1)),)


def by_hand(shared: Shared, lease_id: str, by: str = "") -> str:
    """Preempt a lease and return the request for which it ends."""
    [change] = shared.do(
        lease_steps.preempt(shared.state, lease_id, SchedulingPass(first_fit, fifo, shared.now), preemptor=by)
    )
    assert isinstance(change, Preempting)
    return change.preemptor


def test_by_hand_a_lease_ends_for_the_first_that_waits_for_it() -> None:
    shared = Shared(Team("nlp", 4))
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="nlp")
    shared.submit("large", 4, team="nlp")  # one lease's end is not enough
    for name in ("first", "second"):
        shared.submit(name, 2, team="nlp")
    assert by_hand(shared, "x") == "first"
    assert by_hand(shared, "y") == "second"
    ended = shared.release("x")
    assert [type(change) for change in ended] == [Released, Queued, Granted]
    assert set(shared.state.leases) == {"y", "first"}


def test_by_hand_a_lease_has_its_grace_and_ends_for_the_request_that_is_named() -> None:
    shared = Shared(Team("nlp", 4))
    shared.submit("x", 4, team="nlp", preempt_grace_s=7.0)
    for name in ("first", "second"):
        shared.submit(name, 4, team="nlp")
    token, now = shared.state.leases["x"].fencing_token, shared.now
    changes = lease_steps.preempt(shared.state, "x", SchedulingPass(first_fit, fifo, now), preemptor="second")
    assert changes == [Preempting("x", token, "second", now + 7.0, now, by_operator=True)]


@pytest.mark.parametrize(
    ("lease_id", "by", "why"),
    [
        ("x", "", "nobody waits for what x vnpm holds: stop its job instead"),
        ("x", "large", "large 3hmc would not start if x vnpm ended, or need not wait for it"),
        ("x", "gone", "preemptor must be a pending request, got 'gone'"),
        ("fixed", "", "fixed f462 is not preemptible, as it asked: stop its job instead"),
    ],
)
def test_by_hand_nobody_is_taken_in_vain(lease_id: str, by: str, why: str) -> None:
    shared = Shared(Team("nlp", 4))
    shared.submit("x", 2, team="nlp")
    shared.submit("fixed", 2, team="nlp", preemptible=False)
    shared.submit("large", 4, team="nlp")
    before = dict(shared.state.leases), dict(shared.state.pending), shared.state.version
    with pytest.raises(InvalidRequestError if by == "gone" else NotPreemptibleError, match=why) as raised:
        by_hand(shared, lease_id, by)
    assert getattr(raised.value, "field", None) == ("preemptor" if by == "gone" else None)
    assert (shared.state.leases, shared.state.pending, shared.state.version) == before


def test_by_hand_no_quarantined_lease_is_taken_as_nobody_tells_its_job() -> None:
    shared = Shared(Team("nlp", 4))
    shared.submit("x", 4, team="nlp", ttl_s=10.0, quarantine=True)
    shared.submit("next", 4, team="nlp")
    shared.tick(11.0)
    with pytest.raises(NotPreemptibleError, match="x vnpm is quarantined, and nobody tells its job"):
        by_hand(shared, "x")


def test_by_hand_a_lease_is_taken_once() -> None:
    shared = Shared(Team("nlp", 4))
    shared.submit("x", 4, team="nlp")
    shared.submit("next", 4, team="nlp")
    by_hand(shared, "x")
    with pytest.raises(NotPreemptibleError, match="x vnpm is being preempted for next f462 already"):
        by_hand(shared, "x")
