"""The walk over a history: what it says of leases and requests at each moment is what the state says."""

from __future__ import annotations

import pytest

from resource_manager.core.changes import Change, Granted, MembersReleased, Preempting, Queued, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.team_ledger import held_milli
from resource_manager.scheduling.accounting.lives import Lives, lives_of
from tests.storage.walk import Walk, first_state


@pytest.mark.parametrize("seed", range(8))
def test_lives_follow_the_state_through_every_kind_of_change(seed: int) -> None:
    walk, cluster, lives = Walk(seed), ClusterState.from_snapshot(first_state()), Lives(first_state())
    changes: list[Change] = []
    for step in range(60):
        for change in walk.changes(cluster, 1000.0 + step):
            cluster.apply(change)
            lives.add(change)
            changes.append(change)
        held = {each.fencing_token: each for each in (*cluster.leases.values(), *cluster.remainders.values())}
        live = {token: life for token, life in lives.lives.items() if not life.is_over}
        assert {token: list(life.lease.ranked) for token, life in live.items()} == {
            token: list(lease.ranked) for token, lease in held.items()
        }
        assert {token: life.quarantined for token, life in live.items()} == {
            token: lease.quarantined for token, lease in held.items()
        }
        assert {token: life.preempted_by for token, life in live.items() if not life.lease.ranks} == {
            lease.fencing_token: lease.preempted_by for lease in cluster.leases.values()
        }
        assert lives.allocated_milli == sum(map(held_milli, held.values()))
        assert lives.pending.keys() == cluster.pending.keys()
    again = lives_of(first_state(), changes)
    assert again.lives == lives.lives
    assert list(again.waits) == list(lives.waits)


def gang(token: int) -> Lease:
    members = tuple(Placement(f"gpu-server-{i}", (0, 1)) for i in range(2))
    return Lease(Request("gang", 2, nodes=2), members, token, 10.0)


def test_a_life_has_its_wait_its_spells_and_an_end_for_each_of_its_members() -> None:
    request = Request("gang", 2, nodes=2)
    lives = lives_of(
        first_state(),
        [
            Queued(request, 4.0, 1, 4.0),
            Granted(gang(1), 10.0),
            Preempting("gang", 1, "other", 99.0, 15.0),
            MembersReleased("gang", 1, (0,), 20.0, "PREEMPTED"),
            MembersReleased("gang", 1, (1,), 30.0, "CANCELLED"),
        ],
    )
    life = lives.lives[1]
    assert (life.waited_s, life.preemptions, life.ended_at) == (6.0, (15.0,), 30.0)
    assert [(spell.start, spell.end, spell.quarantined, spell.outcome) for spell in life.spells] == [
        (10.0, 20.0, False, "PREEMPTED"),
        (20.0, 30.0, True, "CANCELLED"),
    ]
    assert [spell.milli for spell in life.spells] == [{"A100": 4000}, {"A100": 2000}]
    assert [[rank for rank, _ in end.ranked] for end in life.ends] == [[0], [1]]


def test_only_the_last_of_those_that_are_over_are_kept() -> None:
    lives = Lives(first_state(), max_ended=2)
    for token in range(1, 6):
        lease = Lease(Request(f"t{token}", 1), (Placement("gpu-server-0", (0,)),), token, float(token))
        lives.add(Granted(lease, float(token)))
        lives.add(Released(f"t{token}", token, token + 0.5))
    assert lives.lives.keys() == {4, 5}
    assert lives.add(Released("t1", 1, 9.0)) is None, "it is older than what is known"
