"""Timelines of free capacity: by leases alone, with reservations, and kept until a change touches them."""

from __future__ import annotations

import math
from dataclasses import replace

from resource_manager.core.changes import Drained, Released, Resumed, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.runtimes import LearntRuntimes
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling.queue.lease_timelines import LeaseTimelines, Reservation, Timeline
from tests.builders import hold, node, nodes


def ask(lease_id: str, gpus: int, runtime_s: float | None = None) -> Request:
    return Request(lease_id, gpus, expected_runtime_s=runtime_s)


def busy() -> ClusterState:
    """Node a with 4 GPUs: two are held until 100, one until 200, one is free; node b is full for ever."""
    cluster = ClusterState(nodes("ab", 4))
    hold(cluster, ask("long", 1, 200.0), "a", 0)
    hold(cluster, ask("short", 2, 100.0), "a", 1, 2)
    hold(cluster, ask("endless", 4), "b", 0, 1, 2, 3)
    return cluster


def timeline(cluster: ClusterState, name: str = "a") -> Timeline:
    return LeaseTimelines.of(cluster).of_position(cluster.by_name[name].index)


def test_room_is_there_once_enough_leases_have_ended() -> None:
    a, b = timeline(busy()), timeline(busy(), "b")
    assert [a.has_room_from(ask("t", gpus)) for gpus in (1, 2, 3, 4)] == [-math.inf, 100.0, 100.0, 200.0]
    assert b.has_room_from(ask("t", 1)) == math.inf


def test_a_reservation_leaves_its_gpus_before_and_after_it() -> None:
    a = timeline(busy()).with_(Reservation(ask("r", 3), 50.0, 0, 100.0, 0, (1, 2, 3)))
    assert a.earliest(ask("t", 1), 90.0, 10.0) == 10.0
    assert a.earliest(ask("t", 1), 91.0, 10.0) == 150.0
    assert a.earliest(ask("t", 4), 10.0, 10.0, until=150.0) == math.inf
    assert a.earliest(ask("t", 4), 10.0, 10.0) == 200.0
    assert a.earliest(ask("t", 4), 10.0, 250.0) == 250.0, "what was answered before is of the past"
    assert a.earliest(ask("t", 4), 10.0, 10.0) == 200.0, "and this of a later time"


def test_only_what_a_change_touches_is_made_again() -> None:
    cluster = busy()
    a, b = timeline(cluster), timeline(cluster, "b")
    with cluster.trial():
        cluster.apply(Released("long", 1, 10.0))
        assert timeline(cluster).has_room_from(ask("t", 4)) == 100.0
    assert timeline(cluster).has_room_from(ask("t", 4)) == 200.0
    assert timeline(cluster, "b") is b
    again = timeline(cluster)
    cluster.note_changed(0)
    assert timeline(cluster) is again is not a


def test_a_runtime_that_is_learnt_changes_the_end_of_the_leases_of_its_class() -> None:
    cluster = ClusterState([node("a", 2), node("b", 2)])
    hold(cluster, ask("train_1", 2), "a", 0, 1)
    hold(cluster, ask("train_2", 2), "b", 0, 1)
    assert timeline(cluster).has_room_from(ask("t", 1)) == math.inf
    with cluster.trial():
        cluster.apply(Released("train_2", 2, 60.0, "SUCCESS"))
        assert timeline(cluster).has_room_from(ask("t", 1)) == 60.0
    assert timeline(cluster).has_room_from(ask("t", 1)) == math.inf
    cluster.runtimes = LearntRuntimes({"train_#": (30.0,)})
    assert timeline(ClusterState.from_snapshot(cluster.snapshot())).has_room_from(ask("t", 1)) == 30.0


def test_a_lease_ends_at_a_limit_of_its_request_or_team_and_by_new_rules_at_once() -> None:
    """Behind a job of unknown runtime that must end within hours, what it has was taken for busy for ever."""
    cluster = ClusterState([node("a", 2)])
    hold(cluster, replace(ask("turns", 1, 900.0), requeue_after_s=100.0), "a", 0)
    hold(cluster, replace(ask("unknown", 1), team="x"), "a", 1)
    for limit_s in (None, 500.0, 300.0):
        cluster.apply(TeamsChanged(Teams((Team("x", max_runtime_s=limit_s),)), 0.0))
        rooms = [timeline(cluster).has_room_from(ask("t", gpus)) for gpus in (1, 2)]
        assert rooms == [100.0, limit_s or math.inf]


def test_rooms_are_those_of_open_nodes_the_earliest_first() -> None:
    cluster = busy()
    asked = ask("t", 2)
    assert list(LeaseTimelines.of(cluster).rooms(asked)) == [(100.0, 0)]
    cluster.apply(Released("endless", 3, 5.0))
    assert list(LeaseTimelines.of(cluster).rooms(asked)) == [(-math.inf, 1), (100.0, 0)]
    cluster.apply(Drained("b", 6.0))
    assert list(LeaseTimelines.of(cluster).rooms(asked)) == [(100.0, 0)]
    cluster.apply(Resumed("b", 7.0))
    assert list(LeaseTimelines.of(cluster).rooms(asked)) == [(-math.inf, 1), (100.0, 0)]
