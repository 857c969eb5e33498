"""Accounts of teams follow the leases, through trials, changes of the inventory and snapshots."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resource_manager.core.changes import Granted, InventoryChanged, Released, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.team_ledger import gpu_types_of
from resource_manager.core.teams import Team, Teams
from tests.builders import hold, node

RULES = Teams((Team("research", 4), Team("vision", 2, parent="research"), Team("nlp", parent="research")))


def held(cluster: ClusterState) -> dict[str, int]:
    assert cluster.ledger is not None
    return {name: account.allocated for name, account in cluster.ledger.accounts.items() if account.allocated}


def grant(cluster: ClusterState, lease_id: str, team: str, *gpu_ids: int, **more: object) -> None:
    request = Request(lease_id, len(gpu_ids), team=team, **more)  # type: ignore[arg-type]
    hold(cluster, request, "a", *gpu_ids)


def test_what_a_team_holds_counts_for_those_above_it() -> None:
    cluster = ClusterState([node("a", 8)])
    cluster.apply(TeamsChanged(RULES, 0.0))
    grant(cluster, "x", "vision", 0, 1)
    grant(cluster, "y", "nlp", 2)
    grant(cluster, "half", "nlp", 3, gpu_milli=500)
    grant(cluster, "z", "unknown", 4)
    assert held(cluster) == {"research": 3500, "vision": 2000, "nlp": 1500, "": 1000}
    cluster.apply(Released("y", 2, 1.0))
    assert held(cluster) == {"research": 2500, "vision": 2000, "nlp": 500, "": 1000}


def test_the_accounts_count_leases_that_began_before_the_rules() -> None:
    cluster = ClusterState([node("a", 8)])
    grant(cluster, "x", "vision", 0, 1, preemptible=False, owner="kim")
    assert cluster.ledger is None
    cluster.apply(TeamsChanged(RULES, 0.0))
    assert cluster.ledger is not None
    account = cluster.ledger.accounts["vision"]
    assert (account.allocated, account.fixed, account.by_owner) == (2000, 2000, {"kim": 2000})
    again = ClusterState.from_snapshot(cluster.snapshot())
    assert held(again) == held(cluster)
    assert again.snapshot() == cluster.snapshot()


def test_a_trial_leaves_no_trace_in_the_accounts() -> None:
    cluster = ClusterState([node("a", 8)])
    cluster.apply(TeamsChanged(RULES, 0.0))
    grant(cluster, "x", "vision", 0)
    before = held(cluster)
    with cluster.trial():
        grant(cluster, "y", "vision", 1)
        cluster.apply(TeamsChanged(Teams((Team("nlp"),)), 1.0))
        grant(cluster, "z", "nlp", 2)
        cluster.apply(Released("x", 1, 1.0))
        assert held(cluster) == {"nlp": 1000, "": 1000}
    assert held(cluster) == before
    assert cluster.teams == RULES


def test_types_are_those_of_the_gpus_that_are_held() -> None:
    typed = Teams((Team("vision", 2, {"A100": 2}),))
    mixed = Node("a", 0, {}, (Gpu(0, "A100"), Gpu(1, "H100"), Gpu(2, "H100")))
    cluster = ClusterState([mixed])
    cluster.apply(TeamsChanged(typed, 0.0))
    grant(cluster, "x", "vision", 0, 1)
    assert cluster.ledger is not None
    assert cluster.ledger.accounts["vision"].by_type == {"A100": 1000, "H100": 1000}
    corrected = Node("a", 0, {}, (Gpu(0, "A100"), Gpu(1, "A100"), Gpu(2, "H100")))
    cluster.apply(InventoryChanged((corrected,), 1.0))
    assert cluster.ledger.accounts["vision"].by_type == {"A100": 2000}
    cluster.apply(Released("x", 1, 2.0))
    assert not any(cluster.ledger.accounts["vision"].by_type.values())


def test_types_are_those_of_the_devices_of_the_grant_whatever_their_numbers_become() -> None:
    a100, h100 = Gpu(0, "A100", uuid="GPU-a"), Gpu(1, "H100", uuid="GPU-h")
    cluster = ClusterState([Node("a", 0, {}, (a100, h100))])
    cluster.apply(TeamsChanged(Teams((Team("vision", 2, {"H100": 1}),)), 0.0))
    lease = Lease(Request("x", 1, team="vision"), (Placement("a", (1,), ("GPU-h",)),), 1, 0.0)
    cluster.apply(Granted(lease, 0.0))
    swapped = (replace(h100, gpu_id=0), replace(a100, gpu_id=1))
    cluster.apply(InventoryChanged((Node("a", 0, {}, swapped),), 1.0))
    assert cluster.ledger is not None
    assert cluster.ledger.accounts["vision"].by_type == {"H100": 1000}
    gone = (a100, replace(h100, uuid="GPU-other"))
    cluster.apply(InventoryChanged((Node("a", 0, {}, gone),), 2.0))
    assert cluster.ledger.accounts["vision"].by_type == {"": 1000}


@pytest.mark.parametrize(
    ("before", "after", "types"),
    [
        (("A100", "A100"), ("A100",), {"A100": 2000}),
        (("A100", "H100", "H100"), ("A100", "A100"), {"A100": 3000}),
        (("A100", "H100", "A100"), ("A100", "H100"), {"A100": 1000, "H100": 1000, "": 1000}),
    ],
)
def test_a_held_gpu_that_the_inventory_lost_counts_on_as_the_one_type_of_its_server(
    before: tuple[str, ...], after: tuple[str, ...], types: dict[str, int]
) -> None:
    def server(gpu_types: tuple[str, ...]) -> Node:
        return Node("a", 0, {}, tuple(Gpu(i, gpu_type) for i, gpu_type in enumerate(gpu_types)))

    cluster = ClusterState([server(before)])
    cluster.apply(TeamsChanged(Teams((Team("vision", 2, {"A100": 2}),)), 0.0))
    grant(cluster, "x", "vision", *range(len(before)))
    cluster.apply(InventoryChanged((server(after),), 1.0))
    assert gpu_types_of(cluster.leases["x"], cluster.by_name) == types


def test_without_rules_nothing_is_counted() -> None:
    cluster = ClusterState([node("a", 8)])
    cluster.apply(TeamsChanged(RULES, 0.0))
    cluster.apply(TeamsChanged(Teams(), 0.0))
    assert cluster.ledger is None
    assert cluster.snapshot().teams == Teams()
