"""Gangs: all members at once or none, in one domain, in a stable order, and nobody behind delays them."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from itertools import combinations, pairwise
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Change,
    Drained,
    Granted,
    MembersReleased,
    Queued,
    Released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, fits, pick_gpus, usable_gpus
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request, Spread
from resource_manager.errors import CapacityError, LeaseNotFoundError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.gang_slots import could_start
from resource_manager.scheduling.placement.gangs import Part, fitting_node, plan
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import hold

FIRST_FIT = POLICIES["first_fit"]


def server(name: str, number: int, gpus: int = 2, cpus: int = 8, **more: Any) -> Node:
    return Node(name, number, {"cpus": cpus}, tuple(Gpu(i) for i in range(gpus)), f"10.0.0.{number}", **more)


def cluster_of(*racks: str, gpus: int = 2, **more: Any) -> ClusterState:
    """Return a cluster with a server for each letter, in racks 0, 1, …"""
    named = [(letter, str(rack)) for rack, letters in enumerate(racks) for letter in letters]
    return ClusterState(
        server(letter, number, gpus, labels={"rack": rack}, **more)
        for number, (letter, rack) in enumerate(named)
    )


def gang(lease_id: str, nodes: int, gpus: int = 2, **more: Any) -> Request:
    return Request(lease_id, gpus, nodes=nodes, **more)


def start(cluster: ClusterState, request: Request, policy: Any = FIRST_FIT, now: float = 0.0) -> Lease | None:
    changes = allocator.allocate(cluster, request, SchedulingPass(policy, fifo, now))
    for change in changes:
        cluster.apply(change)
    return cluster.leases.get(request.lease_id)


def places(lease: Lease | None) -> str:
    return "" if lease is None else "".join(member.node for member in lease.members)


# ---- which servers ----


@pytest.mark.parametrize("policy", POLICIES.values(), ids=POLICIES)
def test_every_policy_places_one_member_a_server(policy: Any) -> None:
    cluster = cluster_of("abcd")
    start(cluster, Request("single", 2), policy)
    lease = start(cluster, gang("g", 3), policy)
    assert lease is not None
    assert len({member.node for member in lease.members}) == 3
    assert all(len(member.gpu_ids) == 2 for member in lease.members)
    allocator.check(cluster)


def test_nothing_is_allocated_unless_all_members_fit() -> None:
    cluster = cluster_of("abc")
    start(cluster, Request("single", 1))
    before = cluster.snapshot()
    assert start(cluster, gang("g", 3)) is None
    assert cluster.snapshot() == before


def test_of_the_domains_that_take_all_the_fullest_is_chosen() -> None:
    cluster = cluster_of("abcd", "ef", "ghi")
    assert places(start(cluster, gang("first", 2, same="rack"))) == "ef"
    assert places(start(cluster, gang("second", 2, same="rack"))) == "gh"
    assert places(start(cluster, gang("third", 3, same="rack"))) == "abc"
    assert start(cluster, gang("fourth", 2, same="rack")) is None, "d and i are in two racks"
    assert places(start(cluster, gang("anywhere", 2))) == "di"


def test_servers_without_the_label_are_in_no_domain() -> None:
    cluster = ClusterState([server("a", 0), server("b", 1, labels={"rack": "x"}), server("c", 2)])
    assert start(cluster, gang("g", 2, same="rack")) is None
    assert places(start(cluster, gang("g", 2, prefer_same="rack"))) == "ba", "the rack first"


def test_a_preferred_domain_is_taken_if_it_has_all_else_as_few_as_possible() -> None:
    assert places(start(cluster_of("ab", "cde", "f"), gang("g", 3, prefer_same="rack"))) == "cde"
    assert places(start(cluster_of("a", "bcd", "ef"), gang("g", 5, prefer_same="rack"))) == "bcdef"
    assert places(start(cluster_of("ab", "cd", "e"), gang("g", 3, prefer_same="rack"))) == "abe"
    assert start(cluster_of("ab", "cd"), gang("g", 5, prefer_same="rack")) is None


def test_a_required_and_a_preferred_domain_go_together() -> None:
    def labelled(name: str, number: int, row: str, rack: str) -> Node:
        return server(name, number, labels={"row": row, "rack": rack})

    cluster = ClusterState(
        [
            labelled("a", 0, "1", "x"),
            labelled("b", 1, "1", "y"),
            labelled("c", 2, "2", "z"),
            labelled("d", 3, "2", "w"),
            labelled("e", 4, "2", "w"),
        ]
    )
    request = gang("g", 2, same="row", prefer_same="rack")
    assert places(start(cluster, request)) == "de", "the fuller row has no rack for both"
    assert places(start(cluster, gang("h", 2, same="row", prefer_same="rack"))) == "ab"


def test_the_preferred_server_decides_the_domain_and_gets_a_member() -> None:
    cluster = cluster_of("ab", "cde")
    assert places(start(cluster, gang("g", 2, same="rack", preferred_node="e"))) == "ce"


def test_gangs_of_two_vendors_each_start_where_their_cards_are() -> None:
    servers = [
        Node(name, number, {}, (Gpu(0, vendor=vendor),), name)
        for number, (name, vendor) in enumerate((("a", "nvidia"), ("b", "amd"), ("c", "amd")))
    ]
    cluster = ClusterState(servers)
    of_nvidia, of_amd = (Request(vendor, 1, vendor=vendor, nodes=2) for vendor in ("nvidia", "amd"))
    assert not could_start(cluster, of_nvidia)
    assert could_start(cluster, of_amd), "what is kept of one is not an answer for the other"


def test_a_closed_server_and_one_without_an_address_take_no_member() -> None:
    cluster = cluster_of("abc")
    cluster.apply(Drained("a", 0.0))
    assert places(start(cluster, gang("g", 2))) == "bc"
    lonely = Node("z", 25, {"cpus": 8}, (Gpu(0), Gpu(1)))
    assert start(ClusterState([lonely, server("a", 0)]), gang("g", 2)) is None
    assert start(ClusterState([lonely]), Request("t", 2)) is not None


def test_domains_are_those_that_take_all_members_packed_or_not() -> None:
    packed = gang("g", 2, 1, spread=Spread.PACK, same="rack")
    assert places(start(cluster_of("abc", "d"), packed)) == "dd", "one server is enough, and the fullest"
    assert places(start(cluster_of("abc", "d"), gang("g", 2, 1, same="rack", preferred_node="b"))) == "ab"
    assert places(start(cluster_of("abc", "d"), replace(packed, preferred_node="b"))) == "bb"
    cluster = cluster_of("a", "b", "cd")
    cluster.apply(Drained("a", 0.0))
    assert places(start(cluster, replace(packed, nodes=3))) == "ccd", "the first rack is closed"


def test_a_domain_that_lacks_cpus_is_not_chosen_for_its_gpus() -> None:
    cluster = cluster_of("ab", "cd")
    for name in "ab":
        start(cluster, Request(name, 0, required_node=name, resources={"cpus": 7}))
    for spread, expected in ((Spread.PACK, "cc"), (Spread.SERVERS, "cd")):
        with cluster.trial():
            asked = gang("g", 2, 1, spread=spread, same="rack", resources={"cpus": 2})
            assert places(start(cluster, asked)) == expected


def test_of_domains_equally_full_the_first_in_the_inventory_is_taken() -> None:
    for request in (
        gang("g", 2, same="rack"),
        gang("g", 2, 0, same="rack"),
        gang("g", 3, prefer_same="rack"),
    ):
        cluster = ClusterState(server(name, i, labels={"rack": "xyyx"[i]}) for i, name in enumerate("abcd"))
        assert places(start(cluster, request))[:2] == "ad"


def test_of_equally_good_choices_inside_the_required_domain_the_fullest_counts() -> None:
    cluster = ClusterState(
        server(name, i, labels={"row": "112222"[i], "rack": "xyzzww"[i]}) for i, name in enumerate("abcdef")
    )
    assert places(start(cluster, gang("g", 2, same="row", prefer_same="rack"))) == "cd"
    assert places(start(cluster, gang("h", 2, same="row", prefer_same="rack"))) == "ef"
    cluster = ClusterState(
        server(name, i, labels={"row": "112222"[i], "rack": "xyxyzw"[i]}) for i, name in enumerate("abcdef")
    )
    assert places(start(cluster, gang("g", 2, same="row", prefer_same="rack"))) == "ab"


def test_a_plan_for_later_is_for_open_servers_with_an_address_of_those_allowed() -> None:
    cluster = ClusterState([*(state.node for state in cluster_of("abc").nodes), Node("z", 25)])
    cluster.apply(Drained("a", 0.0))
    assert plan(cluster, gang("g", 2), slots_of=lambda _: 1) == [Part(0b0110, 2)]
    assert plan(cluster, gang("g", 2), 0b1101, lambda _: 2) == [Part(0b0100, 2)]


def test_servers_without_a_port_are_left_out_one_after_the_other() -> None:
    cluster = cluster_of("abcd", gpus=8, gang_ports=(7000, 7000))
    found = [places(start(cluster, gang(f"g{number}", 2, 1))) for number in range(4)]
    assert found == ["ab", "bc", "cd", ""]


def test_the_node_of_a_gang_that_fits_is_its_first() -> None:
    found = fitting_node(cluster_of("ab"), gang("g", 2))
    assert found is not None
    assert found.name == "a"


def members_one_by_one(node: Node, request: Request, free: FreeCapacity) -> int:
    """Return how many members the node takes with that free capacity, subtracted one after the other."""
    most = 1 if request.spread is Spread.SERVERS else request.nodes
    for count in range(most):
        if not fits(node, request, free):
            return count
        free = free.minus(request, pick_gpus(request, usable_gpus(node, request, free.gpus), free.gpus))
    return most


def drawn_node(draw: Random, number: int) -> Node:
    """Return a server of one of few kinds, so that some are alike."""
    gpus = tuple(Gpu(i, draw.choice(("A", "B")), uuid=draw.choice(("", "MIG-1"))) for i in range(3))
    labels = {"rack": draw.choice("xy"), "zone": draw.choice("pq")}
    resources = {"cpus": draw.choice((2, 6)), "disk": 0.3}
    few = gpus if draw.random() < 0.5 else (Gpu(0), Gpu(1), Gpu(2))
    return Node(
        f"s{number}",
        number,
        resources,
        few,
        draw.choice(("h", "h", "")),
        labels=labels if draw.random() < 0.8 else {},
    )


def drawn_gang(draw: Random) -> Request:
    gpus = draw.choice((0, 1, 1, 2))
    return gang(
        "g",
        draw.choice((2, 3, 4, 6)),
        gpus,
        gpu_milli=draw.choice((1000, 300)) if gpus == 1 else 1000,
        resources=draw.choice(({}, {"cpus": 2}, {"disk": 0.1}, {"tapes": 0})),
        gpu_types=draw.choice(((), (), ("A",))) if gpus else (),
        spread=draw.choice(list(Spread)),
        same=draw.choice(("", "rack")),
        labels_required=draw.choice(({}, {}, {"zone": "p"}, {"zone": "p", "rack": "x"}, {"zone": "none"})),
        required_node=draw.choice((None, None, None, "s1", "s4", "gone")),
    )


# ---- ranks and ports ----


def test_ranks_follow_the_inventory_whatever_the_policy_chose() -> None:
    cluster = cluster_of("abcd")
    start(cluster, Request("single", 1, preferred_node="d"))
    assert places(start(cluster, gang("g", 2, 1), POLICIES["best_fit"])) == "ad"


def test_the_first_member_has_the_next_port_and_two_gangs_never_share_one() -> None:
    cluster = cluster_of("ab", gpus=8, gang_ports=(7000, 7002))

    def ports(lease: Lease | None) -> list[int]:
        assert lease is not None
        return [member.port for member in lease.members]

    assert [ports(start(cluster, gang(name, 2, 1))) for name in "xyz"] == [[7000, 0], [7001, 0], [7002, 0]]
    assert start(cluster, gang("full", 2, 1)) is None, "each server but b is first, and a has no port left"
    [released] = lease_steps.release(cluster, "y", 1.0)
    cluster.apply(released)
    assert ports(start(cluster, gang("again", 2, 1))) == [7001, 0]
    members = (Placement("a", (7,), port=7001), Placement("b", (7,)))
    with pytest.raises(CapacityError, match="port 7001 of 'a' is of another gang"):
        cluster.apply(Granted(Lease(gang("thief", 2, 1), members, 99, 2.0), 2.0))


def test_the_last_port_outlives_its_lease_and_the_process() -> None:
    cluster = cluster_of("ab")
    start(cluster, gang("g", 2))
    [released] = lease_steps.release(cluster, "g", 1.0)
    cluster.apply(released)
    for state in (cluster, ClusterState.from_snapshot(cluster.snapshot())):
        with state.trial():
            assert start(state, gang("h", 2)).members[0].port == 29501  # type: ignore[union-attr]
        assert state.by_name["a"].last_port == 29500


def test_a_server_without_a_port_is_left_out_if_others_fit() -> None:
    cluster = cluster_of("abc", gpus=8, gang_ports=(7000, 7000))
    assert places(start(cluster, gang("g", 2, 1))) == "ab"
    assert places(start(cluster, gang("h", 2, 1))) == "bc"


def test_the_server_that_is_left_out_is_the_one_where_the_gang_would_meet() -> None:
    """By domain c comes before b, as a is of its rack: b was left out for it, and the gang waited."""
    cluster = ClusterState(
        server(name, i, 8, labels={"rack": "xyxz"[i]}, gang_ports=(7000, 7000))
        for i, name in enumerate("abcd")
    )
    for name, on, gpus in (("full", "a", 8), ("half", "d", 4)):
        hold(cluster, Request(name, gpus), on, *range(gpus))
    four = tuple(range(4))
    meeting = Lease(gang("m", 2, 4), (Placement("c", four, port=7000), Placement("b", four)), 9, 0.0)
    cluster.apply(Granted(meeting, 0.0))
    assert places(start(cluster, gang("g", 2, 4, prefer_same="rack"))) == "bd"


@pytest.mark.parametrize(
    "members",
    [
        (Placement("a", (0, 1)),),
        (Placement("a", (0, 1)), Placement("a", (0, 1))),
        (Placement("a", (0,)), Placement("b", (0, 1))),
        (Placement("a", (0, 1)), Placement("b", (0, 9))),
    ],
)
def test_a_grant_that_is_not_whole_changes_nothing(members: tuple[Placement, ...]) -> None:
    cluster = cluster_of("ab")
    before = cluster.snapshot()
    with pytest.raises(CapacityError):
        cluster.apply(Granted(Lease(gang("g", 2), members, 1, 0.0), 0.0))
    assert cluster.snapshot() == before
    assert [(state.whole_free, state.leases) for state in cluster.nodes] == [(2, {}), (2, {})]
    allocator.check(cluster)


# ---- the remainder ----


def released_members(cluster: ClusterState, *ranks: int, lease_id: str = "g", token: int = 1) -> None:
    for change in lease_steps.release_members(cluster, lease_id, ranks, 5.0, fencing_token=token):
        cluster.apply(change)


def test_the_rest_of_a_gang_keeps_its_capacity_and_frees_the_id() -> None:
    cluster = cluster_of("abcd")
    start(cluster, gang("g", 3))
    released_members(cluster, 0, 2)
    assert (cluster.leases, [lease.ranks for lease in cluster.remainders.values()]) == ({}, [(1,)])
    assert places(start(cluster, gang("g", 3))) == "acd", "not on what the remainder holds"
    assert lease_steps.expire(cluster, math.inf) == []
    allocator.check(cluster)
    restored = ClusterState.from_snapshot(cluster.snapshot())
    assert restored.snapshot() == cluster.snapshot()
    allocator.check(restored)
    with pytest.raises(LeaseNotFoundError):
        lease_steps.renew(cluster, "g", 6.0, fencing_token=1)
    with pytest.raises(LeaseNotFoundError):
        lease_steps.preempt(cluster, "g", SchedulingPass(FIRST_FIT, get_order("fifo"), 6.0), fencing_token=1)
    [ended] = lease_steps.release(cluster, "g", 6.0, fencing_token=1)
    assert ended == MembersReleased("g", 1, (1,), 6.0)
    cluster.apply(ended)
    assert cluster.remainders == {}
    assert cluster.by_name["b"].whole_free == 2
    assert places(cluster.leases["g"]) == "acd"


def test_a_remainder_ends_in_steps_and_a_trial_restores_it() -> None:
    cluster = cluster_of("abc")
    start(cluster, gang("g", 3))
    before = cluster.snapshot()
    with cluster.trial():
        released_members(cluster, 1)
        inside = cluster.snapshot()
        with cluster.trial():
            released_members(cluster, 0)
            released_members(cluster, 2)
            assert cluster.remainders == {}
        assert cluster.snapshot() == inside
    assert cluster.snapshot() == before
    released_members(cluster, 1)
    with pytest.raises(LeaseNotFoundError):
        released_members(cluster, 1)
    released_members(cluster, 2)
    assert cluster.by_name["a"].whole_free == 0
    released_members(cluster, 0)
    assert cluster.remainders == {}
    allocator.check(cluster)


def test_all_members_of_a_lease_are_the_lease() -> None:
    cluster = cluster_of("ab")
    start(cluster, gang("g", 2))
    assert lease_steps.release_members(cluster, "g", (0, 1), 5.0, fencing_token=1) == [Released("g", 1, 5.0)]
    again = lease_steps.release_members(cluster, "g", (0, 1), 5.0, fencing_token=1, outcome="NOT_STARTED")
    assert [type(change) for change in again] == [Released, Queued], "its request is not lost"
    for ranks in ((), (2,), (0, 7)):
        with pytest.raises(LeaseNotFoundError):
            lease_steps.release_members(cluster, "g", ranks, 5.0, fencing_token=1)
    with pytest.raises(LeaseNotFoundError):
        lease_steps.release_members(cluster, "g", (0,), 5.0, fencing_token=9)


def test_packed_members_of_one_server_end_one_by_one() -> None:
    cluster = cluster_of("a", gpus=8)
    start(cluster, gang("g", 2, 4, spread=Spread.PACK, resources={"cpus": 2}))
    released_members(cluster, 0)
    assert (cluster.by_name["a"].whole_free, cluster.by_name["a"].free["cpus"]) == (4, 6)
    allocator.check(cluster)
    released_members(cluster, 1)
    assert (cluster.by_name["a"].whole_free, cluster.by_name["a"].free["cpus"]) == (8, 8)


# ---- the queue ----


def pass_over(cluster: ClusterState, order: str, now: float) -> list[str]:
    changes = allocator.schedule_pending(cluster, SchedulingPass(FIRST_FIT, get_order(order), now))
    for change in changes:
        cluster.apply(change)
    return [change.lease.lease_id for change in changes if isinstance(change, Granted)]


def queue(cluster: ClusterState, *requests: Request) -> None:
    for request in requests:
        cluster.apply(Queued(request, 0.0, cluster.sequence + 1, 0.0))


def test_a_pending_gang_reserves_servers_that_are_free_together() -> None:
    cluster = cluster_of("abc")
    start(cluster, Request("until 10", 2, preferred_node="a", expected_runtime_s=10.0))
    start(cluster, Request("until 30", 2, preferred_node="b", expected_runtime_s=30.0))
    queue(
        cluster,
        gang("both", 2, expected_runtime_s=5.0),
        Request("too long", 2, expected_runtime_s=11.0),
        Request("brief", 2, expected_runtime_s=10.0),
    )
    assert pass_over(cluster, "fifo+backfill", 0.0) == ["brief"], "c and a are free from 10 on"
    for name, token in (("until 10", 1), ("brief", 3)):
        cluster.apply(Released(name, token, 10.0))
    assert pass_over(cluster, "fifo+backfill", 10.0)[:1] == ["both"]


def test_a_gang_that_overtakes_moves_away_from_reserved_servers() -> None:
    cluster = cluster_of("abcd")
    start(cluster, Request("until 10", 2, preferred_node="a", expected_runtime_s=10.0))
    queue(
        cluster,
        Request("wants a", 2, required_node="a", expected_runtime_s=100.0),
        gang("four", 4, expected_runtime_s=5.0),
        gang("long", 2, expected_runtime_s=1000.0),
        gang("brief", 2, expected_runtime_s=9.0),
    )
    assert pass_over(cluster, "fifo+backfill", 0.0) == ["brief"]


def test_a_gang_blocks_the_queue_only_if_the_open_servers_could_take_it() -> None:
    cluster = cluster_of("ab", "c")
    start(cluster, Request("single", 1))
    queue(cluster, gang("g", 2, same="rack"), Request("behind", 1))
    assert pass_over(cluster, "fifo", 0.0) == []
    cluster.apply(Drained("b", 1.0))
    assert not could_start(cluster, gang("g", 2, same="rack"))
    assert pass_over(cluster, "fifo", 1.0) == ["behind"]


# ---- against brute force ----

SERVERS = st.lists(
    st.tuples(
        st.integers(0, 3),  # GPUs
        st.integers(1, 6),  # CPUs
        st.sampled_from(["", "x", "y"]),  # rack
        st.sampled_from(["A100", "V100"]),
        st.booleans(),  # open
        st.integers(0, 3),  # GPUs in use
    ),
    min_size=1,
    max_size=6,
)


@st.composite
def gangs(draw: st.DrawFn) -> Request:
    milli = draw(st.sampled_from([1000, 1000, 400]))
    return Request(
        "g",
        1 if milli < 1000 else draw(st.integers(0, 3)),
        gpu_milli=milli,
        resources={"cpus": draw(st.integers(0, 3))},
        gpu_types=draw(st.sampled_from([(), ("A100",)])),
        nodes=draw(st.integers(2, 7)),
        spread=draw(st.sampled_from(list(Spread))),
        same=draw(st.sampled_from(["", "rack"])),
        prefer_same=draw(st.sampled_from(["", "rack"])),
    )


def built(servers: list[tuple[int, int, str, str, bool, int]]) -> ClusterState:
    cluster = ClusterState(
        Node(
            f"s{i}",
            i,
            {"cpus": cpus},
            tuple(Gpu(n, kind) for n in range(gpus)),
            f"10.0.0.{i}",
            labels={"rack": rack} if rack else {},
        )
        for i, (gpus, cpus, rack, kind, _, _) in enumerate(servers)
    )
    for i, (gpus, _, _, _, is_open, used) in enumerate(servers):
        if 0 < used <= gpus:
            start(cluster, Request(f"busy {i}", used, required_node=f"s{i}"))
        if not is_open:
            cluster.apply(Drained(f"s{i}", 0.0))
    return cluster


def most_members(cluster: ClusterState, name: str, request: Request) -> int:
    """Return how many members the server takes, found by granting one after the other."""
    most = 1 if request.spread is Spread.SERVERS else request.nodes
    one = {"gpu_milli": request.gpu_milli, "resources": request.resources, "gpu_types": request.gpu_types}
    with cluster.trial():
        for number in range(most):
            member = Request(f"try {number}", request.gpus, required_node=name, **one)  # type: ignore[arg-type]
            if start(cluster, member) is None:
                return number
    return most


def brute_force(cluster: ClusterState, request: Request) -> bool:
    """Return True if any set of servers, of one rack if required, takes all members."""
    most = {state.name: most_members(cluster, state.name, request) for state in cluster.nodes}
    for size in range(1, len(most) + 1):
        for chosen in combinations(most, size):
            racks = {cluster.by_name[name].node.labels.get("rack") for name in chosen}
            if request.same and (len(racks) > 1 or None in racks):
                continue
            if sum(most[name] for name in chosen) >= request.nodes:
                return True
    return False


@settings(max_examples=300, deadline=None)
@given(SERVERS, gangs(), st.sampled_from(sorted(POLICIES)))
def test_a_gang_starts_exactly_if_brute_force_finds_a_place(
    servers: list[tuple[int, int, str, str, bool, int]], request: Request, policy: str
) -> None:
    cluster = built(servers)
    before = cluster.snapshot()
    expected = brute_force(cluster, request)
    assert cluster.snapshot() == before
    lease = start(cluster, request, POLICIES[policy])
    assert (lease is not None) == expected
    allocator.check(cluster)
    if lease is None:
        assert cluster.snapshot() == before
        return
    assert len(lease.members) == request.nodes
    assert len([member for member in lease.members if member.port]) == (lease.members[0].port > 0) == 1
    nodes = [cluster.by_name[member.node] for member in lease.members]
    if request.spread is Spread.SERVERS:
        assert len({state.name for state in nodes}) == request.nodes
    if request.same:
        assert len({state.node.labels["rack"] for state in nodes}) == 1
    label = request.prefer_same or request.same
    if not label:
        assert [state.index for state in nodes] == sorted(state.index for state in nodes)
    else:
        racks = [state.node.labels.get("rack", "") for state in nodes]
        assert sum(a != b for a, b in pairwise(racks)) == len(set(racks)) - 1


@pytest.mark.thorough
@settings(max_examples=150, deadline=None)
@given(SERVERS, st.lists(gangs(), min_size=1, max_size=6), st.data())
def test_whatever_happens_members_are_whole_ports_unique_and_capacity_kept(
    servers: list[tuple[int, int, str, str, bool, int]], requests: list[Request], data: st.DataObject
) -> None:
    """A walk over grants, releases and releases of members; every state equals its replay and snapshot."""
    cluster, changes = built(servers), list[Change]()
    first = cluster.snapshot()
    for step, request in enumerate(requests * 2):
        made: list[Change] = []
        held = [*cluster.leases.values(), *cluster.remainders.values()]
        if bool(held) and data.draw(st.booleans()):
            lease = data.draw(st.sampled_from(held))
            ranks = data.draw(st.sets(st.sampled_from([rank for rank, _ in lease.ranked]), min_size=1))
            made = lease_steps.release_members(
                cluster, lease.lease_id, ranks, float(step), fencing_token=lease.fencing_token
            )
        elif f"g{step % 3}" not in cluster.leases:
            policy = POLICIES[data.draw(st.sampled_from(sorted(POLICIES)))]
            made = allocator.allocate(
                cluster, request.for_task(f"g{step % 3}"), SchedulingPass(policy, fifo, float(step))
            )
        for change in made:
            cluster.apply(change)
        changes += made
        allocator.check(cluster)
        ports = Counter(
            (member.node, member.port)
            for lease in (*cluster.leases.values(), *cluster.remainders.values())
            for member in lease.members
            if member.port
        )
        assert set(ports.values()) <= {1}
        for lease in cluster.leases.values():
            assert len(lease.members) == lease.request.nodes
    replayed = ClusterState.from_snapshot(first)
    for change in changes:
        replayed.apply(change)
    assert replayed.snapshot() == cluster.snapshot()
    assert ClusterState.from_snapshot(cluster.snapshot()).snapshot() == cluster.snapshot()


LENGTHS = st.integers(1, 9).map(float)


@st.composite
def queues(draw: st.DrawFn) -> tuple[list[tuple[str, int, float]], Request, list[Request]]:
    """Draw what servers hold and for how long, a pending gang, and the requests behind it."""
    held = [(name, draw(st.integers(1, 2)), draw(LENGTHS)) for name in "abc" if draw(st.booleans())]
    asked = st.tuples(st.integers(1, 3), st.integers(1, 2), LENGTHS)
    nodes, gpus, runtime_s = draw(asked.filter(lambda one: one[0] > 1))
    behind = [
        gang(f"behind {number}", *of[:2], expected_runtime_s=of[2])
        for number, of in enumerate(draw(st.lists(asked, max_size=5)))
    ]
    return held, gang("gang", nodes, gpus, expected_runtime_s=runtime_s), behind


def gang_started_at(held: list[tuple[str, int, float]], *waiting: Request) -> float:
    """Return when the gang starts if every lease ends as it said."""
    cluster, now = cluster_of("abc"), 0.0
    for name, gpus, runtime_s in held:
        start(cluster, Request(f"on {name}", gpus, required_node=name, expected_runtime_s=runtime_s))
    queue(cluster, *waiting)
    while True:
        ends = {
            lease.lease_id: lease.granted_at + (lease.request.expected_runtime_s or 0.0)
            for lease in cluster.leases.values()
        }
        for name in [name for name, end in ends.items() if end <= now]:
            cluster.apply(Released(name, cluster.leases[name].fencing_token, now))
        pass_over(cluster, "fifo+backfill", now)
        if "gang" in cluster.leases:
            return now
        now = min(end for end in ends.values() if end > now) if max(ends.values()) > now else now + 1.0


@settings(deadline=None)
@given(queues())
def test_nobody_behind_a_pending_gang_delays_it(
    drawn: tuple[list[tuple[str, int, float]], Request, list[Request]],
) -> None:
    held, asked, behind = drawn
    assert gang_started_at(held, asked, *behind) == gang_started_at(held, asked)
