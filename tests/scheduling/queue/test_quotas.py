"""Quotas of teams: who is stopped by which rule, and the sentence that says so."""

from __future__ import annotations

from dataclasses import replace

import pytest

from resource_manager.core.changes import Drained, Granted, InventoryChanged, Queued, TeamsChanged
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.core.team_ledger import Account, TeamLedger
from resource_manager.core.teams import Team, Teams
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import fifo, get_order
from resource_manager.scheduling.queue.quotas import (
    Stop,
    StopKind,
    may_start,
    passes,
    quota_refusal,
    shares_by_weight,
    stop_of,
    types_inside,
)
from resource_manager.scheduling.reasons.feasibility import refusals_of, standings
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from tests.builders import node, nodes

GPUS = tuple(Gpu(number, "A100") for number in range(8))


def cluster_of(*teams: Team, gpus: int = 8, preemption: bool = False) -> ClusterState:
    cluster = ClusterState([node("a", gpus, 64)])
    cluster.apply(TeamsChanged(Teams(teams, preemption), 0.0))
    return cluster


def submit(cluster: ClusterState, request: Request, now: float = 1.0) -> None:
    for change in allocator.submit(cluster, request, SchedulingPass(first_fit, fifo, now)):
        cluster.apply(change)


def refused(cluster: ClusterState, request: Request) -> tuple[str, str]:
    refusal = refusals_of(cluster, [request], SchedulingPass(first_fit, fifo, 1.0))[request.lease_id]
    return str(refusal.kind), detail_of(refusal)


def test_a_limit_stops_a_request_that_fits_and_says_by_whom_the_rest_is_used() -> None:
    cluster = cluster_of(Team("vision", 2, limit=4))
    submit(cluster, Request("x", 2, team="vision", owner="kim"))
    submit(cluster, Request("y", 1, team="vision", owner="li"))
    submit(cluster, Request("z", 2, team="vision", owner="li"))
    assert list(cluster.pending) == ["z"]
    assert refused(cluster, cluster.pending["z"].request) == (
        "quota",
        "team vision may hold 4 GPUs (limit) and holds 3: 2 more exceed it; used by kim (2), li (1)",
    )


@pytest.mark.parametrize(
    ("held", "users"),
    [
        ({"b": ("li", 1), "a": ("kim", 1), "c": ("", 2)}, "no owner (2), kim (1), li (1)"),
        ({"d": ("", 1), "a": ("", 2), "b": ("", 1)}, "a kw4n (2), b 7ch3 (1), d 3hmc (1)"),
        ({name: (name, 1) for name in "dcba"}, "a (1), b (1), c (1), 1 more"),
        ({}, "nobody"),
    ],
)
def test_a_limit_names_the_largest_users_first(held: dict[str, tuple[str, int]], users: str) -> None:
    cluster = cluster_of(Team("vision", limit=4))
    submit(cluster, Request("other", 1, team="nlp"))
    submit(cluster, Request("no-gpu", 0, team="vision", resources={"cpus": 1}))
    for name, (owner, gpus) in held.items():
        submit(cluster, Request(name, gpus, team="vision", owner=owner))
    _, detail = refused(cluster, Request("y", 5, team="vision"))
    assert detail.endswith(f": 5 more exceed it; used by {users}")


def test_a_request_over_its_limit_blocks_nobody() -> None:
    cluster = cluster_of(Team("vision", limit=1))
    submit(cluster, Request("x", 2, team="vision"))
    submit(cluster, Request("y", 2, team="nlp"))
    assert list(cluster.leases) == ["y"]
    assert list(cluster.pending) == ["x"]


def test_the_limit_of_a_parent_bounds_all_below_it() -> None:
    below = (Team("vision", parent="research"), Team("nlp", parent="research"))
    cluster = cluster_of(Team("research", limit=3), *below)
    submit(cluster, Request("x", 2, team="vision"))
    request = Request("y", 2, team="nlp")
    assert refused(cluster, request) == (
        "quota",
        "team research may hold 3 GPUs (limit) and holds 2: 2 more exceed it; used by team vision (2)",
    )
    assert allocator.allocate(cluster, request, SchedulingPass(first_fit, fifo, 1.0)) == []


def test_an_owner_may_hold_so_many_gpus_of_a_team() -> None:
    cluster = cluster_of(Team("vision", max_gpus_per_owner=2))
    submit(cluster, Request("x", 2, team="vision", owner="kim"))
    kind, detail = refused(cluster, Request("y", 1, team="vision", owner="kim"))
    assert kind == "quota"
    assert detail == "kim may hold 2 GPUs of team vision (max_gpus_per_owner) and holds 2: 1 more exceeds it"
    kind, detail = refused(cluster, Request("y", 3, team="vision"))
    assert detail.startswith("an owner without a name may hold 2 GPUs of team vision")
    assert detail.endswith("and holds 0: 3 more exceed it")
    submit(cluster, Request("z", 1, team="vision", owner="li"))
    assert "z" in cluster.leases


@pytest.mark.parametrize(
    "team", [Team("vision", max_gpus_per_owner=1.005), Team("vision", 1.005, {"": 1.005}, limit=8)]
)
def test_a_part_of_a_gpu_may_be_used_up(team: Team) -> None:
    """1000 × 1.005 is 1004.9999999999999 to a computer."""
    cluster = cluster_of(team, preemption=True)
    for name, milli in (("x", 1000), ("y", 5), ("z", 1)):
        submit(cluster, Request(name, 1, milli, team="vision", preemptible=team.guaranteed == 0))
    assert cluster.leases.keys() == {"x", "y"}


def test_a_longer_runtime_than_the_team_allows_is_stopped() -> None:
    cluster = cluster_of(Team("vision", max_runtime_s=7200.0))
    kind, detail = refused(cluster, Request("x", 1, team="vision", expected_runtime_s=10_800.0))
    assert (kind, detail) == (
        "quota",
        "team vision may run jobs of at most 2 h (max_runtime); expected_runtime is 3 h",
    )


@pytest.mark.parametrize("team", ["vision", "other"])
def test_a_job_that_is_not_preemptible_stops_at_the_guarantee(team: str) -> None:
    cluster = cluster_of(Team("vision", 2), preemption=True)
    submit(cluster, Request("x", 2, team="vision", preemptible=False))
    kind, detail = refused(cluster, Request("y", 1, team=team, preemptible=False))
    assert kind == "quota"
    assert "a preemptible job may use what is free beyond that" in detail
    submit(cluster, Request("z", 1, team=team))
    assert set(cluster.leases) == {"x", "z"}


def test_without_preemption_such_a_job_may_borrow() -> None:
    cluster = cluster_of(Team("vision", 2))
    submit(cluster, Request("x", 4, team="vision", preemptible=False))
    assert set(cluster.leases) == {"x"}


def test_a_guarantee_of_a_type_counts_gpus_of_that_type() -> None:
    cluster = ClusterState([Node("a", 0, {}, tuple(Gpu(i, "A100" if i < 4 else "H100") for i in range(8)))])
    rules = Teams((Team("vision", 4, {"A100": 2, "H100": 2}),), preemption=True)
    cluster.apply(TeamsChanged(rules, 0.0))
    submit(cluster, Request("x", 2, team="vision", preemptible=False, gpu_types=("A100",)))
    kind, detail = refused(cluster, Request("y", 1, team="vision", preemptible=False, gpu_types=("A100",)))
    assert kind == "quota"
    assert "is guaranteed 2 A100 and holds" in detail
    for types, guaranteed in (((), "2 A100 and 2 H100"), (("A100", "B200"), "2 A100 and 0 B200")):
        request = Request("y", 3, team="vision", preemptible=False, gpu_types=types)
        refusal = quota_refusal(cluster, request)
        assert refusal is not None
        assert f"is guaranteed {guaranteed} and holds 2 " in detail_of(refusal)
        assert ": 3 more of one type exceed it;" in detail_of(refusal)
    submit(cluster, Request("z", 2, team="vision", preemptible=False, gpu_types=("H100",)))
    assert "z" in cluster.leases


def of_two_types(*teams: Team) -> ClusterState:
    """Return servers h, with 8 H100, and a, with 8 A100, that the teams share with preemption."""
    servers = (
        Node(name, number, {}, tuple(Gpu(i, gpu_type) for i in range(8)))
        for number, (name, gpu_type) in enumerate({"h": "H100", "a": "A100"}.items())
    )
    cluster = ClusterState([*servers])
    cluster.apply(TeamsChanged(Teams(teams, preemption=bool(teams)), 0.0))
    return cluster


def test_a_job_that_is_not_preemptible_is_placed_on_types_that_its_team_is_guaranteed() -> None:
    """Inside the guarantee of one type it took GPUs of another, which nobody could take back."""
    cluster = of_two_types(Team("va", 8, {"A100": 8}), Team("hb", 8, {"H100": 8}))
    for number in range(8):
        submit(cluster, Request(f"va-{number}", 1, team="va", preemptible=False))
    submit(cluster, Request("hb", 8, team="hb", gpu_types=("H100",)))
    assert {lease.lease_id: lease.placement.node for lease in cluster.leases.values()} == {
        **{f"va-{number}": "a" for number in range(8)},
        "hb": "h",
    }


def test_a_job_that_is_not_preemptible_overtakes_on_no_other_type() -> None:
    cluster = of_two_types(Team("va", 8, {"A100": 8}))
    current = SchedulingPass(first_fit, get_order("fifo+backfill"), 1.0)

    def ask(lease_id: str, gpus: int, runtime_s: float, **more: object) -> None:
        request = Request(lease_id, gpus, team="va", expected_runtime_s=runtime_s, **more)  # type: ignore[arg-type]
        cluster.apply(*allocator.submit(cluster, request, current))

    ask("now", 4, 100.0, gpu_types=("A100",))
    ask("ahead", 8, 100.0, gpu_types=("A100",))
    ask("fixed", 1, 1000.0, preemptible=False)
    assert list(cluster.leases) == ["now"]
    (standing,) = standings(cluster, current, only=["fixed"])
    assert (str(standing.refusal.kind), detail_of(standing.refusal)) == (
        "behind_queue",
        "4 A100 are free on a; starting now could delay ahead f462 (position 1, needs 8)",
    )
    ask("any", 1, 1000.0)
    assert cluster.leases["any"].placement.node == "h"


def test_a_gang_that_waits_for_its_guaranteed_type_keeps_others_from_no_other_type() -> None:
    types = {"a": "A100", "g": "H100", "h": "H100"}
    cluster = ClusterState(
        [
            Node(name, number, {}, tuple(Gpu(i, gpu_type) for i in range(8)), address=name)
            for number, (name, gpu_type) in enumerate(types.items())
        ]
    )
    cluster.apply(TeamsChanged(Teams((Team("va", 8, {"A100": 8}),), preemption=True), 0.0))
    submit(cluster, Request("busy", 8, team="va", gpu_types=("A100",), preemptible=False))
    cluster.apply(TeamsChanged(Teams((Team("va", 16, {"A100": 16}),), preemption=True), 0.0))
    current = SchedulingPass(first_fit, get_order("fifo+backfill"), 1.0)
    for name, more in (("fixed", {"team": "va", "preemptible": False}), ("other", {"team": "hb"})):
        request = Request(name, 4, nodes=2, **more)
        cluster.apply(Queued(request, 1.0, cluster.sequence + 1, 1.0))
    changes = allocator.schedule_pending(cluster, current)
    started = [change for change in changes if isinstance(change, Granted)]
    assert [change.lease.lease_id for change in started] == ["other"]
    assert {member.node for member in started[0].lease.members} == {"g", "h"}


def test_what_is_free_of_another_type_does_not_count_in_the_reason() -> None:
    cluster = of_two_types(Team("va", 8, {"A100": 8}))
    submit(cluster, Request("all", 8, gpu_types=("A100",)))
    request = Request("fixed", 1, team="va", preemptible=False)
    assert refused(cluster, request) == ("no_capacity", "no server with 1 A100: none is free anywhere")
    assert refused(cluster, replace(request, preemptible=True))[0] == "behind_queue"


def test_a_job_that_only_fits_outside_its_teams_guarantee_waits_for_the_quota() -> None:
    """It could start once another of its team has ended, so it is not said that it never fits."""
    cluster = of_two_types(Team("va", 16, {"A100": 8, "H100": 8}))
    submit(cluster, Request("held", 8, team="va", preemptible=False, gpu_types=("H100",)))
    request = Request("fixed", 1, team="va", preemptible=False, required_node="h")
    assert refused(cluster, request) == (
        "quota",
        "team va is guaranteed 8 H100 and holds 8 for jobs that are not preemptible: 1 more exceeds it; a "
        "preemptible job may use what is free beyond that",
    )
    submit(cluster, request)
    cluster.apply(*lease_steps.release(cluster, "held", 2.0))
    cluster.apply(*allocator.schedule_pending(cluster, SchedulingPass(first_fit, fifo, 3.0)))
    assert cluster.leases["fixed"].placement.node == "h"


def test_what_is_held_outside_the_guarantee_is_said_where_it_uses_that_up() -> None:
    cluster = of_two_types()
    submit(cluster, Request("held", 8, team="va", preemptible=False, gpu_types=("H100",)))
    cluster.apply(TeamsChanged(Teams((Team("va", 8, {"A100": 8}),), preemption=True), 0.0))
    _, detail = refused(cluster, Request("more", 1, team="va", preemptible=False))
    assert detail.startswith("team va is guaranteed 8 GPUs and holds 8 for jobs that are not preemptible: 1")


def test_preemptible_jobs_use_up_no_guarantee_of_a_type_for_those_that_are_not() -> None:
    """It was refused with "is guaranteed 8 A100 and holds 0 for jobs that are not preemptible: 1 exceeds"."""
    cluster = of_two_types(Team("va", 8, {"A100": 8}))
    cluster.apply(InventoryChanged(tuple(replace(state.node, gpus=GPUS) for state in cluster.nodes), 0.0))
    submit(cluster, Request("lent", 8, team="va"))
    submit(cluster, Request("own", 8, team="va", preemptible=False))
    assert set(cluster.leases) == {"lent", "own"}
    assert refused(cluster, Request("more", 1, team="va", preemptible=False)) == (
        "quota",
        "team va is guaranteed 8 A100 and holds 8 for jobs that are not preemptible: 1 more exceeds it; a "
        "preemptible job may use what is free beyond that",
    )


def test_all_teams_up_the_tree_must_have_guarantee_left_of_one_type() -> None:
    cluster = of_two_types(
        Team("lab", 4, {"A100": 2, "H100": 2}), Team("y", 2, {"A100": 1, "H100": 1}, parent="lab")
    )
    submit(cluster, Request("lab", 2, team="lab", preemptible=False, gpu_types=("H100",)))
    submit(cluster, Request("first", 1, team="y", preemptible=False))
    assert cluster.leases["first"].placement.node == "a"
    rest = "for jobs that are not preemptible: 1 more exceeds it; a preemptible job may use what is free"
    assert refused(cluster, Request("second", 1, team="y", preemptible=False)) == (
        "quota",
        f"team lab is guaranteed 2 H100 and holds 2 {rest} beyond that",
    )


def test_behind_a_request_that_does_not_fit_a_guaranteed_one_of_another_team_goes_on() -> None:
    cluster = ClusterState(nodes("ab", 4))
    rules = Teams((Team("vision", 4), Team("nlp", 4)))
    cluster.apply(TeamsChanged(rules, 0.0))
    for name in ("x", "y"):  # each takes two GPUs of a server
        submit(cluster, Request(name, 2, team="other", required_node={"x": "a", "y": "b"}[name]))
    submit(cluster, Request("big", 4, team="vision"))
    submit(cluster, Request("borrowed", 1, team="other"))
    submit(cluster, Request("second", 1, team="vision"))
    submit(cluster, Request("promised", 2, team="nlp"))
    assert set(cluster.leases) == {"x", "y", "promised"}
    assert set(cluster.pending) == {"big", "borrowed", "second"}


def test_weights_divide_the_whole_down_the_tree() -> None:
    cluster = cluster_of(Team("r", weight=3), Team("a", weight=2, parent="r"), Team("b", parent="r"))
    assert cluster.ledger is not None
    assert shares_by_weight(cluster.ledger) == {"r": 0.75, "a": 0.5, "b": 0.25, "": 0.25}


def test_without_any_weight_nobody_has_a_share() -> None:
    cluster = cluster_of(Team("", weight=0), Team("a", weight=0))
    assert cluster.ledger is not None
    assert shares_by_weight(cluster.ledger) == {"": 0.0, "a": 0.0}


def test_fair_share_reads_the_weights() -> None:
    cluster = cluster_of(Team("vision", weight=3), gpus=4)
    submit(cluster, Request("all", 4, team="third"))
    for number in range(4):
        for team in ("nlp", "vision"):
            request = Request(f"{team}-{number}", 1, team=team)
            cluster.apply(Queued(request, 1.0, cluster.sequence + 1, 1.0))
    changes = allocator.with_dispatch(
        cluster,
        lease_steps.release(cluster, "all", 2.0),
        SchedulingPass(first_fit, get_order("fair_share"), 2.0),
    )
    started = [change.lease.request.team for change in changes if isinstance(change, Granted)]
    assert sorted(started) == ["nlp", "vision", "vision", "vision"]


@pytest.mark.parametrize(
    ("accepts", "asked", "inside"),
    [
        ((), 1, ["A100"]),
        ((), 2, ["A100"]),
        ((), 3, []),
        (("A100", "H100"), 2, ["A100"]),
        (("H100",), 1, []),
        (("V100",), 1, []),  # no guarantee of that type
        (("V100",), 0, ["V100"]),
        (("V100", "H100"), 0, ["V100", "H100"]),
    ],
)
def test_the_types_of_which_a_team_stays_inside_its_guarantee(
    accepts: tuple[str, ...], asked: int, inside: list[str]
) -> None:
    account = Account(Team("vision", 5, guaranteed_by_type={"A100": 4, "H100": 1}))
    account.by_type = {"A100": 2000, "H100": 1000}
    request = Request("x", asked, gpu_types=accepts)
    assert types_inside(account, request, 1000 * asked, account.by_type) == inside


@pytest.mark.parametrize(
    ("team", "gpus", "blocked", "goes_on"),
    [
        ("vision", 1, {"nlp"}, True),
        ("vision", 2, {"nlp"}, True),
        ("vision", 3, {"nlp"}, False),  # beyond its guarantee
        ("vision", 1, {"nlp", "vision"}, False),  # behind one of its own
        ("train", 1, {"nlp"}, True),
        ("train", 2, {"nlp"}, False),  # inside its own guarantee, not inside its parent's
        ("nlp", 1, {"vision"}, False),
        ("unnamed", 1, {"nlp"}, False),
    ],
)
def test_only_a_request_inside_all_guarantees_above_it_goes_on_behind_another_teams(
    team: str, gpus: int, blocked: set[str], goes_on: bool
) -> None:
    teams = (Team("vision", 2), Team("lab", 1), Team("train", 2, parent="lab"), Team("nlp"))
    ledger = TeamLedger(Teams(teams), (), {})
    request = Request("x", gpus, team=team)
    assert passes(ledger, request, blocked) == may_start(ledger, request, blocked) == goes_on
    assert may_start(ledger, request, ())
    assert not passes(TeamLedger(Teams(preemption=True), (), {}), replace(request, gpus=0), blocked)


def test_teams_above_each_other_are_inside_their_guarantees_of_one_type() -> None:
    """Each was inside its own, of another type, and let the request go on with GPUs outside one of them."""
    teams = (Team("lab", 2, {"A100": 1, "H100": 1}), Team("train", 1, {"H100": 1}, parent="lab"))
    ledger = of_two_types(*teams).ledger
    assert ledger is not None
    request = Request("x", 1, team="train")
    assert passes(ledger, request, {"nlp"})
    ledger.named("lab").by_type["H100"] = ledger.named("lab").allocated = 1000
    assert not passes(ledger, request, {"nlp"})


def test_behind_another_teams_request_only_types_inside_the_guarantee_are_taken() -> None:
    """Inside that of H100, all of which were busy, it took the A100 that the one ahead waited for."""
    cluster = of_two_types(Team("x", 4, {"A100": 2, "H100": 2}), Team("y", 4, {"A100": 4}))
    submit(cluster, Request("lent", 8, team="other", gpu_types=("H100",)))
    submit(cluster, Request("x", 2, team="x", gpu_types=("A100",)))
    submit(cluster, Request("others", 5, team="other", gpu_types=("A100",)))
    submit(cluster, Request("ahead", 2, team="y", gpu_types=("A100",)))
    submit(cluster, Request("behind", 1, team="x"))
    assert set(cluster.pending) == {"ahead", "behind"}
    current = SchedulingPass(first_fit, fifo, 2.0)
    cluster.apply(*allocator.with_dispatch(cluster, lease_steps.release(cluster, "lent", 2.0), current))
    assert set(cluster.pending) == {"ahead"}
    assert cluster.leases["behind"].placement.node == "h"


def test_a_limit_is_that_of_the_requests_own_team_and_may_be_reached() -> None:
    cluster = cluster_of(Team("vision", limit=4), Team("nlp", limit=1))
    ledger = cluster.ledger
    assert ledger is not None
    submit(cluster, Request("held", 3, team="vision"))
    assert stop_of(ledger, Request("x", 1, team="vision")) is None
    assert stop_of(ledger, Request("x", 2, team="vision")) == Stop(StopKind.LIMIT, ledger.named("vision"))
    assert stop_of(ledger, Request("y", 1, team="nlp")) is None


def test_a_runtime_of_exactly_the_longest_is_no_reason() -> None:
    ledger = TeamLedger(Teams((Team("vision", max_runtime_s=100.0),)), (), {})
    asked = Request("x", 1, team="vision", expected_runtime_s=100.0)
    assert stop_of(ledger, asked) is None
    longer = replace(asked, expected_runtime_s=100.5)
    assert stop_of(ledger, longer) == Stop(StopKind.RUNTIME, ledger.named("vision"))


def test_a_guarantee_that_is_used_up_is_the_rule_that_stops_a_job_that_must_not_be_preempted() -> None:
    ledger = TeamLedger(Teams((Team("vision", 1),), preemption=True), (), {})
    asked = Request("x", 2, team="vision", preemptible=False)
    assert stop_of(ledger, asked) == Stop(StopKind.GUARANTEE, ledger.named("vision"))


def test_who_goes_on_inside_a_guarantee_is_not_said_to_wait_for_who_is_ahead() -> None:
    cluster = cluster_of(Team("vision", 12), Team("nlp", 3), gpus=16)
    submit(cluster, Request("borrowed", 12, resources={"cpus": 10}))
    submit(cluster, Request("own", 1, team="nlp"))
    submit(cluster, Request("large", 4, team="vision"))
    inside, beyond = (Request(f"of-{gpus}", gpus, team="nlp") for gpus in (2, 3))
    assert refused(cluster, inside) == ("behind_queue", "3 GPUs are free on a; it fits by now, ask again")
    assert "; reserved for large" in refused(cluster, beyond)[1]
    submit(cluster, Request("colleague", 1, team="nlp", resources={"cpus": 60}))
    assert "; reserved for large" in refused(cluster, inside)[1]
    submit(cluster, inside)
    assert list(cluster.leases) == ["borrowed", "own"]


def test_a_colleague_that_waits_for_a_server_to_open_is_not_said_to_be_ahead() -> None:
    cluster = ClusterState(nodes("ab", 16, 64))
    cluster.apply(TeamsChanged(Teams((Team("vision", 24), Team("nlp", 3)), False), 0.0))
    cluster.apply(Drained("b", 0.0))
    submit(cluster, Request("borrowed", 14))
    submit(cluster, Request("large", 3, team="vision"))
    submit(cluster, Request("closed", 1, team="nlp", required_node="b"))
    inside = Request("inside", 1, team="nlp")
    assert refused(cluster, inside)[1].startswith("2 GPUs are free on a; it fits by now")
    submit(cluster, inside)
    assert "inside" in cluster.leases
