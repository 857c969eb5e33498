"""Which leases a request has the right to end."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resource_manager.core.changes import Drained, Granted, InventoryChanged, Outcome
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.pending import PendingRequest
from resource_manager.core.teams import Team
from resource_manager.manager.refusal_wording import right_words
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.preemption.victim_right import Planned, right_to
from resource_manager.scheduling.preemption.victims import find_victims
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.scheduling.preemption.test_victims import granted, victims_of
from tests.scheduling.shared_cluster import Shared


@pytest.mark.parametrize(("parents", "victims"), [(0, ["child"]), (1, []), (2, [])])
def test_the_guarantee_of_a_child_counts_as_far_as_that_of_its_parent(
    parents: int, victims: list[str]
) -> None:
    """Against another branch; between its children a parent's guarantee does not matter."""
    teams = (Team("d", parents), Team("p", 1, parent="d"), Team("q", 1, parent="d"))
    shared = Shared(Team("vision", 1), *teams, gpus=1)
    granted(shared, "child", "a", 0, team="p")
    assert victims_of(shared, Request("mine", 1, team="vision")) == victims
    assert victims_of(shared, Request("mine", 1, team="q")) == []


def test_a_guarantee_by_type_counts_as_far_as_that_of_the_parent_too() -> None:
    typed = {"A100": 1}
    for parent, victims in ((Team("d", 1, typed), []), (Team("d", 1, {"H100": 1}), ["child"])):
        shared = Shared(Team("vision", 1), parent, Team("p", 1, typed, parent="d"), gpus=1)
        shared.do([InventoryChanged((Node("a", 0, {}, (Gpu(0, "A100"),)),), shared.now)])
        granted(shared, "child", "a", 0, team="p")
        assert victims_of(shared, Request("mine", 1, team="vision")) == victims


def test_leases_planned_for_a_colleague_cost_a_team_none_that_are_inside_its_guarantee() -> None:
    shared = Shared(Team("vision", 1), Team("nlp", 1), gpus=2)
    granted(shared, "held", "a", 0)
    granted(shared, "ends", "a", 1, team="other")
    cluster = shared.state
    pending = PendingRequest(Request("mine", 1, team="vision"), 0.0, 99)
    with cluster.trial():
        ending, planned = cluster.leases["ends"], Planned(cluster)
        cluster.suppose_ended(ending)
        plan = Lease(Request("plan", 1, team="nlp"), (Placement("a", (1,)),), 9, 0.0, quarantined=True)
        cluster.apply(Granted(plan, 0.0))
        assert find_victims(cluster, pending, SchedulingPass(first_fit, fifo, shared.now))
        planned.add(plan)
        assert find_victims(cluster, pending, SchedulingPass(first_fit, fifo, shared.now), planned) == []


@pytest.mark.parametrize(
    ("teams", "held", "taken"),
    [
        # Three times its guarantee is more than twice, whatever the weights are.
        ((Team("p", 1, weight=9), Team("q", 2, weight=1)), {"p": 3, "q": 4}, "p"),
        # A team without a guarantee comes before one that is beyond its own.
        ((Team("p"), Team("q", 1)), {"p": 1, "q": 5}, "p"),
        ((Team("q", 1), Team("r")), {"r": 1, "q": 5}, "r"),
        # Without guarantees the weights decide; who has none comes first.
        ((Team("p", weight=1), Team("q", weight=4)), {"p": 2, "q": 4}, "p"),
        ((Team("p", weight=4), Team("q", weight=1)), {"p": 4, "q": 2}, "q"),
        ((Team("p", weight=0), Team("q", weight=1)), {"p": 1, "q": 5}, "p"),
        ((Team("q", weight=1), Team("r", weight=0)), {"r": 1, "q": 5}, "r"),
        # The top of the tree decides first.
        (
            (Team("d", 4), Team("q", 1, parent="d"), Team("e", 1), Team("p", 2, parent="e")),
            {"q": 5, "p": 3},
            "p",
        ),
        # Teams without rules are one, and the cheaper lease is taken of two equal teams.
        ((Team("p"),), {"p": 3, "no": 2, "rules": 2}, "no"),
        ((Team("p"), Team("q")), {"p": 2, "q": 2}, "q"),
    ],
)
def test_the_first_victim_is_of_the_team_most_over_its_share(
    teams: tuple[Team, ...], held: dict[str, int], taken: str
) -> None:
    shared = Shared(Team("vision", 1), *teams, gpus=sum(held.values()))
    gpu_ids = iter(range(8))
    for team, count in held.items():
        for number in range(count):
            granted(shared, f"{team}-{number}", "a", next(gpu_ids), team=team, priority=team == "rules")
    assert victims_of(shared, Request("mine", 1, team="vision")) == [f"{taken}-{held[taken] - 1}"]


@pytest.mark.parametrize(
    ("held", "victims"),
    [({0: "A100", 1: "A100", 2: "H100"}, ["lease-1"]), ({0: "A100", 1: "H100", 2: "H100"}, [])],
)
def test_a_guarantee_by_type_protects_the_leases_on_gpus_of_that_type(
    held: dict[int, str], victims: list[str]
) -> None:
    """Team nlp is guaranteed one A100 and two H100: only a second A100 is beyond it."""
    shared = Shared(Team("vision", 1), Team("nlp", 3, {"A100": 1, "H100": 2}))
    gpus = tuple(Gpu(gpu_id, gpu_type) for gpu_id, gpu_type in held.items())
    shared.do([InventoryChanged((Node("a", 0, {"cpus": 64}, gpus),), shared.now)])
    for gpu_id in held:
        granted(shared, f"lease-{gpu_id}", "a", gpu_id)
    assert victims_of(shared, Request("mine", 1, team="vision")) == victims


def test_the_reasons_name_both_rights() -> None:
    shared = Shared(Team("vision", 3), gpus=4)
    shared.submit("x", 2, team="nlp")
    shared.submit("y", 2, team="vision")
    request = Request("mine", 1, team="vision", priority=5)
    leases = list(shared.state.leases.values())
    assert right_words(right_to(shared.state, request, leases)) == (
        "since team vision stays inside its guarantee (3 of 3 GPUs) and the rest (teams without rules) "
        "is 2 beyond its own and its priority 5 is above theirs in the team"
    )
    only_others = [lease for lease in leases if lease.request.team == "nlp"]
    assert "its priority" not in right_words(right_to(shared.state, request, only_others))


def of_two_types(*teams: Team) -> Shared:
    """Return a cluster of eight A100 and four H100."""
    shared = Shared(*teams, letters="ah", gpus=8)
    counts = {"a": ("A100", 8), "h": ("H100", 4)}
    gpus = {name: tuple(Gpu(i, gpu_type) for i in range(count)) for name, (gpu_type, count) in counts.items()}
    servers = tuple(replace(state.node, gpus=gpus[state.name]) for state in shared.state.nodes)
    shared.do([InventoryChanged(servers, shared.now)])
    return shared


HALVES = {"A100": 2, "H100": 2}


def test_teams_with_guarantees_of_types_that_no_open_server_has_do_not_preempt_each_other() -> None:
    """Inside that guarantee each took a lease on the other type, which the next one took back, for ever."""
    shared = of_two_types(*(Team(name, 4, HALVES) for name in "xyz"))
    for number, team in enumerate("xyz"):
        granted(shared, f"{team} holds", "a", 2 * number, 2 * number + 1, team=team)
    granted(shared, "lent", "a", 6, 7, team="none")
    shared.do([Drained("h", shared.now)])
    for team in "xyz":
        shared.submit(f"{team} waits", 2, team=team)
    for _ in range(3):
        assert shared.preempting() == {}
        shared.tick(60.0)


def test_by_a_guarantee_of_a_type_a_request_takes_and_gets_gpus_of_that_type_alone() -> None:
    """Its place was any: also what became free of another type, ahead of the team that waited for that."""
    shared = of_two_types(Team("x", 4, HALVES), Team("y", 2, {"A100": 2}))
    granted(shared, "x holds", "a", 0, 1, team="x")
    granted(shared, "y holds", "a", 2, 3, team="y")
    granted(shared, "fixed", "a", 4, 5, team="none", preemptible=False)
    granted(shared, "lent", "h", 0, 1, 2, 3, team="none")
    granted(shared, "newest", "a", 6, 7, team="none")
    shared.submit("y waits", 4, team="y", gpu_types=("A100",))
    shared.submit("x waits", 2, team="x")
    assert shared.preempting() == {"lent": "x waits"}
    shared.release("newest", Outcome.SUCCESS)
    assert set(shared.state.pending) == {"x waits", "y waits"}
    shared.release("lent", Outcome.SUCCESS)
    assert shared.state.leases["x waits"].placement.node == "h"


def test_where_a_parent_decides_the_types_are_those_of_its_guarantee() -> None:
    """Against teams outside it: of the lent H100, which are newer, none is inside the guarantee of d."""
    teams = (Team("d", 8, {"A100": 8}), Team("x", 2, {"H100": 2}, parent="d"), Team("y", parent="d"))
    shared = of_two_types(*teams)
    granted(shared, "sibling", "a", *range(4), team="y")
    granted(shared, "others", "a", *range(4, 8), team="none")
    granted(shared, "lent", "h", *range(4), team="none")
    request = Request("mine", 2, team="x")
    assert victims_of(shared, request) == ["others"]
    assert victims_of(shared, replace(request, gpu_types=("H100",))) == []


def test_between_children_types_of_their_parent_give_no_right() -> None:
    parent = Team("d", 12, {"A100": 4, "H100": 8})
    shared = of_two_types(parent, Team("x", 2, {"A100": 2}, parent="d"), Team("y", parent="d"))
    granted(shared, "fixed", "a", *range(8), team="none", preemptible=False)
    granted(shared, "sibling", "h", *range(4), team="y")
    assert victims_of(shared, Request("mine", 2, team="x")) == []


def test_inside_the_guarantee_of_a_type_only_without_its_own_lease_a_team_takes_both() -> None:
    shared = of_two_types(Team("x", 4, HALVES))
    granted(shared, "own", "a", 0, team="x")
    granted(shared, "lent", "a", 1, team="none")
    granted(shared, "fixed", "a", *range(2, 8), team="none", preemptible=False)
    granted(shared, "full", "h", *range(4), team="none", preemptible=False)
    request = Request("mine", 2, team="x", priority=1)
    assert victims_of(shared, request) == ["own", "lent"]
    assert victims_of(shared, replace(request, priority=0)) == []


def test_the_sentence_names_the_team_whose_guarantee_gives_the_right() -> None:
    """A team without a guarantee lives on that of its parent."""
    parts = (Team("p", parent="d1"), Team("q", 1, parent="d2"), Team("r", parent="d2"))
    shared = Shared(Team("d1", 2), Team("d2", 2), *parts)
    granted(shared, "x", "a", 0, team="q")
    granted(shared, "y", "a", 1, 2, 3, team="r")
    right = right_to(shared.state, Request("mine", 2, team="p"), [shared.state.leases["y"]])
    assert right_words(right) == (
        "since team d1 stays inside its guarantee (2 of 2 GPUs) and team r is 2 beyond its own"
    )


def test_the_sentence_says_by_how_much_a_team_is_over_its_guarantee_of_the_type_that_is_taken() -> None:
    shared = Shared(Team("vision", 1), Team("nlp", 3, {"A100": 1, "H100": 2}), gpus=3)
    gpus = (Gpu(0, "A100"), Gpu(1, "A100"), Gpu(2, "H100"))
    shared.do([InventoryChanged((Node("a", 0, {}, gpus),), shared.now)])
    for gpu_id in range(3):
        granted(shared, f"x{gpu_id}", "a", gpu_id)
    right = right_to(shared.state, Request("mine", 1, team="vision"), [shared.state.leases["x1"]])
    assert right.others == (("nlp", 1000),)


def test_others_lose_nothing_where_the_lease_that_gives_the_right_is_room_enough() -> None:
    """Its end on another type was enough; it was searched for the type of the right alone."""
    shared = of_two_types(Team("x", 2, {"H100": 2}))
    granted(shared, "own", "a", *range(8), team="x")
    granted(shared, "stays", "h", 0, team="x", preemptible=False)
    granted(shared, "lent", "h", 1, team="none")
    granted(shared, "fixed", "h", 2, 3, team="none", preemptible=False)
    assert victims_of(shared, Request("mine", 1, team="x", priority=1)) == ["own"]
