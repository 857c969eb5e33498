"""A few seeded runs of the fault matrix, proof that its checker finds bugs, and the checker's own cases.

All seeds: `python -m tests.faults.run --seeds 200`; one again, with its schedule: `--seed 17`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from resource_manager import STORED_FORMAT
from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    Granted,
    MembersReleased,
    Preempting,
    Queued,
    Released,
    TeamsChanged,
)
from resource_manager.core.changes import Outcome as LeaseOutcome
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Placement, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import NewerFormatError
from resource_manager.manager.cluster_file.servers import default_inventory
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.storage.redis.client import RedisClient
from tests.faults.access_paths import ACCESS_PATHS
from tests.faults.bugs import BUGS, OF_AGENTS, OF_PREEMPTION, OF_TERMINALS
from tests.faults.checker import Operation, check, check_beliefs, check_older
from tests.faults.commit_points import POINTS
from tests.faults.members import Members
from tests.faults.namespaces import what_is_missing
from tests.faults.preemptions import Preemptions
from tests.faults.run import run_seed
from tests.redis_server import RedisServer


def at_the_end(*cases: Any) -> list[Any]:
    """Return cases that run with the end-to-end tests."""
    return [pytest.param(case, marks=pytest.mark.e2e) for case in cases]


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 3, *at_the_end(2, 4, 8)])
def test_a_seed_of_the_matrix_breaks_no_promise(seed: int) -> None:
    outcome = run_seed(seed)
    assert outcome.complaints == []
    assert outcome.operations > 50
    assert outcome.granted > 5
    assert outcome.faults.total() > 3


@pytest.mark.slow
def test_processes_killed_in_their_commits_lose_and_double_nothing() -> None:
    outcome = run_seed(5, seconds=3.0, kinds=("repeat requests",), halting=1.0, halts=("killed",))
    assert outcome.complaints == []
    assert outcome.lost_leases == 0
    assert any(name.startswith("killed at a commit") for name in outcome.faults)


@pytest.mark.e2e
@pytest.mark.parametrize("halt", ["killed", "stopped"])
def test_a_process_halted_at_any_point_of_a_commit_loses_and_doubles_nothing(halt: str) -> None:
    not_yet = {f"{halt} at a commit, {point}" for point in POINTS["redis"]}
    for seed in range(5, 10):  # the first is enough, unless the machine does little in its seconds
        outcome = run_seed(seed, kinds=("repeat requests",), halting=1.0, halts=(halt,))
        assert outcome.complaints == []
        assert outcome.lost_leases == 0
        not_yet -= set(outcome.faults)
        if not not_yet:
            break
    assert not not_yet


@pytest.mark.e2e
@pytest.mark.skipif(bool(what_is_missing()), reason=what_is_missing())
def test_links_of_the_kernel_that_go_down_and_lose_packets_break_no_promise() -> None:
    outcome = run_seed(6, setting="namespaces", kinds=("link down", "packet loss"), seconds=3.0)
    assert outcome.complaints == []
    assert outcome.granted > 5


@pytest.mark.slow
def test_sixteen_processes_killed_in_the_middle_lose_and_double_nothing() -> None:
    outcome = run_seed(1, workers=16, seconds=6.0, kinds=("kill worker",))
    assert outcome.complaints == []
    assert outcome.faults["kill worker"] > 5
    assert outcome.lost_leases == 0


@pytest.mark.slow
def test_awaited_requests_cancelled_on_their_way_break_no_promise() -> None:
    outcome = run_seed(8, access_paths=("asyncio",), kinds=("delay", "kill worker"), seconds=3.0)
    assert outcome.complaints == []
    assert outcome.cancelled > 5
    assert outcome.granted > 5


QUICKLY_FOUND = ("lost release", "no fencing", "no remainder", "no version check")
"""Within a seed or two; a bug of preemption may take all eight."""

PLANTED = sorted(BUGS.keys() - {"no lock", *OF_TERMINALS, *OF_AGENTS})


@pytest.mark.slow
@pytest.mark.parametrize(
    ("bug", "access_path"),
    [
        pytest.param(
            bug,
            access_path,
            marks=() if access_path == "threads" and bug in QUICKLY_FOUND else pytest.mark.e2e,
        )
        for bug in PLANTED
        for access_path in sorted(ACCESS_PATHS)
    ],
)
def test_a_planted_bug_is_found(bug: str, access_path: str) -> None:
    preemption = bug in OF_PREEMPTION
    seconds = 6.0 if preemption else 3.0  # a victim must end, wait and be granted again
    assert any(
        run_seed(
            seed, bug=bug, access_paths=(access_path,), seconds=seconds, preemption=preemption
        ).complaints
        for seed in range(8)
    )


def test_an_older_build_that_decides_or_does_not_renew_is_found() -> None:
    unknown = {"error": "NewerFormatError('upgrade it')"}

    def asked(kind: str, answer: dict[str, Any]) -> Operation:
        return Operation("1.77.3", kind, "w1-0", 1.0, {}, 2.0, answer)

    fine = [
        asked("renew", {"result": "renewed"}),
        asked("release", {"result": "gone"}),
        asked("submit", unknown),
    ]
    assert check_older(fine) == []
    assert fine[0].pid == 77
    [granted] = check_older([asked("allocate", {"result": "granted"})])
    assert "of an older build answered" in granted
    [refused] = check_older([asked("renew", unknown)])
    assert "of an older build did not renew a lease" in refused


def test_beside_a_newer_version_an_older_one_refuses_in_one_line_and_writes_nothing(
    embedded_redis: RedisServer,
) -> None:
    """The newer one writes its format first, as docs/upgrading.md has it; the older ones are running."""
    url = embedded_redis.fresh_url()
    with GPUResourceManager.from_url(url, inventory=default_inventory()) as older:
        assert older.allocate_resources("a", 2, 4)
        client = RedisClient.from_url(url)
        client.driver.hset(client.key("meta"), "format", str(STORED_FORMAT + 1))
        before = contents(client)
        calls: list[Callable[[], object]] = [
            lambda: older.allocate_resources("b", 2, 4),
            lambda: older.submit("b", 2, 4),
            lambda: older.renew("a"),
            lambda: older.release_resources("a"),
            lambda: older.drain("gpu-server-0"),
            older.reset_resources,
            older.expire_and_schedule,
            lambda: GPUResourceManager.from_url(url).release_resources("a"),
        ]
        for call in calls:
            with pytest.raises(NewerFormatError, match="upgrade") as refusal:
                call()
            assert "\n" not in str(refusal.value)
        assert contents(client) == before
        client.close()


def contents(client: RedisClient) -> dict[Any, Any]:
    """All that is stored, but for the lock, which a reset takes before it looks."""
    return {key: client.driver.dump(key) for key in client.driver.scan_iter() if b":lock" not in key}


# ---- the checker itself, on records made by hand: each promise broken once ----

REQUEST = Request("a", 2, resources={"cpus": 4}, ttl_s=10.0)


def lease(task_id: str, token: int, gpu_ids: tuple[int, ...] = (0, 1), at: float = 0.0) -> Lease:
    request = Request(task_id, len(gpu_ids), resources={"cpus": 4}, ttl_s=10.0)
    return Lease(request, (Placement("gpu-server-0", gpu_ids),), token, at, at + 10.0)


def told(task_id: str, begin: float, end: float, granted: Lease | None) -> Operation:
    answer: dict[str, Any] = {"result": "none"}
    if granted is not None:
        answer = {
            "result": "granted",
            "members": [
                {
                    "rank": rank,
                    "server_name": member.node,
                    "gpu_ids": list(member.gpu_ids),
                    "port": member.port,
                }
                for rank, member in granted.ranked
            ],
            "fencing_token": granted.fencing_token,
            "expires_at": granted.expires_at,
        }
    return Operation(f"{task_id}{begin}", "allocate", task_id, begin, {"gpus": 2, "cpus": 4}, end, answer)


def released(task_id: str, token: int, begin: float, end: float, result: str = "released") -> Operation:
    asked = {"fencing_token": token}
    return Operation(f"{task_id}{begin}", "release", task_id, begin, asked, end, {"result": result})


def complaints(operations: list[Operation], changes: list[Change], servers: int = 1) -> list[str]:
    history = list(enumerate(changes, 1))
    return check(default_inventory(servers), operations, history, wall_minus_monotonic_s=0.0)


def test_a_good_record_has_no_complaint() -> None:
    a, b = lease("a", 1), lease("b", 2)
    operations = [told("a", 0, 1, a), released("a", 1, 2, 3), told("b", 2.5, 4, b)]
    assert complaints(operations, [Granted(a, 0), Released("a", 1, 2), Granted(b, 3)]) == []


def test_a_gpu_granted_twice_is_found() -> None:
    a, b = lease("a", 1), lease("b", 2)
    found = complaints([told("a", 0, 1, a), told("b", 2, 3, b)], [Granted(a, 0), Granted(b, 2)])
    assert any("not legal" in complaint for complaint in found)
    assert any("was held by" in complaint for complaint in found)


def test_an_owner_believes_in_the_end_that_it_was_told_last() -> None:
    """After a jump back of the store's clock a renewal ends sooner than the grant said."""
    a, b = replace(lease("a", 1), expires_at=3610.0), lease("b", 2, at=20.0)
    renewed = {"result": "renewed", "expires_at": 12.0}
    renewal = Operation("a2", "renew", "a", 2, {"fencing_token": 1}, 3, renewed)
    asked = [told("a", 0, 1, a), renewal, told("b", 20, 21, b)]
    assert check_beliefs(asked, 0.0) == []
    assert check_beliefs([asked[0], asked[2]], 0.0) != []
    late = replace(renewal, begin=0.5)
    assert check_beliefs([asked[0], late, asked[2]], 0.0) != [], "either may have been told last"


def test_an_answer_that_is_not_in_the_history_is_found() -> None:
    found = complaints([told("a", 0, 1, lease("a", 1))], [])
    assert any("not in the history" in complaint for complaint in found)


def test_a_release_that_never_happened_is_found() -> None:
    a = lease("a", 1)
    found = complaints([told("a", 0, 1, a), released("a", 1, 2, 3)], [Granted(a, 0)])
    assert any("release of a" in complaint for complaint in found)


def test_an_order_against_the_clock_is_found() -> None:
    a, b = lease("a", 1), lease("b", 2, (2, 3))
    operations = [told("a", 5, 6, a), told("b", 1, 2, b)]
    found = complaints(operations, [Granted(a, 0), Granted(b, 0)])
    assert any("before it can have been made" in complaint for complaint in found)


def test_a_refusal_that_no_state_explains_is_found() -> None:
    assert complaints([told("a", 0, 1, None)], []), "an empty server has room"
    full = lease("b", 1, tuple(range(8)))
    assert complaints([told("b", 0, 1, full), told("a", 2, 3, None)], [Granted(full, 0)]) == []


def test_a_lease_ended_before_its_time_is_found() -> None:
    a = lease("a", 1)
    found = complaints([told("a", 0, 1, a)], [Granted(a, 0), Expired("a", 1, 4.0)])
    assert any("before its end" in complaint for complaint in found)


def test_a_lost_lease_is_found() -> None:
    a = lease("a", 1)
    found = complaints([told("a", 0, 1, a), released("a", 1, 2, 3, "gone")], [Granted(a, 0)])
    assert any("no state" in complaint for complaint in found)


def asked(kind: str, begin: float, end: float, result: str) -> Operation:
    return Operation(f"{kind}{begin}", kind, "a", begin, {"gpus": 2, "cpus": 4}, end, {"result": result})


def test_a_wait_in_the_queue_has_no_complaint() -> None:
    full, a = lease("b", 1, tuple(range(8))), lease("a", 2)
    operations = [told("b", 0, 1, full), asked("submit", 2, 3, "waiting"), released("b", 1, 4, 5)]
    operations.append(Operation("s", "status", "a", 6, {}, 7, told("a", 6, 7, a).answer))
    changes: list[Change] = [Granted(full, 0), Queued(REQUEST, 2, 1, 2), Released("b", 1, 4), Granted(a, 4)]
    assert complaints(operations, changes) == []


def test_a_grant_from_the_queue_after_its_cancellation_is_found() -> None:
    full, a = lease("b", 1, tuple(range(8))), lease("a", 2)
    operations = [told("b", 0, 1, full), asked("submit", 2, 3, "waiting"), asked("cancel", 4, 5, "cancelled")]
    operations.append(released("b", 1, 6, 7))
    changes: list[Change] = [
        Granted(full, 0),
        Queued(REQUEST, 2, 1, 2),
        Cancelled("a", 4),
        Released("b", 1, 6),
        Granted(a, 6),
    ]
    assert any("nobody was asking" in complaint for complaint in complaints(operations, changes))


def test_a_cancellation_that_never_happened_is_found() -> None:
    full = lease("b", 1, tuple(range(8)))
    operations = [told("b", 0, 1, full), asked("submit", 2, 3, "waiting"), asked("cancel", 4, 5, "cancelled")]
    assert any(
        "answered as cancelled" in found
        for found in complaints(operations, [Granted(full, 0), Queued(REQUEST, 2, 1, 2)])
    )


def test_a_wait_that_was_forgotten_is_found() -> None:
    full = lease("b", 1, tuple(range(8)))
    operations = [told("b", 0, 1, full), asked("submit", 2, 3, "waiting"), asked("status", 4, 5, "absent")]
    assert any(
        "status of a" in found
        for found in complaints(operations, [Granted(full, 0), Queued(REQUEST, 2, 1, 2)])
    )


def test_a_fencing_number_given_out_twice_is_found() -> None:
    a, again = lease("a", 1), lease("a", 1)
    operations = [told("a", 0, 1, a), released("a", 1, 2, 3), told("a", 4, 5, again)]
    found = complaints(operations, [Granted(a, 0), Released("a", 1, 2), Granted(again, 4)])
    assert any("did not grow" in complaint for complaint in found)


# ---- the same of preempted leases ----

VICTIM = lease("v", 1, tuple(range(8)))
TAKER = replace(
    lease("p", 2, tuple(range(8)), at=4), request=replace(VICTIM.request, lease_id="p", priority=1)
)
AGAIN = replace(VICTIM.request, labels={"restart_count": "1"})
PREEMPTED: list[Change] = [
    Granted(VICTIM, 0),
    Queued(TAKER.request, 2, 1, 2),
    Preempting("v", 1, "p", 9, 3),
    Released("v", 1, 4, outcome=LeaseOutcome.PREEMPTED),
    Queued(AGAIN, 0, 0, 4),
    Granted(TAKER, 4),
    Released("p", 2, 5),
    Granted(replace(VICTIM, request=AGAIN, fencing_token=3, queued_at=0), 5),
]


LOST = "v lost its place in the queue when it was preempted"


def followed(changes: list[Change]) -> list[str]:
    """Return what the changes break of the promises to preempted leases."""
    cluster, preemptions = ClusterState(default_inventory(1)), Preemptions()
    found: list[str] = []
    for change in changes:
        found += preemptions.follow(cluster, change)
        cluster.apply(change)
    return found


def changed(place: int, **values: Any) -> list[Change]:
    """Return the history with one change of it otherwise."""
    return [*PREEMPTED[:place], replace(PREEMPTED[place], **values), *PREEMPTED[place + 1 :]]


def test_a_preempted_lease_that_goes_on_has_no_complaint() -> None:
    assert followed(PREEMPTED) == []


@pytest.mark.parametrize(("at", "is_late"), [(10, False), (90_000, True)])
def test_a_lease_that_goes_on_for_long_after_its_preemption_was_taken_back_waits_at_the_end(
    at: int, is_late: bool
) -> None:
    history = [*PREEMPTED[:3], Cancelled("p", 3), Preempting("v", 1, "", 9, 3)]
    ended = Released("v", 1, at, outcome=LeaseOutcome.PREEMPTED)
    assert followed([*history, ended, Queued(AGAIN, at, 2, at)]) == ([] if is_late else [LOST])
    assert followed([*history, ended, Queued(AGAIN, 0, 0, at)]) == ([LOST] if is_late else [])


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        (changed(1, request=replace(TAKER.request, priority=0)), "no more urgent"),
        (changed(2, preemptor="nobody"), "which does not wait"),
        ([*PREEMPTED[:3], PREEMPTED[2]], "is so already"),
        ([*PREEMPTED[:4], PREEMPTED[5]], "v was preempted and lost"),
        (changed(4, queued_at=4.0), "v lost its place"),
        (changed(4, request=VICTIM.request)[:5], "v was preempted 1 times, and is told of 0"),
        (changed(7, lease=replace(VICTIM, fencing_token=3)), "v was preempted 1 times, and is told of 0"),
    ],
)
def test_a_promise_to_a_preempted_lease_that_is_broken_is_found(changes: list[Change], what: str) -> None:
    found = followed(changes)
    assert any(what in complaint for complaint in found), found


def taken_from(*teams: Team, already: str = "") -> list[str]:
    """Return the complaints about a GPU of nlp, which holds two, that is taken for vision."""
    held = [
        replace(lease(name, token, (token,)), request=Request(name, 1, team="nlp"))
        for token, name in enumerate(("v", "w"), 1)
    ]
    changes: list[Change] = [
        TeamsChanged(Teams(teams, True), 0),
        *(Granted(each, 0) for each in held),
        *(Queued(Request(name, 1, team="vision"), 2, number, 2) for number, name in enumerate("pq", 1)),
        *([Preempting("w", 2, "q", 9, 3)] if already else []),
        Preempting("v", 1, "p", 9, 3),
    ]
    return followed(changes)


@pytest.mark.parametrize(
    ("nlp", "already", "broken"),
    [
        ([Team("nlp", 2)], "", "nlp"),
        ([Team("nlp", 1)], "", ""),
        ([Team("nlp", 1)], "w", "nlp"),  # the other one is ending: it does not count
        ([Team("top", 2), Team("nlp", 0, parent="top")], "", "top"),
        ([Team("top", 1), Team("nlp", 2, parent="top")], "", ""),  # a child's counts as far as its parent's
        ([], "", ""),
    ],
)
def test_a_lease_taken_of_a_team_inside_its_guarantee_is_found(
    nlp: list[Team], already: str, broken: str
) -> None:
    found = [each for each in taken_from(Team("vision", 8), *nlp, already=already) if each.startswith("v ")]
    assert found == ([f"v is preempted although team {broken} is inside its guarantee"] if broken else [])


def test_a_preemption_that_is_taken_back_from_who_waits_is_found() -> None:
    preempting = PREEMPTED[2]
    assert isinstance(preempting, Preempting)
    back = replace(preempting, preemptor="")
    assert "is taken back, and p waits" in followed([*PREEMPTED[:3], back])[0]
    assert "it is not preempted" in followed([*PREEMPTED[:2], back])[0]
    assert followed([*PREEMPTED[:3], Cancelled("p", 4), back]) == []
    assert followed([*PREEMPTED[:3], Cancelled("p", 4), back, *PREEMPTED[3:5]]) == []


def test_an_answer_with_another_number_of_restarts_is_found() -> None:
    a = lease("a", 1)
    answered = told("a", 0, 1, a)
    answered.answer["restarts"] = 1
    assert any("was preempted 0 times before" in found for found in complaints([answered], [Granted(a, 0)]))


# ---- the same of gangs ----


def gang(token: int, *gpu_ids: int, port: int = 29500, at: float = 0.0) -> Lease:
    """A gang of one member a server, each with two GPUs from that id on."""
    request = Request("g", 2, resources={"cpus": 4}, ttl_s=10.0, nodes=2)
    members = (
        Placement(f"gpu-server-{rank}", (gpu_id, gpu_id + 1), port=0 if rank else port)
        for rank, gpu_id in enumerate(gpu_ids)
    )
    return Lease(request, tuple(members), token, at, at + 10.0)


def told_gang(begin: float, granted: Lease) -> Operation:
    operation = told("g", begin, begin + 1, granted)
    operation.asked |= {"nodes": 2, "spread": "servers"}
    return operation


def released_some(begin: float, *ranks: int, result: str = "released") -> Operation:
    asked = {"fencing_token": 1, "ranks": list(ranks)}
    return Operation(f"m{begin}", "release_members", "g", begin, asked, begin + 1, {"result": result})


def listed(begin: float, *leases: Lease) -> Operation:
    views = [
        {**told(held.lease_id, 0, 1, held).answer, "task_id": held.lease_id, "fencing_token": 1}
        for held in leases
    ]
    answer = {"result": "listed", "leases": views}
    return Operation(f"l{begin}", "leases", "", begin, {}, begin + 1, answer)


def test_a_gang_whose_members_end_one_by_one_has_no_complaint() -> None:
    g, again = gang(1, 0, 0), gang(2, 0, 2, port=29501, at=4)
    rest = g.without({0})
    assert rest is not None
    operations = [
        told_gang(0, g),
        listed(1.5, g),
        released_some(3, 0),
        listed(4.5, rest),
        told_gang(6, again),
        released_some(8, 0, result="gone"),
        released("g", 1, 10, 11),
        released("g", 1, 12, 13, "gone"),
    ]
    changes: list[Change] = [Granted(g, 0), ended(0, at=3), Granted(again, 6), ended(1, at=10)]
    assert complaints(operations, changes, servers=2) == []


def ended(*ranks: int, at: float) -> MembersReleased:
    return MembersReleased("g", 1, ranks, at)


HALF = gang(1, 0)
SHARED = replace(gang(1, 0, 0), members=(Placement("gpu-server-0", (0, 1), port=1),) * 2)


@pytest.mark.parametrize(
    ("operations", "changes", "what"),
    [
        ([told_gang(0, HALF)], [Granted(HALF, 0)], "not all that it asked for"),
        ([told_gang(0, SHARED)], [Granted(SHARED, 0)], "several members on a server"),
        ([told_gang(0, SHARED)], [Granted(SHARED, 0)], "has two holders"),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0), told_gang(4, gang(2, 0, 1))],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2), Granted(gang(2, 0, 1), 4)],
            "GPU 1 of gpu-server-1 has two holders: ('g', 1, 1)",
        ),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 1), told_gang(4, gang(2, 2, 2))],
            [Granted(gang(1, 0, 0), 0), ended(1, at=2), Granted(gang(2, 2, 2), 4)],
            "port 29500 of gpu-server-0 is of",
        ),
        ([told_gang(0, gang(1, 0, 0, port=0))], [Granted(gang(1, 0, 0, port=0), 0)], "got the ports [0, 0]"),
        (
            [told_gang(0, gang(1, 0, 0)), told_gang(2, gang(1, 0, 2))],
            [Granted(gang(1, 0, 0), 0)],
            "then {",
        ),
        ([told_gang(0, gang(1, 0, 2))], [Granted(gang(1, 0, 0), 0)], "was answered to have"),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0)],
            [Granted(gang(1, 0, 0), 0), Released("g", 1, 2)],
            "not in the history",
        ),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0), released_some(2.5, 0)],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2.7)],
            "2 were told that it was they",
        ),
        (
            [told_gang(0, gang(1, 0, 0))],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2)],
            "which nobody asked for",
        ),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0), listed(4, gang(1, 0, 0))],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2)],
            "leases of  answered",
        ),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0), released_some(4, 1, result="gone")],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2)],
            "no state between",
        ),
        (
            [told_gang(0, gang(1, 0, 0)), released_some(2, 0), released_some(4, 0)],
            [Granted(gang(1, 0, 0), 0), ended(0, at=2), ended(0, at=4)],
            "of which it held [1]",
        ),
    ],
)
def test_a_promise_to_a_gang_that_is_broken_is_found(
    operations: list[Operation], changes: list[Change], what: str
) -> None:
    found = complaints(operations, changes, servers=2)
    assert any(what in complaint for complaint in found), found


def test_a_member_without_its_lease_is_found() -> None:
    g = gang(1, 0, 0)
    cluster, members = ClusterState(default_inventory(2)), Members()
    cluster.apply(Granted(g, 0))
    assert list(members.follow(1, Granted(g, 0))) == []
    assert members.agrees(cluster)
    del cluster.node("gpu-server-1").leases["g"]
    assert not members.agrees(cluster)
    cluster.node("gpu-server-1").leases["g"] = g
    del cluster.leases["g"]
    assert not members.agrees(cluster)


def test_a_gang_is_refused_only_where_its_members_do_not_fit() -> None:
    refused = Operation("g0", "allocate", "g", 2, {"gpus": 2, "cpus": 4, "nodes": 2}, 3, {"result": "none"})
    full = lease("b", 1, tuple(range(8)))
    assert complaints([told("b", 0, 1, full), refused], [Granted(full, 0)], servers=2) == []
    assert complaints([told("b", 0, 1, full), refused], [Granted(full, 0)], servers=3)
    refused.asked["spread"] = "pack"
    assert complaints([told("b", 0, 1, full), refused], [Granted(full, 0)], servers=2)
