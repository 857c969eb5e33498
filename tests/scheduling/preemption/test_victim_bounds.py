"""Bounds of what preemption frees: they exclude no request with victims, and change no decision."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import Drained, InventoryChanged, Quarantined, Renewed, Resumed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.core.pending import PendingRequest, kind_of
from resource_manager.core.teams import Team
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.preemption.victim_bounds import VictimBounds
from resource_manager.scheduling.preemption.victim_right import Planned
from resource_manager.scheduling.preemption.victims import find_victims
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.scheduling.shared_cluster import GREEDY, Shared

TEAMS = ("p", "q", "r", "s")
TYPES = ("A100", "H100")

requests = st.builds(
    Request,
    st.just("new"),
    st.integers(0, 4),
    resources=st.builds(lambda cpus: {"cpus": cpus}, st.sampled_from([1, 8, 20.5])),
    team=st.sampled_from(TEAMS),
    priority=st.integers(0, 2),
    preemptible=st.integers(0, 5).map(bool),
    gpu_types=st.sampled_from([(), (), ("A100",)]),
    required_node=st.sampled_from([None, None, None, "a"]),
    expected_runtime_s=st.just(1e6),
    preempt_grace_s=st.just(5.0),
    owner=st.sampled_from(["", "kim"]),
)
fractions = st.builds(
    replace, requests, gpus=st.just(1), gpu_milli=st.sampled_from([300, 500, 800]), nodes=st.just(1)
)
gangs = st.builds(replace, requests, gpus=st.integers(1, 3), nodes=st.integers(2, 3))
asked = requests | fractions | gangs


@st.composite
def clusters(draw: st.DrawFn) -> Shared:
    """Return a cluster of three servers of a tree of teams, before anything was asked for."""
    tops = [
        Team(name, draw(st.integers(0, 6)), limit=draw(st.sampled_from([None, None, 8]))) for name in "pq"
    ]
    typed = {"A100": draw(st.integers(0, 2)), "H100": draw(st.integers(0, 2))}
    below = [Team("r", draw(st.integers(0, 4)), parent="p"), Team("s", sum(typed.values()), typed)]
    shared = Shared(*tops, *below, order=GREEDY, min_runtime_s=draw(st.sampled_from([0.0, 20.0])))
    servers = tuple(
        Node(name, number, {"cpus": 24}, tuple(Gpu(i, TYPES[number % 2]) for i in range(4)), name)
        for number, name in enumerate("abc")
    )
    shared.do([InventoryChanged(servers, shared.now)])
    return shared


def step(shared: Shared, draw: Callable[[st.SearchStrategy[Any]], Any], number: int) -> None:
    """Do something that may happen to a cluster."""
    leases = sorted(shared.state.leases)
    match draw(st.integers(0, 7)):
        case 0 if leases:
            shared.release(draw(st.sampled_from(leases)), "SUCCESS")
        case 1 if shared.state.preempting:
            shared.release(sorted(shared.state.preempting)[0])
        case 2 if leases:
            lease = shared.state.leases[draw(st.sampled_from(leases))]
            shared.do([Renewed(lease.lease_id, lease.fencing_token, shared.now, checkpoint_at=shared.now)])
        case 3 if leases:
            lease = shared.state.leases[draw(st.sampled_from(leases))]
            shared.do([Quarantined(lease.lease_id, lease.fencing_token, shared.now)])
        case 4:
            is_open = shared.state.by_name["c"].is_open
            shared.do([Drained("c", shared.now) if is_open else Resumed("c", shared.now)])
        case 5:
            shared.tick(draw(st.sampled_from([1.0, 15.0])))
        case _:
            shared.now += 1.0
            request = draw(asked).for_task(f"t{number}")
            queued = allocator.enqueue(shared.state, [request], shared.now)
            shared.do(
                allocator.with_dispatch(shared.state, queued, SchedulingPass(first_fit, GREEDY, shared.now))
            )


@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_bounds_exclude_has_no_victims(data: st.DataObject) -> None:
    shared = data.draw(clusters())
    for number in range(data.draw(st.integers(1, 12))):
        step(shared, data.draw, number)
        request = data.draw(asked)
        pending = PendingRequest(request, 0.0, 999)
        bounds = VictimBounds.of(shared.state, shared.now)
        if bounds.exclude(kind_of(request), request, Planned(shared.state)):
            assert find_victims(shared.state, pending, SchedulingPass(first_fit, GREEDY, shared.now)) == []


@pytest.mark.thorough
@given(st.data())
@settings(max_examples=60, deadline=None)
def test_what_is_remembered_changes_no_decision(data: st.DataObject) -> None:
    """A process that has just started decides as one that has followed all changes."""
    shared = data.draw(clusters())
    for number in range(data.draw(st.integers(1, 12))):
        step(shared, data.draw, number)
        at = shared.now + data.draw(st.sampled_from([0.0, 3.0, 25.0]))
        fresh = ClusterState.from_snapshot(shared.state.snapshot())
        here, there = (
            allocator.schedule_pending(cluster, SchedulingPass(first_fit, GREEDY, at))
            for cluster in (shared.state, fresh)
        )
        assert here == there
