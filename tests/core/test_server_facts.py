"""Grounds against servers: closed, never, and not now."""

from __future__ import annotations

from resource_manager.core.changes import (
    AgentLost,
    Drained,
    InventoryChanged,
    Quarantined,
    Queued,
)
from resource_manager.core.models import Request
from resource_manager.core.refusal import RefusalKind
from resource_manager.manager.explanations import explanation
from resource_manager.manager.refusal_wording import (
    detail_of,
    reasons_of,
)
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.reasons.feasibility import explain, standings
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.core.test_refusal import FIFO, FIRST_FIT, cluster_of, hold, reason, server


def test_a_retired_server_never_takes_it() -> None:
    cluster = cluster_of(server("s1", 1, 2), server("s2", 2, 8))
    hold(cluster, "a", "s2", 1)
    cluster.apply(InventoryChanged((server("s1", 1, 2),), 2.0))
    request = Request("t", 8)
    answer = explanation(cluster, request, SchedulingPass(FIRST_FIT, FIFO, 3.0))
    assert (answer["kind"], answer["could_ever_fit"]) == ("never_fits", False)
    assert [row["could_fit"] for row in answer["servers"]] == [False, False]


def test_closed_servers_do_not_count_as_free_and_are_named() -> None:
    cluster = cluster_of(server("s1", 1, 4), server("s3", 3, 8))
    cluster.apply(Drained("s3", 0.0, "broken fan"))
    assert reason(cluster, Request("t", 8)) == ("maintenance", "s3 has 8 free but is drained: broken fan")
    hold(cluster, "a", "s1", 2)
    assert reason(cluster, Request("t", 4)) == (
        "no_capacity",
        "no server with 4 GPUs: largest free is 2 on s1; s3 has 8 free but is drained: broken fan",
    )
    cluster.apply(Drained("s3", 0.0, failed=True))
    assert reason(cluster, Request("t", 8))[1] == "s3 has 8 free but is marked as failed"
    assert reason(cluster, Request("t", resources={"cpus": 64}, required_node="s3"))[1] == (
        "s3 could take it but is marked as failed"
    )


def test_a_silent_server_is_missing_capacity_that_an_operator_need_not_give_back() -> None:
    cluster = cluster_of(server("s1", 0, gpus=2), server("s2", 1), server("s3", 2))
    cluster.apply(Drained("s2", 50.0, "fan"))
    cluster.apply(AgentLost("s3", 100.0, 39.5))
    assert reason(cluster, Request("t", 8, required_node="s3")) == (
        "no_capacity",
        "s3 has 8 free but has been silent since 1970-01-01T00:00Z",
    )
    assert reason(cluster, Request("t", 4)) == (
        "no_capacity",
        "s2 has 8 free but is drained: fan; s3 has 8 free but has been silent since 1970-01-01T00:00Z",
    )
    cluster.apply(Drained("s3", 110.0, "its disk"))
    assert reason(cluster, Request("t", 4, required_node="s3"))[1] == "s3 has 8 free but is drained: its disk"
    [_, _, verdict] = explain(cluster, Request("t", 4))
    assert reasons_of(verdict.reasons, Request("t", 4)) == [
        "drained: its disk",
        "has been silent since 1970-01-01T00:00Z",
    ]


def test_a_quarantined_lease_is_named_if_its_release_would_help() -> None:
    cluster = cluster_of(server("s1", 1))
    hold(cluster, "lost", "s1", 4)
    hold(cluster, "runs", "s1", 2)
    cluster.apply(Quarantined("lost", 1, 5.0))
    assert reason(cluster, Request("t", 6)) == (
        "awaiting_release",
        "no server with 6 GPUs: largest free is 2 on s1; lost bbbb on s1 is quarantined, since its job may "
        "still run: release the lease once the job is known to be gone",
    )
    assert reason(cluster, Request("t", 8))[0] == "no_capacity"


def test_a_request_that_never_fits_names_the_largest_server() -> None:
    cluster = cluster_of(server("s1", 1, 2, "A100"), server("s2", 2, 8, "V100"))
    for request, detail in (
        (
            Request("t", 4, gpu_types=("A100",)),
            "no server could ever satisfy 4 A100: the largest, s1, has 2",
        ),
        (
            Request("t", 1, gpu_types=("H900",), resources={"cpus": 1}),
            "no server has an H900: the nearest is V100 or A100",
        ),
        (
            Request("t", 2, gpu_types=("T4", "L4")),
            "no server has a T4 or L4: the nearest is V100 or A100",
        ),
        (Request("t", 1, gpu_types=("v100",)), "no server has a v100: did you mean V100?"),
        (Request("t", 1, gpu_types=("A10O",)), "no server has an A10O: the nearest is A100 or V100"),
        (Request("t", 1, vendor="amd"), "no server has a GPU by amd"),
        (Request("t", 1, gpu_types=("A100",), vendor="amd"), "no server has an A100 by amd"),
        (Request("t", 9), "no server could ever satisfy 9 GPUs: the largest, s2, has 8"),
        (
            Request("t", 1, resources={"ram": 5}),
            "no server could ever satisfy 1 GPU and 5 ram: the most ram is 0 on s1",
        ),
        (
            Request("t", 4, gpu_types=("A100",), required_node="s1"),
            "s1 could never satisfy 4 A100: it has 2",
        ),
        (
            Request("t", 1, gpu_types=("V100",), required_node="s1"),
            "s1 has no V100: the nearest is A100",
        ),
    ):
        assert reason(cluster, request) == ("never_fits", detail)
    cluster = cluster_of(server("s1", 1, 8, "A100-SXM4-80GB"), server("s2", 2, 8, "T4"))
    said = "no server has an A100: did you mean A100-SXM4-80GB?"
    assert reason(cluster, Request("t", 1, gpu_types=("A100",))) == ("never_fits", said)
    cluster = cluster_of(server("s1", 1, 8, cpus=16), server("s2", 2, 2, cpus=64))
    for request, detail in (
        (Request("t", 8, resources={"cpus": 60}), "no server has both 8 GPUs and 60 CPUs"),
        (
            Request("t", 8, resources={"cpus": 60, "ram": 0}),
            "no server has 8 GPUs, 60 CPUs and 0 ram",
        ),
    ):
        assert reason(cluster, request) == ("never_fits", detail)
    assert reason(cluster_of(), Request("t", 1)) == (
        "never_fits",
        "no server could ever satisfy 1 GPU: the inventory has no server",
    )
    assert never_fits(cluster, Request("t", 8)) is None


def test_a_pending_request_whose_only_server_left_never_fits() -> None:
    cluster = cluster_of(server("s1", 1), server("s2", 2))
    hold(cluster, "a", "s2", 8)
    cluster.apply(Queued(Request("t", 8, required_node="s2"), 1.0, 1, 1.0))
    cluster.apply(InventoryChanged((server("s1", 1),), 2.0))
    (standing,) = standings(cluster, SchedulingPass(FIRST_FIT, FIFO, 3.0))
    assert standing.refusal.kind is RefusalKind.NEVER_FITS
    assert detail_of(standing.refusal) == "no server could ever satisfy 8 GPUs: s2 left the inventory"
