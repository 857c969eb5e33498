"""The state before a recorded history, as far as the changes reveal it."""

from __future__ import annotations

from collections.abc import Iterator

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Change,
    Granted,
    Quarantined,
    Released,
    Renewed,
)
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


def test_what_a_preempted_job_had_left_was_not_learnt_and_takes_back_nothing() -> None:
    cluster = ClusterState(nodes("a", gpus=1))
    steps: list[Change] = []
    for token, labels in enumerate(({}, {"restart_count": "1"}), start=1):
        lease = Lease(Request("train_1", 1, labels=labels), (Placement("a", (0,)),), token, 0.0)
        steps += [Granted(lease, 0.0), Released("train_1", token, 60.0, "SUCCESS")]
    cluster.apply(*steps)
    assert before_changes(cluster.snapshot(), steps[2:]).before.runtimes == {"train_#": (60.0,)}


class Counted(list[Change]):
    """Changes that count how often they are gone through."""

    times = 0

    def __iter__(self) -> Iterator[Change]:
        self.times += 1
        return super().__iter__()

    def __contains__(self, change: object) -> bool:
        self.times += 1
        return super().__contains__(change)


def test_a_long_history_is_gone_through_as_often_for_many_leases_as_for_one() -> None:
    """With 3,000 leases and 100,000 changes a service took 25 s to start, and for each report as long."""

    def times(many: int) -> int:
        cluster = ClusterState(nodes("a", gpus=many))
        for number in range(many):
            lease = Lease(Request(f"t{number}", 1), (Placement("a", (number,)),), number + 1, 1.0, 60.0)
            cluster.apply(Granted(lease, 1.0))
            cluster.apply(Announced(Request(f"i:d/r/{number}", 1), 1.0))
        changes = Counted([Quarantined("t0", 1, 70.0), Renewed("t0", 1, 80.0, 140.0, 75.0)])
        for change in list(changes):
            cluster.apply(change)
        changes.times = 0
        before = before_changes(cluster.snapshot(), changes).before
        assert [lease.checkpoint_at for lease in before.leases] == [None] * many
        assert len(before.announced) == many
        return changes.times

    assert times(50) == times(1)
