"""Refusals of gangs: one line that says how many servers fit, what the next lacks, or why it never fits."""

from __future__ import annotations

from typing import Any

import pytest

from resource_manager.core.changes import AgentLost, Drained, GpuClosed, Quarantined
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request, Spread
from resource_manager.core.refusal import RefusalKind
from resource_manager.core.server_facts import NoAddress
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling.placement.gang_slots import could_start
from resource_manager.scheduling.placement.policies import POLICIES
from resource_manager.scheduling.queue.orders import get_order
from resource_manager.scheduling.reasons.capacity_grounds import never_fits, no_capacity
from resource_manager.scheduling.reasons.feasibility import explain, refusals_of
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.scheduling.placement.test_gangs import cluster_of, gang, server, start

PACK = Spread.PACK


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"nodes": 5}, "a gang of 5 needs 5 servers with 2 GPUs: the inventory has 4"),
        ({"nodes": 9, "spread": PACK, "gpus": 1}, "a gang of 9 needs 9 times 1 GPU: the inventory has 8"),
        (
            {"nodes": 2, "same": "zone"},
            "no server has the label zone, which the servers of the gang must share",
        ),
        (
            {"nodes": 4, "same": "rack"},
            "a gang of 4 needs 4 servers with 2 GPUs in one rack: the largest, rack=0, has 3",
        ),
        (
            {"nodes": 2, "required_node": "a"},
            "a gang of 2 needs 2 servers, and the request is for a only: leave the server out, or ask for "
            "spread pack",
        ),
        ({"nodes": 2, "gpus": 3}, "no server could ever satisfy 3 GPUs: the largest, a, has 2"),
        ({"nodes": 2, "labels_required": {"zone": "x"}}, "no server has zone=x as its label"),
    ],
)
def test_a_gang_that_never_fits_is_refused_in_the_users_words(asked: dict[str, Any], said: str) -> None:
    cluster = cluster_of("abc", "d")
    request = Request("g", **{"gpus": 2, **asked})
    refusal = never_fits(cluster, request)
    assert refusal is not None
    assert (refusal.kind, detail_of(refusal)) == (RefusalKind.NEVER_FITS, said)
    assert not could_start(cluster, request)


def test_servers_without_an_address_are_named() -> None:
    bare = [Node(name, number, {"cpus": 8}, (Gpu(0), Gpu(1))) for number, name in enumerate("xy")]
    said = never_fits(ClusterState([*bare, server("a", 5)]), gang("g", 2))
    assert said is not None
    assert detail_of(said) == (
        "each server of a gang needs an address in the inventory, and 2 of the 3 that could take it "
        "have none, such as x"
    )
    verdicts = explain(ClusterState([*bare, server("a", 5)]), gang("g", 2))
    assert [(verdict.fits, verdict.could_fit) for verdict in verdicts] == [(False,) * 2] * 2 + [(True,) * 2]
    assert verdicts[0].reasons == (NoAddress(),)


def test_a_gang_that_waits_knows_how_many_servers_fit_and_what_the_next_lacks() -> None:
    cluster = cluster_of("abc", "de")
    start(cluster, Request("single", 1))
    assert detail_of(no_capacity(cluster, gang("g", 5))) == (
        "4 of the 5 servers needed have 2 GPUs free; the next, a: 1 GPU free"
    )
    assert detail_of(no_capacity(cluster, gang("g", 3, same="rack"))) == (
        "2 of the 3 servers needed have 2 GPUs free in rack=0; the next, a: 1 GPU free"
    )
    start(cluster, Request("cpus", 0, resources={"cpus": 5}))
    assert detail_of(no_capacity(cluster, gang("g", 5, 1, resources={"cpus": 8}))) == (
        "4 of the 5 servers needed have 1 GPU and 8 CPUs free; the next, a: 3 CPUs free"
    )


def test_drained_servers_and_quarantined_leases_are_said_to_be_in_the_way() -> None:
    cluster = cluster_of("ab")
    start(cluster, Request("old", 1, quarantine=True))
    cluster.apply(Quarantined("old", 1, 5.0))
    refusal = no_capacity(cluster, gang("g", 2))
    assert (refusal.kind, "release the lease once" in detail_of(refusal)) == (
        RefusalKind.AWAITING_RELEASE,
        True,
    )
    cluster.apply(Drained("b", 6.0, "fan"))
    refusal = no_capacity(cluster, gang("g", 2))
    assert (refusal.kind, detail_of(refusal)) == (
        RefusalKind.MAINTENANCE,
        "0 of the 2 servers needed have 2 GPUs free; b has 2 free but is drained: fan",
    )


def test_a_silent_server_keeps_a_gang_waiting_for_capacity() -> None:
    cluster = cluster_of("ab")
    cluster.apply(AgentLost("b", 66.0, 6.0))
    refusal = no_capacity(cluster, gang("g", 2))
    assert (refusal.kind, detail_of(refusal)) == (
        RefusalKind.NO_CAPACITY,
        "1 of the 2 servers needed has 2 GPUs free; b has 2 free but has been silent since 1970-01-01T00:00Z",
    )


def test_used_up_ports_are_the_reason() -> None:
    cluster = cluster_of("ab", gpus=8, gang_ports=(7000, 7000))
    start(cluster, gang("g", 2, 1))
    assert detail_of(no_capacity(cluster, gang("h", 2, 1))) == (
        "2 of the 2 servers needed have 1 GPU free, but all gang_ports of a (7000 to 7000) are in use"
    )


def test_every_pending_gang_has_a_reason() -> None:
    cluster = cluster_of("ab", gpus=8, gang_ports=(7000, 7000))
    start(cluster, gang("g", 2, 1))
    order, policy = get_order("fifo"), POLICIES["first_fit"]
    for request, kind in (
        (gang("h", 2, 1), RefusalKind.NO_CAPACITY),
        (gang("h", 3, 1), RefusalKind.NEVER_FITS),
    ):
        assert refusals_of(cluster, [request], SchedulingPass(policy, order, 1.0))["h"].kind is kind


def test_a_server_with_a_closed_gpu_counts_among_those_with_free_ones() -> None:
    """It said that none was free anywhere, with three on the server that has a closed one."""
    nodes = [Node(name, number, {"cpus": 8}, tuple(map(Gpu, range(4)))) for number, name in enumerate("ab")]
    cluster = ClusterState(nodes)
    start(cluster, Request("all", 4))
    closed = cluster.by_name["b"]
    cluster.apply(GpuClosed("b", 2, "", "new fan", 1.0))
    assert closed.closed_gpus
    assert detail_of(no_capacity(cluster, Request("r", 4))) == (
        "no server with 4 GPUs: largest free is 3 on b; on b GPU 2 is closed: new fan"
    )


@pytest.mark.parametrize("more", [{}, {"spread": Spread.PACK, "gpus": 1, "nodes": 4}])
def test_a_closed_gpu_keeps_a_gang_waiting_as_it_does_a_request_of_one_server(more: dict[str, Any]) -> None:
    cluster = cluster_of("abc"[: 2 + (not more)])
    if not more:
        cluster.apply(Drained("c", 0.0))
    cluster.apply(GpuClosed("b", 1, "", "new fan", 1.0))
    refusal = no_capacity(cluster, Request("g", **{"gpus": 2, "nodes": 2, **more}))
    assert refusal.kind is RefusalKind.MAINTENANCE
    assert "b has 1 free but GPU 1 is closed: new fan" in detail_of(refusal)
    assert ("c has 2 free but is drained" in detail_of(refusal)) == (not more)
