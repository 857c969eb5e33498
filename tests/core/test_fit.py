"""One rule of fit: the fast path of `NodeState` and of backfill, `explain` and the grant agree with it."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import Short, could_ever_fit, fits, shortages, total_capacity
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.scheduling.backfill import Reservations
from resource_manager.scheduling.feasibility import verdict

TYPES = ["A100", "T4", ""]
VENDORS = ["nvidia", "amd"]
KINDS = st.tuples(st.sampled_from(TYPES), st.sampled_from(VENDORS))


@st.composite
def nodes(draw: st.DrawFn) -> Node:
    kinds = draw(st.lists(KINDS, max_size=4))
    gpus = tuple(Gpu(number, kind, vendor) for number, (kind, vendor) in enumerate(kinds))
    labels = draw(st.dictionaries(st.sampled_from("xy"), st.sampled_from("12")))
    return Node("a", 0, {"cpus": draw(st.integers(0, 8)), "gb": draw(st.floats(0, 8))}, gpus, labels=labels)


@st.composite
def requests(draw: st.DrawFn, lease_id: str = "t") -> Request:
    gpus, milli = draw(st.sampled_from([(0, 1000), (1, 1000), (2, 1000), (1, 250), (1, 700)]))
    return Request(
        lease_id,
        gpus,
        milli,
        draw(st.dictionaries(st.sampled_from(["cpus", "gb", "disk"]), st.integers(0, 6))),
        gpu_types=tuple(draw(st.lists(st.sampled_from(TYPES[:2]), max_size=2, unique=True))),
        vendor=draw(st.sampled_from(["", *VENDORS])),
        required_node=draw(st.sampled_from([None, None, "a", "b"])),
        labels_required=draw(st.dictionaries(st.sampled_from("xy"), st.sampled_from("12"), max_size=1)),
    )


@given(nodes(), st.lists(requests(), max_size=4), requests())
def test_every_path_agrees_with_the_rule(node: Node, held: list[Request], request: Request) -> None:
    cluster = ClusterState([node, Node("b", 1)])
    state = cluster.by_name["a"]
    for number, each in enumerate(held):
        if state.fits(each):
            lease = Lease(
                each.for_task(f"h{number}"), (Placement("a", state.pick_gpus(each)),), number + 1, 0.0
            )
            cluster.apply(Granted(lease, 0.0))
    free = state.capacity
    now = fits(node, request, free)
    assert now == state.fits(request) == verdict(state, request).fits
    assert now == (not list(shortages(node, request, free)))
    assert could_ever_fit(node, request) == fits(node, request, total_capacity(node))
    assert not now or could_ever_fit(node, request)
    if now:
        placement = Placement("a", state.pick_gpus(request))
        assert Reservations(cluster, 0.0).without_delay(request, placement) == placement
        with cluster.trial():
            cluster.apply(Granted(Lease(request, (placement,), 99, 0.0), 0.0))
    elif request.required_node in (None, "a"):
        words = verdict(state, request).reasons
        assert len(words) == len({(s.short, s.name) for s in shortages(node, request, free)})


def test_what_is_short_says_how_much() -> None:
    node = Node("a", 0, {"cpus": 8}, (Gpu(0, "T4"), Gpu(1, "T4")))
    (gpus, cpus) = shortages(node, Request("t", 4, resources={"cpus": 16}))
    assert (gpus.short, gpus.has, gpus.wants) == (Short.GPUS, 2, 4)
    assert (cpus.short, cpus.name, cpus.has, cpus.wants) == (Short.AMOUNT, "cpus", 8, 16)
    (kind,) = shortages(node, Request("t", 1, gpu_types=("A100",)))
    assert kind.short is Short.KIND
