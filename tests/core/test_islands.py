"""GPUs that NVLink joins: a request gets as few islands as possible, and breaks as few as possible."""

from __future__ import annotations

from itertools import chain, combinations

import pytest

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import pick_gpus
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Node, Request

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


def test_a_server_without_islands_gives_the_lowest_as_ever() -> None:
    gpus = tuple(Gpu(number) for number in range(4))
    plain, joined = Node("a", 0, {}, gpus), Node("b", 1, {}, gpus, islands=((0, 3), (1, 2)))
    cluster = ClusterState([plain, joined])
    assert cluster.by_name["a"].pick_gpus(Request("t", 2)) == (0, 1)
    assert cluster.by_name["b"].pick_gpus(Request("t", 2)) == (0, 3)
