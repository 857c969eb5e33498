"""The state before a recorded history, as far as the changes reveal it."""

from __future__ import annotations

from resource_manager.core.changes import AgentLost, AgentSeen, Change, Granted, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.storage.history_file import before_changes
from tests.builders import nodes


def test_an_agent_that_was_silent_before_is_silent_in_the_state_before() -> None:
    cluster = ClusterState(nodes("abcd"))
    steps: list[Change] = [
        *(AgentSeen(name, 1.0) for name in "abc"),
        AgentLost("a", 70.0, 10.0),
        AgentLost("b", 80.0, 20.0),
        AgentSeen("b", 90.0),
        AgentLost("c", 95.0, 35.0),
    ]
    for step in steps:
        cluster.apply(step)
    before = before_changes(cluster.snapshot(), steps[5:]).before
    assert (before.watched, before.silent) == (("a", "c"), (AgentLost("a", 70.0, 10.0),))


def test_a_start_that_failed_before_is_remembered_in_the_state_before() -> None:
    cluster = ClusterState(nodes("ab", gpus=1))
    steps: list[Change] = []
    for token, at in enumerate((10.0, 20.0), start=1):
        lease = Lease(Request("t", 1), (Placement("a", (0,)),), token, at - 1)
        steps += [Granted(lease, at - 1), Released("t", token, at, failed_nodes=("a",))]
    for step in steps:
        cluster.apply(step)
    before = before_changes(cluster.snapshot(), steps[2:]).before
    assert before.failed_starts == (steps[1],)
