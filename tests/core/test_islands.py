"""GPUs that NVLink joins: a request gets as few islands as possible, and breaks as few as possible."""

from __future__ import annotations

from dataclasses import replace
from itertools import chain, combinations

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import could_ever_fit, count_gpus, pick_gpus, total_capacity
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Link, Node, Placement, Request, Spread
from resource_manager.scheduling.placement.gang_slots import slots
from resource_manager.scheduling.placement.policies import POLICIES, get_policy, select_placement

SHAPES = {
    "two halves of four": ((0, 1, 2, 3), (4, 5, 6, 7)),
    "pairs": ((0, 1), (2, 3), (4, 5), (6, 7)),
    "one switch": (tuple(range(8)),),
    "a pair, and six alone": ((0, 1),),
}


def cost(taken: tuple[int, ...], free: tuple[int, ...], islands: tuple[tuple[int, ...], ...]) -> int:
    """Return the number of islands that the GPUs are of."""
    joined = set(chain.from_iterable(islands))
    alone = tuple((gpu_id,) for gpu_id in free if gpu_id not in joined)
    return sum(1 for island in (*islands, *alone) if set(island) & set(taken))


@pytest.mark.parametrize("islands", SHAPES.values(), ids=SHAPES)
def test_no_choice_is_of_fewer_islands(islands: tuple[tuple[int, ...], ...]) -> None:
    """Every set of free GPUs of a server of eight, every number of them, against all choices."""
    for free in chain.from_iterable(combinations(range(8), size) for size in range(1, 9)):
        milli = dict.fromkeys(free, MILLI_PER_GPU)
        for count in range(1, len(free) + 1):
            taken = pick_gpus(Request("t", count), list(free), milli, islands)
            assert len(set(taken)) == count
            assert set(taken) <= set(free)
            least = min(cost(choice, free, islands) for choice in combinations(free, count))
            assert cost(taken, free, islands) == least, (free, count, taken)


def test_what_is_broken_already_goes_first() -> None:
    pairs, milli = SHAPES["pairs"], dict.fromkeys(range(8), MILLI_PER_GPU)
    assert pick_gpus(Request("t", 1), [0, 1, 3, 4, 5], milli, pairs) == (3,)
    assert pick_gpus(Request("t", 3), [0, 1, 3, 4, 5], milli, pairs) == (0, 1, 3)
    halves = SHAPES["two halves of four"]
    assert pick_gpus(Request("t", 2), [0, 1, 2, 3, 6, 7], milli, halves) == (6, 7)


def test_a_request_takes_one_island_or_goes_by_number_where_it_says_so() -> None:
    pairs, milli = SHAPES["pairs"], dict.fromkeys(range(8), MILLI_PER_GPU)
    assert pick_gpus(Request("t", 2, link=Link.ANY), [1, 2, 3], milli, pairs) == (1, 2)
    node = Node("a", 0, {}, tuple(map(Gpu, range(4))), islands=((0, 1), (2, 3)))
    cluster = ClusterState([node])
    for number, gpu_id in enumerate((0, 2)):
        held = Lease(Request(f"held{gpu_id}", 1), (Placement("a", (gpu_id,)),), number + 1, 0.0)
        cluster.apply(Granted(held, 0.0))
    state, pair = cluster.by_name["a"], Request("t", 2, link=Link.REQUIRE)
    assert state.fits(replace(pair, link=Link.PREFER))
    assert not state.fits(pair)
    assert could_ever_fit(node, pair)
    assert count_gpus(node, pair, state.capacity) == 1
    assert state.fits(replace(pair, gpus=1)), "one GPU needs no link"
    assert not could_ever_fit(node, replace(pair, gpus=3))


@pytest.mark.parametrize("policy", POLICIES)
def test_every_policy_gives_gpus_of_one_island_where_that_is_required(policy: str) -> None:
    node = Node("a", 0, {}, tuple(map(Gpu, range(6))), islands=((0, 5), (1, 4), (2, 3)))
    cluster = ClusterState([node])
    for number in range(3):
        request = Request(f"t{number}", 2, link=Link.REQUIRE)
        place = select_placement(cluster, request, get_policy(policy))
        assert place is not None
        assert tuple(sorted(place.gpu_ids)) in node.islands
        cluster.apply(Granted(Lease(request, (place,), number + 1, 0.0), 0.0))


def test_members_of_a_gang_count_by_island() -> None:
    node = Node("a", 0, {}, tuple(map(Gpu, range(6))), "a", islands=((0, 1, 2), (3, 4, 5)))
    gang = Request("t", 2, nodes=3, spread=Spread.PACK, link=Link.REQUIRE)
    assert slots(node, gang, total_capacity(node)) == 2
    assert slots(node, replace(gang, link=Link.ANY), total_capacity(node)) == 3


def test_the_refusal_says_what_an_island_lacks() -> None:
    known = Node("a", 0, {"cpus": 8}, tuple(map(Gpu, range(4))), islands=((0, 1), (2, 3)))
    with GPUResourceManager.from_url("memory://", inventory=[known]) as manager:
        never = manager.allocate("t", 4, link="require")
        assert (
            str(never) == "no server could ever satisfy 4 GPUs of one island and 1 CPU: the largest, a, has 2"
        )
        for number in range(4):
            manager.allocate(f"held{number}", 1)
        manager.release("held0")
        manager.release("held2")
        now = manager.allocate("u", 2, link="require")
        assert str(now) == "no server with 2 GPUs of one island: largest free is 1 on a"
        [server] = manager.explain("u", 2, link="require")["servers"]
        assert server["reasons"] == ["1 of 2 GPUs of one island free, 2 requested"]
    unknown = Node("a", 0, {"cpus": 8}, (Gpu(0), Gpu(1)))
    with GPUResourceManager.from_url("memory://", inventory=[unknown]) as manager:
        never = manager.allocate("t", 2, link="require")
        assert str(never).endswith(": the inventory names no islands of such GPUs")


def test_a_server_without_islands_gives_the_lowest_as_ever() -> None:
    gpus = tuple(Gpu(number) for number in range(4))
    plain, joined = Node("a", 0, {}, gpus), Node("b", 1, {}, gpus, islands=((0, 3), (1, 2)))
    cluster = ClusterState([plain, joined])
    assert cluster.by_name["a"].pick_gpus(Request("t", 2)) == (0, 1)
    assert cluster.by_name["b"].pick_gpus(Request("t", 2)) == (0, 3)
