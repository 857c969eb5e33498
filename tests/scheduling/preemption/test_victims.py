"""The choice of victims: complete, irreducible, by strict rights only, and without an endless exchange."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from resource_manager.core.changes import (
    GpuClosed,
    Granted,
    InventoryChanged,
    MaintenanceChanged,
    Queued,
    Released,
    TeamsChanged,
)
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.refusal_wording import right_words
from resource_manager.scheduling.placement.policies.best_fit import best_fit
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.preemption.victim_right import right_to
from resource_manager.scheduling.preemption.victims import find_victims, place_of
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import NO_LIMITS, Limits, SchedulingPass
from tests.scheduling.shared_cluster import GREEDY, Shared

TEAMS = ("p", "q", "r")
TYPES = {"a": "A100", "b": "H100"}
"""The type of all GPUs of each server."""


@st.composite
def clusters(draw: st.DrawFn, *, movable: bool = False, typed: bool = False) -> Shared:
    """Return a cluster with leases and pending requests of three teams, on two servers of three GPUs."""
    by_type = [{name: draw(st.integers(0, 2)) for name in TYPES.values()} if typed else {} for _ in TEAMS]
    assume(not typed or max(sum(each[name] for each in by_type) for name in TYPES.values()) <= 3)
    guarantees = [sum(each.values()) if typed else draw(st.integers(0, 3)) for each in by_type]
    assume(sum(guarantees) <= 6)
    teams = (Team(*each) for each in zip(TEAMS, guarantees, by_type, strict=True))
    shared = Shared(*teams, letters="ab", gpus=3, order=GREEDY)
    shared.do([InventoryChanged(tuple(of_one_type(state.node) for state in shared.state.nodes), shared.now)])
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


def of_one_type(node: Node) -> Node:
    return replace(node, gpus=tuple(Gpu(gpu.gpu_id, TYPES[node.name]) for gpu in node.gpus))


asked = st.builds(
    Request,
    st.just("new"),
    st.integers(1, 3),
    gpu_types=st.sampled_from([(), ("A100",), ("H100",)]),
    team=st.sampled_from(TEAMS),
    priority=st.integers(0, 2),
    expected_runtime_s=st.just(1.0),
)


def held_by_team(shared: Shared) -> dict[str, int]:
    held = Counter(dict.fromkeys(TEAMS, 0))
    for lease in shared.state.leases.values():
        held[lease.request.team] += lease.request.gpus
    return held


def held_of_type(shared: Shared, team: str, gpu_type: str) -> int:
    leases = (each for each in shared.state.leases.values() if each.request.team == team)
    return sum(each.request.gpus for each in leases if TYPES[each.placement.node] == gpu_type)


def is_inside(shared: Shared, request: Request) -> bool:
    """Return whether the team is inside its guarantee with it, if by type of all types that it accepts."""
    (team,) = (team for team in shared.state.teams.teams if team.name == request.team)
    if not team.guaranteed_by_type:
        return held_by_team(shared)[team.name] + request.gpus <= team.guaranteed
    return held_by_team(shared)[team.name] + request.gpus <= team.guaranteed and all(
        held_of_type(shared, team.name, name) + request.gpus <= team.guaranteed_by_type[name]
        for name in request.gpu_types or TYPES.values()
    )


def may_be_taken(shared: Shared, request: Request, lease: Lease) -> bool:
    """The two rules for teams without a tree, written down a second time; each is judged at this moment."""
    victim = lease.request
    (team,) = (team for team in shared.state.teams.teams if team.name == victim.team)
    if not victim.preemptible:
        return False
    if victim.team == request.team:
        return victim.priority < request.priority
    if not (gpu_type := team.guaranteed_by_type and TYPES[lease.placement.node]):
        return is_inside(shared, request) and held_by_team(shared)[team.name] > team.guaranteed
    is_over = held_of_type(shared, team.name, gpu_type) > team.guaranteed_by_type[gpu_type]
    return is_inside(shared, request) and is_over


def ways(request: Request) -> list[Request]:
    """Return the request as it may be placed: on any type, or by a guarantee of one."""
    return [request, *(replace(request, gpu_types=(name,)) for name in request.gpu_types or TYPES.values())]


def fits(shared: Shared, request: Request) -> bool:
    return next(shared.state.candidates(request), None) is not None


def reachable(shared: Shared, request: Request) -> bool:
    """Return whether some row of allowed preemptions makes room, by trying all of them."""
    if fits(shared, request):
        return True
    for lease in list(shared.state.leases.values()):
        if may_be_taken(shared, request, lease):
            with shared.state.trial():
                shared.state.suppose_ended(lease)
                if reachable(shared, request):
                    return True
    return False


@given(clusters() | clusters(typed=True), asked)
def test_a_start_is_found_if_and_only_if_some_allowed_preemptions_make_room(
    shared: Shared, request: Request
) -> None:
    assume(not fits(shared, request))
    pending = PendingRequest(request, 0.0, 99)
    victims = find_victims(shared.state, pending, SchedulingPass(first_fit, GREEDY, shared.now))
    assert bool(victims) == any(reachable(shared, way) for way in ways(request))


@given(clusters() | clusters(typed=True), asked)
def test_no_victim_can_be_left_out_and_each_was_allowed(shared: Shared, request: Request) -> None:
    assume(not fits(shared, request))
    pending = PendingRequest(request, 0.0, 99)
    victims = find_victims(shared.state, pending, SchedulingPass(first_fit, GREEDY, shared.now))
    assert not victims or makes_room(shared, request, victims)
    for spared in victims:
        assert not makes_room(shared, request, [lease for lease in victims if lease is not spared])


def makes_room(shared: Shared, request: Request, victims: list[Lease]) -> bool:
    """Return whether these leases may be taken, one after the other, and are enough."""
    return any(makes_room_by(shared, way, victims) for way in ways(request))


def makes_room_by(shared: Shared, request: Request, victims: list[Lease]) -> bool:
    with shared.state.trial():
        for lease in victims:
            if not may_be_taken(shared, request, lease):
                return False
            shared.state.suppose_ended(lease)
        return fits(shared, request)


@given(clusters() | clusters(typed=True), st.lists(asked, min_size=1, max_size=4))
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


@given(clusters(movable=True) | clusters(movable=True, typed=True), st.sampled_from(TEAMS))
def test_a_guarantee_is_reachable_within_the_grace(shared: Shared, team: str) -> None:
    """With leases of one GPU that may all be preempted, a team always gets what it is guaranteed."""
    ledger = shared.state.ledger
    assert ledger is not None
    account = ledger.accounts[team]
    assume(account.allocated + 1000 <= account.guaranteed)
    shared.submit("new", 1, team=team)
    for lease_id in list(shared.preempting()):
        shared.release(lease_id)
    assert "new" in shared.state.leases


def victims_of(shared: Shared, request: Request) -> list[str]:
    pending = PendingRequest(request, 0.0, 99)
    found = find_victims(shared.state, pending, SchedulingPass(first_fit, GREEDY, shared.now))
    return [lease.lease_id for lease in found]


def granted(shared: Shared, lease_id: str, node: str, *gpu_ids: int, **more: object) -> None:
    """Grant a lease of team nlp on these GPUs; a later one is newer."""
    shared.now += 1.0
    request = Request(lease_id, len(gpu_ids), **{"team": "nlp", **more})  # type: ignore[arg-type]
    token = shared.state.last_fencing_token + 1
    shared.do([Granted(Lease(request, (Placement(node, gpu_ids),), token, shared.now), shared.now)])


@pytest.mark.parametrize(
    ("most_leases", "most_rows", "victims"),
    [(2, 3, ["first", "then"]), (2, 2, []), (1, 3, [])],
)
def test_the_order_in_which_leases_of_one_server_end_is_searched_within_bounds(
    most_leases: int, most_rows: int, victims: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Cheapest first, the team falls to its guarantee before there is room: one row of three makes it."""
    monkeypatch.setattr("resource_manager.scheduling.preemption.victims.MAX_EXACT", most_leases)
    monkeypatch.setattr("resource_manager.scheduling.preemption.victims.MAX_STEPS", most_rows)
    shared = Shared(Team("vision", 3), Team("nlp", 2), letters="ab", gpus=3)
    granted(shared, "fixed", "a", 0, 1, preemptible=False, team="other")
    granted(shared, "first", "b", 0)
    granted(shared, "then", "b", 1, 2)
    granted(shared, "newest", "a", 2)
    before = set(shared.state.leases), held_by_team(shared)
    assert victims_of(shared, Request("mine", 3, team="vision")) == victims
    assert (set(shared.state.leases), held_by_team(shared)) == before


def test_of_the_leases_of_one_server_that_suffice_the_cheapest_ends() -> None:
    shared = Shared(Team("vision", 2), Team("nlp", 4), letters="ab")
    granted(shared, "fixed", "a", 0, 1, 2, preemptible=False, team="other")
    granted(shared, "low", "b", 0, 1, priority=1)
    granted(shared, "high", "b", 2, 3, priority=2)
    granted(shared, "lowest", "a", 3)
    assert victims_of(shared, Request("mine", 2, team="vision")) == ["low"]


def test_on_one_server_leases_of_the_requests_own_team_end_too() -> None:
    shared = Shared(Team("vision", 5), Team("nlp", 2), letters="ab")
    granted(shared, "fixed", "a", 0, 1, 2, preemptible=False, team="other")
    granted(shared, "own", "b", 0, 1, team="vision")
    granted(shared, "theirs", "b", 2, 3)
    granted(shared, "newest", "a", 3)
    assert victims_of(shared, Request("mine", 3, team="vision")) == []
    assert victims_of(shared, Request("mine", 3, team="vision", priority=1)) == ["theirs", "own"]


def test_leases_of_others_and_of_the_own_team_end_together_where_only_both_give_the_right() -> None:
    """The team is inside its guarantee only without its own lease, wherever that is; not with `spared`."""
    shared = Shared(Team("vision", 4), Team("nlp", 2), letters="abc")
    granted(shared, "fixed", "a", 0, 1, 2, preemptible=False, team="other")
    granted(shared, "own", "a", 3, team="vision")
    granted(shared, "spared", "c", 0, team="vision", priority=1)
    granted(shared, "theirs", "b", 0, 1, 2)
    granted(shared, "more", "c", 1, 2, 3, preemptible=False)
    asked = Request("mine", 3, team="vision", required_node="b")
    assert victims_of(shared, asked) == []
    assert victims_of(shared, replace(asked, priority=1)) == ["own", "theirs"]
    assert victims_of(shared, replace(asked, gpus=4, priority=1)) == []
    assert victims_of(shared, replace(asked, gpus=4, priority=2)) == ["own", "spared", "theirs"]
    request = replace(asked, priority=1)
    leases = [shared.state.leases[name] for name in ("own", "theirs")]
    assert right_words(right_to(shared.state, request, leases)) == (
        "since team vision stays inside its guarantee (4 of 4 GPUs) and team nlp is 4 beyond its own and its "
        "priority 1 is above theirs in the team"
    )


def test_a_gang_takes_leases_of_others_and_of_its_own_team_together() -> None:
    shared = Shared(Team("vision", 4), letters="abc", gpus=2)
    reachable_servers(shared)
    granted(shared, "own", "a", 0, 1, team="vision")
    for name, place in (("x", "b"), ("y", "c")):
        granted(shared, name, place, 0, 1)
    gang = Request("mine", 2, team="vision", nodes=2, priority=1)
    assert victims_of(shared, gang) == ["own", "y"]


def test_the_fractions_on_one_gpu_are_counted_together() -> None:
    """The newest fractions are on six other GPUs: taking those first would use up what the team is over."""
    shared = Shared(Team("vision", 1), Team("nlp", 6), gpus=7)
    for gpu_id in range(7):
        granted(shared, f"first-{gpu_id}", "a", gpu_id, gpu_milli=500)
    for gpu_id in range(7):
        granted(shared, f"second-{gpu_id}", "a", gpu_id, gpu_milli=500)
    asked = Request("mine", 1, team="vision", gpu_milli=800)
    assert victims_of(shared, asked) == ["second-0", "first-0"]
    assert victims_of(shared, replace(asked, gpu_milli=500)) == ["second-6"]
    assert victims_of(shared, replace(asked, gpu_milli=1000)) == ["second-0", "first-0"]


def reachable_servers(shared: Shared, *more: Node) -> None:
    """Give the servers addresses, which the members of a gang need, and add more of them."""
    servers = (*(state.node for state in shared.state.nodes), *more)
    shared.do([InventoryChanged(tuple(replace(node, address=node.name) for node in servers), shared.now)])


@pytest.mark.parametrize(
    ("guaranteed", "victims"),
    [(0, ["y", "x"]), (3, ["y", "x"]), (4, [])],
)
def test_a_gang_takes_only_what_is_on_servers_that_help_it(guaranteed: int, victims: list[str]) -> None:
    """The newest lease is on a server too small for a member: its end would only use up the right."""
    shared = Shared(Team("vision", 4), Team("nlp", guaranteed), letters="abc", gpus=2)
    reachable_servers(shared, Node("s", 9, {"cpus": 64}, (Gpu(0),)))
    for name, place in (("x", "a"), ("y", "b")):
        granted(shared, name, place, 0, 1)
    granted(shared, "fixed", "c", 0, preemptible=False)
    granted(shared, "spared", "c", 1)
    granted(shared, "newest", "s", 0)
    shared.do([Released("spared", shared.state.leases["spared"].fencing_token, shared.now)])
    assert victims_of(shared, Request("mine", 2, team="vision", nodes=2)) == victims


def test_a_gang_gives_back_what_it_does_not_need() -> None:
    shared = Shared(Team("vision", 4), letters="ab")
    reachable_servers(shared)
    for name, place, gpu_id in (("needed", "a", 0), ("spared", "b", 0), ("last", "a", 1)):
        granted(shared, name, place, gpu_id, priority={"last": 2}.get(name, 1))
    granted(shared, "fixed", "a", 2, 3, preemptible=False)
    assert victims_of(shared, Request("mine", 2, team="vision", nodes=2)) == ["needed", "last"]


@pytest.mark.parametrize(
    ("asked", "victims"),
    [
        (Request("mine", 1, team="vision", gpu_milli=500), ["part"]),
        (Request("mine", 1, team="vision"), ["part", "whole"]),
        (Request("mine", 2, team="vision"), []),  # the team would exceed its guarantee
        (Request("mine", 0, team="vision", resources={"cpus": 64}), []),  # no guarantee speaks of CPUs
    ],
)
def test_a_part_of_a_gpu_makes_room_for_a_part_or_together_for_a_whole_one(
    asked: Request, victims: list[str]
) -> None:
    shared = Shared(Team("vision", 1), gpus=1)
    granted(shared, "whole", "a", 0, gpu_milli=500, resources={"cpus": 1})
    granted(shared, "part", "a", 0, gpu_milli=500)
    assert victims_of(shared, asked) == victims


def test_a_lease_that_its_server_could_not_take_back_stays_a_victim() -> None:
    """One of its GPUs was closed since: it ended in the search, and cannot be granted again."""
    shared = Shared(Team("vision", 3))
    granted(shared, "spared", "a", 0)
    granted(shared, "fixed", "a", 3, preemptible=False)
    granted(shared, "needed", "a", 1)
    granted(shared, "closed", "a", 2)
    shared.do([GpuClosed("a", 2, "", "broken", shared.now)])
    assert victims_of(shared, Request("mine", 2, team="vision")) == ["closed", "needed", "spared"]


def placed(shared: Shared, pending: PendingRequest, limits: Limits = NO_LIMITS) -> str | None:
    members = place_of(shared.state, pending, SchedulingPass(first_fit, fifo, shared.now, limits=limits))
    return None if members is None else members[0].node


def test_a_request_may_start_where_it_fits_unless_a_quota_a_window_or_its_price_is_against_it() -> None:
    """Each of these alone decides, and what they look at is this request, this order and this time."""
    shared = Shared(Team("vision", 1, limit=1), letters="ab")
    one, two = (PendingRequest(Request(f"x{n}", n, team="vision"), 5.0, 0) for n in (1, 2))
    assert placed(shared, one) == "a"
    assert placed(shared, two) is None  # a limit
    assert placed(shared, replace(two, request=replace(two.request, team="nlp"))) == "a"
    assert placed(shared, replace(two, request=replace(two.request, team="nlp", gpus=5))) is None
    shared.do([MaintenanceChanged((Window(1, ("a",), shared.now + 100.0, shared.now + 200.0),), 0.0)])
    assert placed(shared, one) == "b"  # an unknown runtime counts as the guard
    assert placed(shared, one, Limits(maintenance_guard_s=99.0)) == "a"
    shared.now += 200.0
    assert placed(shared, one) == "a"
    looked: list[tuple[object, ...]] = []

    class Price:
        def admits(self, *about: object) -> bool:
            looked.append(about)
            return False

    assert placed(shared, one, Limits(Price())) is None  # type: ignore[arg-type]
    ((cluster, request, members, queued_at, now),) = looked
    assert (cluster, request, queued_at, now) == (shared.state, one.request, 5.0, shared.now)
    assert [member.node for member in members] == ["a"]  # type: ignore[attr-defined]
    shared.do([TeamsChanged(Teams(), 0.0)])
    assert placed(shared, two) == "a"  # without rules there is no quota
