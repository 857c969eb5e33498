"""Reservations: planned starts, and what may start now without delaying them."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import Drained, Granted, InventoryChanged, Quarantined, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request, TypeChoice
from resource_manager.core.runtimes import RAN
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue import backfill
from resource_manager.scheduling.queue.backfill import MAX_RESERVATIONS, MAX_SWEPT, Reservations
from resource_manager.scheduling.queue.held_back import HeldBack
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import hold, node, nodes
from tests.scheduling.plain_backfill import plain_pass, random_queue


def without_delay(planned: Reservations, request: Request, placement: Placement) -> Placement | None:
    """Return what becomes of the placement of a request for one server."""
    members = planned.without_delay(request, (placement,))
    return None if members is None else members[0]


def ask(lease_id: str, gpus: int, runtime_s: float | None = None, cpus: int = 0, **more: object) -> Request:
    return Request(lease_id, gpus, resources={"cpus": cpus}, expected_runtime_s=runtime_s, **more)  # type: ignore[arg-type]


def at(now: float) -> SchedulingPass:
    return SchedulingPass(first_fit, fifo, now)


def passes(cluster: ClusterState, *waiting: Request) -> list[str]:
    """Queue the requests and return those that start at once, in order."""
    for request in waiting:
        cluster.apply(Queued(request, 0.0, cluster.sequence + 1, 0.0))
    return [
        change.lease.lease_id
        for change in allocator.schedule_pending(
            cluster, SchedulingPass(first_fit, get_order("priority+backfill"), 0.0)
        )
        if isinstance(change, Granted)
    ]


def one_busy_node() -> ClusterState:
    """Node a with 4 GPUs: two are held until 100, one until 200, one is free."""
    cluster = ClusterState([node("a", 4, 8)])
    hold(cluster, ask("long", 1, 200.0), "a", 0)
    hold(cluster, ask("short", 2, 100.0), "a", 1, 2)
    return cluster


def test_what_ends_before_a_reservation_or_runs_beside_it_may_start() -> None:
    planned = Reservations(one_busy_node(), at(10.0))
    assert planned.reserve(ask("head", 3, 50.0)) == 100.0, "on GPUs 1, 2 and 3"
    last = Placement("a", (3,))
    assert without_delay(planned, ask("brief", 1, 90.0), last) == last
    assert without_delay(planned, ask("one too long", 1, 90.1), last) is None
    assert without_delay(planned, ask("endless", 1), last) is None


def test_a_started_request_takes_its_part_of_the_plan() -> None:
    cluster = one_busy_node()
    planned = Reservations(cluster, at(10.0))
    assert planned.reserve(ask("head", 3, 50.0)) == 100.0
    brief = ask("brief", 1, 20.0)
    placement = without_delay(planned, brief, Placement("a", (3,)))
    assert placement is not None
    hold(cluster, brief, "a", *placement.gpu_ids, at=10.0)
    assert without_delay(planned, ask("second", 1, 20.0), Placement("a", (3,))) is None


def test_a_later_reservation_delays_no_earlier_one() -> None:
    """The second would fit at once if the first did not need the node at 100."""
    planned = Reservations(one_busy_node(), at(10.0))
    assert planned.reserve(ask("first", 4, 100.0)) == 200.0, "until 300"
    assert planned.reserve(ask("second", 3, 200.0)) == 300.0, "from 100 on it would run into the first"
    assert without_delay(planned, ask("until 200", 1, 190.0), Placement("a", (3,))) is not None
    assert without_delay(planned, ask("beyond", 1, 191.0), Placement("a", (3,))) is None


def test_the_placement_is_kept_if_it_delays_nothing_and_replaced_if_another_does() -> None:
    cluster = ClusterState(nodes("ab", 2))
    hold(cluster, ask("t", 1, 100.0), "a", 0)
    planned = Reservations(cluster, at(0.0))
    assert planned.reserve(ask("head", 2, 50.0, required_node="a")) == 100.0
    on_a = Placement("a", (1,))
    assert without_delay(planned, ask("brief", 1, 100.0), on_a) == on_a
    assert without_delay(planned, ask("endless", 1), on_a) == Placement("b", (0,))


def test_the_lowest_gpus_and_for_a_fraction_the_tightest_are_taken() -> None:
    cluster = ClusterState([node("a", 3)])
    hold(cluster, replace(ask("part", 1), gpu_milli=600), "a", 1)
    planned = Reservations(cluster, at(0.0))
    taken = Placement("a", (1,))
    assert without_delay(planned, ask("whole", 1, 5.0), taken) == Placement("a", (0,))
    part = replace(ask("other part", 1, 5.0), gpu_milli=400)
    assert without_delay(planned, part, taken) == taken
    assert without_delay(planned, part, Placement("a", (0,))) == Placement("a", (0,)), "as the policy chose"


@pytest.mark.parametrize(("ran_s", "left_s"), [(150, 50.0), (200, 200.0), (900, 200.0)])
@pytest.mark.parametrize("is_lease", [True, False])
def test_a_preempted_job_goes_on_from_what_it_saved(is_lease: bool, ran_s: int, left_s: float) -> None:
    """What it ran before is no part of its next lease, unless it should be over: it may begin it anew."""
    again = ask("again", 2, 200.0, labels={RAN: str(ran_s)})
    if is_lease:
        cluster = ClusterState([node("a", 2)])
        hold(cluster, again, "a", 0, 1)
        assert Reservations(cluster, at(10.0)).reserve(ask("head", 2, 50.0)) == left_s
    else:
        planned = Reservations(one_busy_node(), at(10.0))
        planned.reserve(again)
        assert planned.reserve(ask("head", 4, 50.0)) == max(100.0 + left_s, 200.0), "it begins at 100"


def test_a_lease_past_its_expected_end_may_end_at_any_moment_but_holds_its_gpus() -> None:
    cluster = ClusterState([node("a", 2)])
    hold(cluster, ask("overdue", 2, 100.0), "a", 0, 1)
    planned = Reservations(cluster, at(500.0))
    assert without_delay(planned, ask("t", 1, 1.0), Placement("a", (0,))) is None, "not free yet"
    assert planned.reserve(ask("head", 2, 10.0)) == 500.0, "from now on"


def test_a_quarantined_lease_draws_no_reservation() -> None:
    """Its server would look free from now on, however long nobody knows that its job is gone."""
    cluster = ClusterState(nodes("ab", 4))
    hold(cluster, ask("gone", 4, 10.0), "a", 0, 1, 2, 3, at=-50.0)
    hold(cluster, ask("short", 2, 100.0), "b", 0, 1)
    cluster.apply(Quarantined("gone", 1, 0.0))
    assert passes(cluster, ask("head", 4, 10.0), ask("long", 2, 500.0)) == [], "the head starts at 100"


def test_behind_an_overdue_lease_the_reservation_begins_now() -> None:
    cluster = ClusterState([node("a", 2)])
    hold(cluster, ask("overdue", 1, 100.0), "a", 0)
    planned = Reservations(cluster, at(500.0))
    assert planned.reserve(ask("head", 2, 10.0)) == 500.0, "not from 100"
    assert without_delay(planned, ask("brief", 1, 1.0), Placement("a", (1,))) is None


def test_a_request_for_all_cpus_of_a_node_is_reserved_and_let_through() -> None:
    cluster = ClusterState(nodes("ab", 2, 8))
    planned = Reservations(cluster, at(0.0))
    assert planned.reserve(ask("head", 0, 10.0, cpus=8)) == 0.0
    assert without_delay(planned, ask("all", 0, cpus=8), Placement("b")) == Placement("b")
    hold(cluster, ask("all", 0, cpus=8), "b")
    assert without_delay(planned, ask("one more", 0, 5.0, cpus=1), Placement("b")) is None


def test_gpus_of_another_type_are_not_taken() -> None:
    mixed = Node("a", 0, {}, (Gpu(0, "V100"), Gpu(1, "A100"), Gpu(2, "A100")))
    cluster = ClusterState([mixed])
    planned = Reservations(cluster, at(0.0))
    assert planned.reserve(ask("ahead", 1, 5.0, gpu_types=("A100",))) == 0.0, "on GPU 1"
    typed = ask("t", 1, 5.0, gpu_types=("A100",))
    assert without_delay(planned, typed, Placement("a", (1,))) == Placement("a", (2,))
    hold(cluster, typed, "a", 2)
    assert without_delay(planned, typed, Placement("a", (1,))) is None


def test_a_gang_that_must_move_goes_to_the_first_of_its_types_that_fits() -> None:
    def of_type(name: str, gpu_type: str) -> Node:
        gpus = tuple(Gpu(number, gpu_type) for number in range(8))
        return replace(node(name, 8), gpus=gpus, address=name)

    servers = [of_type("a", "H100"), of_type("b", "H100"), of_type("c", "A100"), of_type("d", "A100")]
    cluster = ClusterState(servers)
    hold(cluster, ask("busy", 4, 100.0), "b", 0, 1, 2, 3)
    ahead = ask("ahead", 8, 5.0, required_node="b")
    gang = ask("gang", 4, 1000.0, nodes=2, gpu_types=("H100", "A100"), types=TypeChoice.FIRST)
    for request in (ahead, gang):
        cluster.apply(Queued(request, 0.0, cluster.sequence + 1, 0.0))
    current = SchedulingPass(first_fit, get_order("fifo+backfill"), 0.0)
    [granted] = allocator.schedule_pending(cluster, current)
    assert isinstance(granted, Granted)
    assert [member.node for member in granted.lease.members] == ["c", "d"]


def test_what_waits_for_part_of_a_gpu_by_memory_holds_back_no_other_cards_for_whole_ones() -> None:
    """Which cards have the memory depends on the part."""
    cards = (Gpu(0, "L4", memory_mib=24_000), Gpu(1, "L40S", memory_mib=48_000))
    cluster = ClusterState([replace(node("a"), gpus=cards)])
    held_back = HeldBack(cluster)
    part = replace(ask("part", 1, gpu_memory="20GB"), gpu_milli=500)
    assert held_back.add(part, 1)
    free = cluster.nodes[0].capacity
    assert held_back.left(cluster.nodes[0], free).gpus == {0: 1000, 1: 0}
    assert held_back.add(ask("whole", 1, gpu_memory="20GB"), 1)
    assert held_back.left(cluster.nodes[0], free).gpus == {0: 0, 1: 0}


def test_a_fraction_that_must_move_goes_to_the_tightest_gpu() -> None:
    cluster = ClusterState([node("a", 3)])
    hold(cluster, replace(ask("half", 1), gpu_milli=500), "a", 2)
    hold(cluster, ask("whole", 1), "a", 0)
    part = replace(ask("part", 1, 5.0), gpu_milli=400)
    planned = Reservations(cluster, at(0.0))
    assert planned.reserve(ask("ahead", 1, 5.0)) == 0.0, "on GPU 1"
    assert without_delay(planned, part, Placement("a", (1,))) == Placement("a", (2,))


def test_an_unknown_runtime_has_no_end_unless_it_was_learnt() -> None:
    cluster = ClusterState([node("a", 2), node("b", 0)])
    hold(cluster, ask("train_1", 0), "b")
    hold(cluster, ask("train_2", 2), "a", 0, 1)
    assert Reservations(cluster, at(0.0)).reserve(ask("head", 1, 10.0)) is None
    cluster.apply(Released("train_1", 1, 60.0, "SUCCESS"))
    assert Reservations(cluster, at(0.0)).reserve(ask("head", 1)) == 60.0


def test_nothing_is_reserved_where_it_can_never_start() -> None:
    cluster = ClusterState([node("a", 2, 8), Node("typed", 1, {"cpus": 8}, (Gpu(0, "V100"),))])
    for never in (
        ask("gpus", 3, 1.0),
        ask("cpus", 1, 1.0, cpus=9),
        ask("type", 1, 1.0, gpu_types=("A100",)),
        ask("elsewhere", 1, 1.0, required_node="b"),
    ):
        assert Reservations(cluster, at(0.0)).reserve(never) is None, never.lease_id
    assert Reservations(cluster, at(0.0)).reserve(ask("typed", 1, 1.0, gpu_types=("V100",))) == 0.0
    cluster.apply(Drained("a", 0.0))
    assert Reservations(cluster, at(0.0)).reserve(ask("two", 2, 1.0)) is None, "the only node is closed"


def test_a_retired_node_gets_no_reservation() -> None:
    cluster = ClusterState(nodes("ab", 2))
    hold(cluster, ask("t", 1, 10.0), "b", 0)
    cluster.apply(InventoryChanged((node("a", 1),), 1.0))
    assert Reservations(cluster, at(1.0)).reserve(ask("two", 2, 5.0)) is None
    assert Reservations(cluster, at(1.0)).reserve(ask("one", 1, 5.0)) == 1.0


def test_only_so_many_requests_get_a_reservation() -> None:
    planned = Reservations(ClusterState([node("a", 1)]), at(0.0))
    for number in range(MAX_RESERVATIONS):
        assert planned.reserve(ask(f"t{number}", 1, 10.0)) == 10.0 * number
    assert planned.is_one_too_many(ask("one too many", 1, 10.0))


def test_the_reservations_of_gangs_look_at_so_many_nodes_in_all() -> None:
    """Dozens of gangs on hundreds of nodes took a tenth of a second in each pass, and with it each call."""

    def of(count: int) -> Reservations:
        name = "n{}".format
        return Reservations(
            ClusterState(Node(name(i), i, {"cpus": 8}, (Gpu(0),), name(i)) for i in range(count)), at(0.0)
        )

    half = MAX_SWEPT // 2
    planned = of(half)
    gangs = [ask(f"g{number}", 1, 10.0, nodes=half) for number in range(4)]
    assert list(map(planned.reserve, gangs[:2])) == [0.0, 10.0]
    assert all(map(planned.is_one_too_many, gangs[2:]))
    assert planned.reserve(ask("one", 1, 10.0)) == 20.0
    assert of(MAX_SWEPT + 1).reserve(ask("first", 1, 10.0, nodes=half)) == 0.0


def test_a_gang_that_is_placed_elsewhere_does_not_meet_where_no_port_is_left() -> None:
    cluster = ClusterState(
        replace(each, address=each.name, gang_ports=(7000, 7000)) for each in nodes("abcd", 2)
    )
    members = (Placement("a", (0,), port=7000), Placement("d", (0,)))
    cluster.apply(Granted(Lease(ask("meets", 1, nodes=2), members, 1, 0.0), 0.0))
    planned = Reservations(cluster, at(0.0))
    assert planned.reserve(ask("head", 2, 50.0, required_node="b")) == 0.0
    on_b = (Placement("b", (0,), port=7000), Placement("c", (0,)))
    instead = planned.without_delay(ask("g", 1, 10.0, nodes=2), on_b)
    assert [(each.node, each.port) for each in instead or ()] == [("c", 7000), ("d", 0)]


@pytest.mark.parametrize("swept", [1, 8, 20])
def test_where_a_pass_ends_early_nothing_behind_could_start(
    swept: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backfill, "MAX_SWEPT", swept)
    for seed in range(40):
        draw = random.Random(seed)
        cluster = ClusterState([replace(each, address=each.name) for each in nodes("abcde", 4)])
        for number, name in enumerate("abcde"):
            gpus = draw.randint(1, 4)
            held = ask(f"held{number}", gpus, draw.choice((None, 20.0, 40.0)))
            hold(cluster, held, name, *range(gpus))
        for number in range(14):
            count = draw.choice((1, 2, 3, 5))
            place = draw.choice("abcde") if count == 1 and draw.random() < 0.3 else None
            runtime_s = draw.choice((None, 5.0, 15.0, 60.0))
            request = ask(f"w{number}", draw.randint(1, 4), runtime_s, nodes=count, required_node=place)
            cluster.apply(Queued(request, 0.0, cluster.sequence + 1, 0.0))
        now = SchedulingPass(first_fit, get_order("fifo+backfill"), 0.0)
        found = allocator.schedule_pending(cluster, now)
        with monkeypatch.context() as whole:
            whole.setattr(Reservations, "is_over", lambda self: False)
            whole.setattr(Reservations, "may_start", lambda self, request, restricted: True)
            fresh = ClusterState.from_snapshot(cluster.snapshot())
            assert allocator.schedule_pending(fresh, now) == found, seed


def starts(cluster: ClusterState, waiting: Iterable[Request], now: float) -> dict[str, float]:
    """Run the leases and then the requests in their order, each at its first chance, by runtimes alone."""
    began: dict[str, float] = {}
    ends = {
        lease.lease_id: lease.granted_at + (lease.request.expected_runtime_s or 0.0)
        for lease in cluster.leases.values()
    }
    queue = list(waiting)
    while queue:
        for lease_id in [name for name, end in ends.items() if end <= now]:
            cluster.apply(Released(lease_id, cluster.leases[lease_id].fencing_token, now))
            del ends[lease_id]
        while queue and (free := next(cluster.candidates(queue[0]), None)):
            request = queue.pop(0)
            gpu_ids = free.pick_gpus(request)
            assert gpu_ids is not None
            hold(cluster, request, free.name, *gpu_ids, at=now)
            began[request.lease_id] = now
            ends[request.lease_id] = now + (request.expected_runtime_s or 0.0)
        if queue:
            now = min(ends.values())
    return began


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=4),
    st.tuples(st.integers(1, 3), st.integers(1, 30)),
)
def test_what_is_let_through_delays_nobody_whose_runtimes_are_right(
    queue: list[tuple[int, int]], late: tuple[int, int]
) -> None:
    def busy() -> ClusterState:
        cluster = ClusterState([node("a", 3)])
        hold(cluster, ask("held", 2, 10.0), "a", 0, 1)
        return cluster

    waiting = [ask(f"w{number}", gpus, float(runtime)) for number, (gpus, runtime) in enumerate(queue)]
    cluster, newcomer = busy(), ask("late", late[0], float(late[1]))
    planned = Reservations(cluster, at(0.0))
    assert None not in [planned.reserve(request) for request in waiting]
    placement = without_delay(planned, newcomer, Placement("a", (2,)))
    if placement is None:
        return
    before = starts(busy(), waiting, 0.0)
    hold(cluster, newcomer, placement.node, *placement.gpu_ids)
    after = starts(cluster, waiting, 0.0)
    assert all(after[name] <= before[name] for name in before)


@given(
    st.lists(st.tuples(st.integers(1, 3), st.integers(1, 9)), min_size=1, max_size=8),
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=6),
    st.tuples(st.integers(1, 3), st.integers(1, 30)),
)
def test_on_several_servers_the_plan_of_those_ahead_stays_as_it_is(
    queue: list[tuple[int, int]], held: list[tuple[str, int]], late: tuple[int, int]
) -> None:
    cluster = ClusterState(nodes("abc", 3))
    for number, (name, runtime) in enumerate(held):
        if free := [gpu_id for gpu_id, milli in cluster.by_name[name].gpu_free.items() if milli]:
            hold(cluster, ask(f"held{number}", 1, float(runtime)), name, free[0])
    waiting = [ask(f"w{number}", gpus, float(runtime)) for number, (gpus, runtime) in enumerate(queue)]
    newcomer = ask("late", late[0], float(late[1]))
    if (found := next(cluster.candidates(newcomer), None)) is None:
        return
    planned = Reservations(cluster, at(0.0))
    before = [planned.reserve(request) for request in waiting]
    placement = without_delay(planned, newcomer, found.place(newcomer))
    if placement is None:
        return
    hold(cluster, newcomer, placement.node, *placement.gpu_ids)
    again = Reservations(cluster, at(0.0))
    assert [again.reserve(request) for request in waiting] == before


# ---- the rule, said plainly ----


@pytest.mark.parametrize(
    "seeds",
    [
        range(20),
        pytest.param(range(20, 100), marks=pytest.mark.thorough),
        pytest.param(range(100, 500), marks=pytest.mark.e2e),
    ],
    ids=("few", "some", "many"),
)
def test_decisions_are_those_of_the_plain_rule_whatever_was_decided_before(seeds: range) -> None:
    for seed in seeds:
        draw = random.Random(seed)
        cluster, now = random_queue(draw), 5.0
        order = get_order(draw.choice(("priority", "fifo", "srtf")) + "+backfill")
        for _ in range(4):
            for later in draw.choices(range(60), k=draw.choice((0, 2))):  # as in the plays of an estimate
                allocator.schedule_pending(cluster, SchedulingPass(first_fit, order, now + later))
            changes = allocator.schedule_pending(cluster, SchedulingPass(first_fit, order, now))
            fresh = ClusterState.from_snapshot(cluster.snapshot())
            assert changes == allocator.schedule_pending(fresh, SchedulingPass(first_fit, order, now)), (
                seed,
                now,
            )
            grants = [change for change in changes if isinstance(change, Granted)]
            assert [(grant.lease.lease_id, grant.lease.members) for grant in grants] == plain_pass(
                fresh, order, now
            ), (seed, now)
            for change in changes:
                cluster.apply(change)
            now += draw.randint(1, 8)
            for lease in list(cluster.leases.values()):
                runtime_s = lease.request.expected_runtime_s
                if (
                    lease.granted_at + (50.0 if runtime_s is None else runtime_s) <= now
                    and draw.random() < 0.8
                ):
                    cluster.apply(Released(lease.lease_id, lease.fencing_token, now))
