"""What holds after any steps, by any order and placement policy."""

from __future__ import annotations

from collections import defaultdict

from hypothesis import given, settings
from hypothesis import strategies as st

from resource_manager.core.changes import Granted, Preempting
from resource_manager.core.refusal import NextPass, RefusalKind
from resource_manager.errors import NeverFitsError
from resource_manager.scheduling import allocator
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.reasons.feasibility import refusals_of, standings
from tests.scheduling.plays import Play, is_as_demanded

seeds = st.integers(0, 10**6)


@given(seeds)
@settings(max_examples=60)
def test_a_decision_changes_nothing_a_replica_decides_the_same_and_a_pass_leaves_nothing_to_do(
    seed: int,
) -> None:
    play = Play(seed)
    for _ in play.course():
        if play.chance.random() < 0.6:
            play.settle()


@given(seeds)
@settings(max_examples=60)
def test_no_lease_is_preempted_in_vain(seed: int) -> None:
    """Once all its victims have ended, the request that they were taken for starts."""
    play = Play(seed, crowded=seed % 3 > 0)
    before = 0
    for _ in play.course():
        play.settle()
        by_preemptor = defaultdict(list)
        for lease_id in sorted(play.state.preempting):
            by_preemptor[play.state.leases[lease_id].preempted_by].append(lease_id)
        for preemptor in {each.preemptor for each in play.steps[before:] if isinstance(each, Preempting)}:
            after = play.copy()
            for lease_id in by_preemptor[preemptor]:
                after.end_preempted(lease_id)
            assert preemptor not in {each.lease_id for each in after.state.pending.values()}, after
        before = len(play.steps)


@given(seeds)
@settings(max_examples=60)
def test_a_request_is_granted_at_once_if_and_only_if_the_reason_says_so(seed: int) -> None:
    play = Play(seed)
    for _ in play.course():
        if play.chance.random() < 0.3:
            play.settle()
            for standing in standings(play.state, play.current):
                assert not any(isinstance(fact, NextPass) for fact in standing.refusal.facts), play
            for _ in range(3):
                ask_once(play)


def ask_once(play: Play) -> None:
    """Ask what one more request would get, and why it would wait."""
    request = play.request()
    try:
        allocator.require_feasible(play.state, request)
    except NeverFitsError:
        return
    changes = allocator.allocate_in_order(play.state, [request], play.current)
    grants = {change.lease.lease_id: change.lease for change in changes if isinstance(change, Granted)}
    facts = refusals_of(play.state, [request], play.current)[request.lease_id].facts
    starts = any(isinstance(fact, NextPass) for fact in facts)
    assert (request.lease_id in grants) == starts, (str(play), request, facts)
    assert all(is_as_demanded(play.state, lease) for lease in grants.values())


@given(seeds)
@settings(max_examples=60)
def test_once_all_is_open_and_ends_every_request_starts_that_no_rule_stops(seed: int) -> None:
    play = Play(seed)
    for _ in play.course():
        pass
    play.open_all()
    while held := [*play.state.leases.values(), *play.state.remainders.values()]:
        play.now += play.chance.choice([1.0, 40.0, 100.0])
        play.end(play.chance.choice(held))
    play.now += 100.0
    play.settle()
    if not play.state.leases:
        for standing in standings(play.state, play.current):
            request = standing.entry.request
            is_stopped = standing.refusal.kind is RefusalKind.QUOTA
            assert is_stopped or never_fits(play.state, request), (str(play), request)
