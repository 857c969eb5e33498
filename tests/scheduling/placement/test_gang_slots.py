"""How many members nodes can take, and whether a gang could ever start."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

from resource_manager.core.changes import (
    Drained,
    GpuClosed,
    GpuOpened,
    InventoryChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Link, Node, Request, Spread
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.gang_slots import (
    Prospects,
    could_ever_mask,
    could_start,
    slots,
    takes_ever,
)
from tests.scheduling.placement.test_gangs import (
    cluster_of,
    drawn_gang,
    drawn_node,
    gang,
    members_one_by_one,
    places,
    server,
    start,
)


def test_packed_members_share_servers() -> None:
    cluster = cluster_of("ab", gpus=8)
    lease = start(cluster, gang("g", 3, 4, spread=Spread.PACK))
    assert places(lease) == "aab"
    allocator.check(cluster)
    assert lease is not None
    assert [member.gpu_ids for member in lease.members] == [(0, 1, 2, 3), (4, 5, 6, 7), (0, 1, 2, 3)]
    assert places(start(cluster, gang("cpus", 2, 0, resources={"cpus": 4}, spread=Spread.PACK))) == "aa"
    assert places(start(cluster, gang("more", 3, 0, resources={"cpus": 4}, spread=Spread.PACK))) == ""
    for lease_id in ("g", "cpus"):
        for change in lease_steps.release(cluster, lease_id, 1.0):
            cluster.apply(change)
    assert cluster.snapshot().leases == ()
    assert [state.free for state in cluster.nodes] == [{"cpus": 8}, {"cpus": 8}]
    assert all(state.whole_free == 8 for state in cluster.nodes)


def test_fractions_are_packed_on_gpus() -> None:
    cluster = cluster_of("a", gpus=2)
    lease = start(cluster, gang("g", 4, 1, gpu_milli=400, spread=Spread.PACK))
    assert lease is not None
    assert Counter(member.gpu_ids for member in lease.members) == {(0,): 2, (1,): 2}
    assert start(cluster, gang("h", 1, 1, gpu_milli=400, spread=Spread.PACK)) is None


def test_a_server_that_left_the_inventory_makes_no_gang_possible() -> None:
    cluster = cluster_of("ab")
    start(cluster, Request("stays", 1, required_node="b"))
    cluster.apply(InventoryChanged((cluster.nodes[0].node,), 0.0))
    assert [state.retired for state in cluster.nodes] == [False, True]
    assert not takes_ever(cluster, gang("g", 2, 1), 0b11)


def test_what_gangs_could_start_on_is_what_each_server_could_take() -> None:
    """Seeded servers and gangs, also after a change of the inventory; some of each kind can, some cannot."""
    found: Counter[tuple[bool, ...]] = Counter()
    for seed in range(40):
        draw = Random(seed)
        cluster = ClusterState()
        for _ in range(2):
            cluster.apply(InventoryChanged(tuple(drawn_node(draw, number) for number in range(5)), 0.0))
            for name in cluster.by_name:
                if draw.random() < 0.3:
                    cluster.apply(GpuClosed(name, draw.randrange(3), "", "xid 79", 0.0))
            cluster.apply(Drained(f"s{draw.randrange(5)}", 0.0))
            prospects = Prospects(cluster)
            for _ in range(12):
                request = drawn_gang(draw)
                taken: Counter[str | None] = Counter()
                for state in cluster.nodes:
                    free, member = state.capacity_without_leases, replace(request, required_node=None)
                    count = members_one_by_one(state.node, member, free)
                    assert slots(state.node, member, free) == count
                    is_asked = request.required_node in (None, state.name)
                    if is_asked and state.is_open and state.node.address:
                        taken[state.node.labels.get("rack") if request.same else ""] += count
                del taken[None]
                expected = max(taken.values(), default=0) >= request.nodes
                assert bool(prospects.usable(request)) == expected
                found[expected, request.spread is Spread.PACK, bool(request.same)] += 1
    assert len(found) == 8


def test_a_gpu_that_opens_again_counts_for_who_could_start() -> None:
    cluster = cluster_of("a")
    request = Request("r", 2)
    cluster.apply(GpuClosed("a", 0, "", "xid 79", 0.0))
    assert not could_start(cluster, request)
    cluster.apply(GpuOpened("a", 0, 1.0))
    assert could_start(cluster, request)


def test_servers_with_other_islands_are_of_another_kind() -> None:
    def joined(name: str, number: int, *islands: tuple[int, ...]) -> Node:
        return server(name, number, 4, islands=islands)

    linked = Request("r", 4, link=Link.REQUIRE)
    for names in ("ab", "ba"):
        cluster = ClusterState(
            joined(name, number, *(((0, 1, 2, 3),) if name == "a" else ((0, 1), (2, 3))))
            for number, name in enumerate(names)
        )
        assert could_ever_mask(cluster, linked) == 1 << names.index("a")
        assert Prospects(cluster).usable(linked) == 1 << names.index("a")
