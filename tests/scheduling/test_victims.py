"""The choice of victims: complete, irreducible, by strict rights only, and without an endless exchange."""

from __future__ import annotations

from hypothesis import assume, given
from hypothesis import strategies as st

from resource_manager.core.changes import Granted, Queued
from resource_manager.core.models import Lease, PendingRequest, Request
from resource_manager.core.teams import Team
from resource_manager.scheduling.policies.best_fit import best_fit
from resource_manager.scheduling.policies.first_fit import first_fit
from resource_manager.scheduling.victims import find_victims, reasons_for
from tests.scheduling.shared_cluster import GREEDY, Shared

TEAMS = ("p", "q", "r")


@st.composite
def clusters(draw: st.DrawFn, *, movable: bool = False) -> Shared:
    """Return a cluster with leases and pending requests of three teams, on two servers of three GPUs."""
    guarantees = [draw(st.integers(0, 3)) for _ in TEAMS]
    assume(sum(guarantees) <= 6)
    shared = Shared(
        *(Team(name, amount) for name, amount in zip(TEAMS, guarantees, strict=True)),
        letters="ab",
        gpus=3,
        order=GREEDY,
    )
    for number in range(draw(st.integers(1, 6))):
        request = Request(
            f"h{number}",
            draw(st.integers(1, 1 if movable else 3)),
            team=draw(st.sampled_from(TEAMS)),
            priority=draw(st.integers(0, 2)),
            preemptible=movable or draw(st.integers(0, 5)) > 0,
            expected_runtime_s=1e9,
        )
        place = best_fit(shared.state, request)
        if place is not None:
            token = shared.state.last_fencing_token + 1
            shared.do([Granted(Lease(request, (place,), token, float(number), queued_at=0.0), 0.0)])
    return shared


asked = st.builds(
    Request,
    st.just("new"),
    st.integers(1, 3),
    team=st.sampled_from(TEAMS),
    priority=st.integers(0, 2),
    expected_runtime_s=st.just(1.0),
)


def held_by_team(shared: Shared) -> dict[str, int]:
    held = dict.fromkeys(TEAMS, 0)
    for lease in shared.state.leases.values():
        held[lease.request.team] += lease.request.gpus
    return held


def is_inside(shared: Shared, request: Request) -> bool:
    guaranteed = {team.name: team.guaranteed for team in shared.state.teams.teams}
    return held_by_team(shared)[request.team] + request.gpus <= guaranteed[request.team]


def may_be_taken(shared: Shared, request: Request, lease: Lease, inside: bool) -> bool:
    """The two rules for teams without a tree, written down a second time."""
    guaranteed = {team.name: team.guaranteed for team in shared.state.teams.teams}
    victim = lease.request
    if not victim.preemptible:
        return False
    if victim.team == request.team:
        return victim.priority < request.priority
    return inside and held_by_team(shared)[victim.team] > guaranteed[victim.team]


def fits(shared: Shared, request: Request) -> bool:
    return next(shared.state.candidates(request), None) is not None


def reachable(shared: Shared, request: Request, inside: bool) -> bool:
    """Return whether some row of allowed preemptions makes room, by trying all of them."""
    if fits(shared, request):
        return True
    for lease in list(shared.state.leases.values()):
        if may_be_taken(shared, request, lease, inside):
            with shared.state.trial():
                shared.state.suppose_ended(lease)
                if reachable(shared, request, inside):
                    return True
    return False


@given(clusters(), asked)
def test_a_start_is_found_if_and_only_if_some_allowed_preemptions_make_room(
    shared: Shared, request: Request
) -> None:
    assume(not fits(shared, request))
    pending = PendingRequest(request, 0.0, 99)
    victims = find_victims(shared.state, pending, first_fit, GREEDY, shared.now)
    assert bool(victims) == reachable(shared, request, is_inside(shared, request))


@given(clusters(), asked)
def test_no_victim_can_be_left_out_and_each_was_allowed(shared: Shared, request: Request) -> None:
    pending = PendingRequest(request, 0.0, 99)
    victims = find_victims(shared.state, pending, first_fit, GREEDY, shared.now)
    for spared in victims:
        with shared.state.trial():
            for lease in victims:
                if lease is not spared:
                    shared.state.suppose_ended(lease)
            assert not fits(shared, request)
    inside = is_inside(shared, request)
    with shared.state.trial():
        for lease in victims:
            assert may_be_taken(shared, request, lease, inside)
            shared.state.suppose_ended(lease)
        assert not victims or fits(shared, request)


@given(clusters(), st.lists(asked, min_size=1, max_size=4))
def test_no_victim_without_a_start_and_no_swap_for_ever(shared: Shared, requests: list[Request]) -> None:
    for number, request in enumerate(requests):
        request = request.for_task(f"n{number}")
        shared.do([Queued(request, shared.now, shared.state.sequence + 1, shared.now)])
    ended = 0
    for _ in range(40):
        changes = shared.tick()
        if not shared.state.preempting and not changes:
            break
        for lease_id, by in sorted(shared.preempting().items(), key=lambda item: item[1]):
            last = sum(other == by for other in shared.preempting().values()) == 1
            after = shared.release(lease_id)
            ended += 1
            if last:
                started = {change.lease.lease_id for change in after if isinstance(change, Granted)}
                assert by in started
    else:
        raise AssertionError("requests still take each other's place")
    # Each end serves a stronger right than before it, so there are only so many.
    assert ended <= 6 * len(requests)


@given(clusters(movable=True), st.sampled_from(TEAMS))
def test_a_guarantee_is_reachable_within_the_grace(shared: Shared, team: str) -> None:
    """With leases of one GPU that may all be preempted, a team always gets what it is guaranteed."""
    ledger = shared.state.ledger
    assert ledger is not None
    account = ledger.accounts[team]
    assume(account.held + 1000 <= account.guaranteed)
    shared.submit("new", 1, team=team)
    for lease_id in list(shared.preempting()):
        shared.release(lease_id)
    assert "new" in shared.state.leases


def test_the_reasons_name_both_rights() -> None:
    shared = Shared(Team("vision", 3), gpus=4)
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="vision")
    request = Request("mine", 1, team="vision", priority=5)
    leases = list(shared.state.leases.values())
    assert reasons_for(shared.state, request, leases) == (
        "since team vision stays inside its guarantee (3 of 3 GPUs) and the rest (teams without rules) "
        "is 2 beyond its own and its priority 5 is above theirs in the team"
    )
