"""Words of a caller that would take it past the queue, its longest runtime or the others' priorities."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from click.testing import CliRunner
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager, MemoryStore, Settings
from resource_manager.cli.program import main
from resource_manager.errors import PriorityError
from resource_manager.manager.cluster_file.sections import ClusterForm
from resource_manager.rest.tokens import Role
from tests.builders import Clock

AsRole = Callable[..., FlaskClient]
ALL = {"required_gpus": 8, "required_cpus": 1, "server": 0}


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def manager(clock: Clock) -> GPUResourceManager:
    return GPUResourceManager(Settings(store="memory://"), store=MemoryStore(clock=clock))


def holder(manager: GPUResourceManager) -> str:
    """Return who holds the first server."""
    leases: list[Any] = [lease for lease in manager.leases() if lease["server_id"] == 0]
    return str(leases[0]["task_id"])


# ---- never started ----


def test_the_old_place_is_kept_once(manager: GPUResourceManager, clock: Clock) -> None:
    """Eve was granted again at once, as often as she liked, ahead of all who waited."""
    manager.submit("eve", 8, server=0)
    clock.now += 1
    manager.submit("ada", 8, server=0)
    manager.release("eve", outcome="NOT_STARTED")
    assert holder(manager) == "eve"
    manager.release("eve", outcome="NOT_STARTED")
    assert holder(manager) == "ada"
    (entry,) = manager.queue()
    assert (entry["task_id"], entry["queued_at"]) == ("eve", clock.now)


def test_the_old_place_is_kept_soon_after_the_grant_only(manager: GPUResourceManager, clock: Clock) -> None:
    manager.submit("eve", 8, server=0)
    manager.submit("ada", 8, server=0)
    clock.now += 61
    manager.release("eve", outcome="NOT_STARTED")
    assert holder(manager) == "ada"


def test_the_runtime_used_counts_on(manager: GPUResourceManager, clock: Clock) -> None:
    """A lease that is given back again and again does not outlive the longest runtime of its team."""
    manager.apply(ClusterForm.model_validate({"teams": {"short": {"max_runtime": 100}}}))
    manager.submit("eve", 8, server=0, team="short", ttl=1000)
    clock.now += 70
    manager.release("eve", outcome="NOT_STARTED")
    (lease,) = manager.leases()
    assert lease["expires_at"] == clock.now + 15  # then its job is told, and has half of what is left
    clock.now += 29.5
    manager.release("eve", outcome="NOT_STARTED")
    assert (manager.leases(), manager.queue()) == ([], [])


# ---- quarantine ----


def test_a_user_holds_nothing_beyond_the_longest_runtime_by_a_quarantine(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    manager.apply(ClusterForm.model_validate({"teams": {"short": {"max_runtime": 100}}}))
    demand = {**ALL, "quarantine": True, "team": "short"}
    as_role(Role.USER, "eve").post("/api/allocate", json={"task_id": "eve", **demand})
    as_role(Role.OPERATOR).post("/api/allocate", json={"task_id": "root", **demand, "server": 1})
    clock.now += 101
    manager.expire_and_schedule()
    assert [(lease["task_id"], lease["state"]) for lease in manager.leases()] == [("root", "ERROR")]


def test_without_a_longest_runtime_a_users_lease_may_be_quarantined(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    """As that of a task group, whose processes may outlive what renewed it."""
    demand = {**ALL, "quarantine": True, "ttl": 60}
    as_role(Role.USER, "eve").post("/api/allocate", json={"task_id": "eve", **demand})
    clock.now += 61
    manager.expire_and_schedule()
    assert [(lease["task_id"], lease["state"]) for lease in manager.leases()] == [("eve", "ERROR")]


def test_the_lease_of_a_users_placed_job_is_quarantined(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    eve = as_role(Role.USER, "eve")
    lease = eve.post("/api/allocate", json={"task_id": "eve", **ALL, "ttl": 60}).json
    assert lease is not None
    place = {"launcher": "ssh", "address": "gpu-a", "machine": "m", "folder": "/f", "mark": "m", "user": "u"}
    body = {"task_id": "eve", "fencing_token": lease["fencing_token"], "places": [place]}
    assert eve.post("/api/place", json=body).status_code == 200
    clock.now += 61
    manager.expire_and_schedule()
    assert manager.leases()[0]["state"] == "ERROR"


# ---- priority ----


def test_a_user_states_no_priority_above_the_clusters(as_role: AsRole, manager: GPUResourceManager) -> None:
    """One gang with a million stopped every grant."""
    eve, operator = as_role(Role.USER, "eve"), as_role(Role.OPERATOR)
    body = {"task_id": "t", **ALL}
    for path in ("/api/submit", "/api/allocate"):
        refused = eve.post(path, json={**body, "priority": 1001})
        assert refused.status_code == 400
        assert refused.json["detail"] == (  # type: ignore[index]
            "priority must be at most 1000 (max_priority of the cluster), got 1001"
        )
    batch = {"requests": [{**body, "priority": 10**6}]}
    assert eve.post("/api/allocate/batch", json=batch).status_code == 400
    assert eve.post("/api/submit", json={**body, "priority": 1000}).status_code == 200
    assert operator.post("/api/submit", json={**body, "task_id": "o", "priority": 10**6}).status_code == 200


def test_a_team_may_have_another_bound(as_role: AsRole, manager: GPUResourceManager) -> None:
    teams = {"low": {"max_priority": 5}, "high": {"max_priority": 5000}}
    manager.apply(ClusterForm.model_validate({"teams": teams}))
    eve = as_role(Role.USER, "eve")

    def submit(team: str, priority: int) -> Any:
        body = {"task_id": f"{team}-{priority}", **ALL, "team": team, "priority": priority}
        return eve.post("/api/submit", json=body)

    assert [submit("low", 5).status_code, submit("high", 5000).status_code] == [200, 200]
    refused = submit("low", 6)
    assert (refused.status_code, refused.json["max_priority"]) == (400, 5)
    assert "max_priority of team low" in refused.json["detail"]
    assert submit("high", 5001).status_code == 400


def test_the_command_line_names_the_limit(tmp_path: Any) -> None:
    store = f"sqlite:///{tmp_path / 'db'}"
    GPUResourceManager.from_url(store, inventory=GPUResourceManager.from_url("memory://").inventory).close()
    ran = CliRunner().invoke(main, ["--store", store, "allocate", "t", "--gpus", "2", "--priority", "1001"])
    assert ran.exit_code == 2
    assert "--priority must be at most 1000 (max_priority of the cluster), got 1001" in ran.output
    assert len(ran.output.strip().splitlines()) == 1


def test_an_explanation_takes_the_priorities_that_a_request_of_the_caller_may_have(as_role: AsRole) -> None:
    path = "/api/explain?required_gpus=2&required_cpus=1&priority=5000"
    assert as_role(Role.OPERATOR).get(path).status_code == 200
    refused = as_role(Role.READER).get(path)
    assert refused.status_code == 400
    assert "priority must be at most 1000 (max_priority of the cluster)" in refused.get_data(as_text=True)


def test_a_manager_says_the_bound(manager: GPUResourceManager) -> None:
    with pytest.raises(PriorityError) as caught:
        manager.submit("t", 2, priority=1001)
    assert (caught.value.most, caught.value.field) == (1000, "priority")


def test_what_a_user_announces_is_worth_a_day_of_waiting_at_most(
    as_role: AsRole, manager: GPUResourceManager, clock: Clock
) -> None:
    """Under `critical_path` a year of tasks that never come was worth 8,760 steps of priority."""
    manager.apply(ClusterForm.model_validate({"cluster": {"order": "critical_path", "max_priority": 0}}))
    manager.submit("holder", 8, server=0, ttl=100_000)
    manager.submit("ada", 8, server=0)
    clock.now += 86_500
    eve = as_role(Role.USER, "eve")
    eve.post("/api/submit", json={"task_id": "eve/r/head", **ALL})
    year = {**ALL, "expected_runtime": 365 * 86_400, "after": ["eve/r/head"]}
    assert eve.post("/api/announce", json={"task_id": "eve/r/tail", **year}).json == {"announced": True}
    manager.release("holder")
    assert holder(manager) == "ada"
