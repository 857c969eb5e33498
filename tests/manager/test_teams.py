"""Rules of teams through the manager: applied, tried, shown, and replayed from the history."""

from __future__ import annotations

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, JobPlace, Node
from resource_manager.core.teams import NO_TEAMS, Team, Teams
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.cluster_file.sections import ClusterDefinition
from resource_manager.storage.history_file import collect
from tests.builders import granted_lease, redefine

RULES = Teams((Team("research", 12), Team("vision", 4, limit=6, parent="research")))


def test_rules_are_applied_and_shown_with_what_is_held() -> None:
    manager = GPUResourceManager.from_url("memory://")
    made = manager.apply(ClusterDefinition(teams=RULES))
    assert made["lines"] == [
        "+ team research, guaranteed 12",
        "+ team vision, guaranteed 4, limit 6, parent research",
    ]
    manager.submit("x", 6, team="vision", owner="kim")
    manager.submit("y", 2, team="vision")
    shown = {team["team"]: team for team in manager.teams()["teams"]}
    assert set(shown) == {"research", "vision"}
    vision = shown["vision"]
    assert (vision["allocated"], vision["borrowed"]) == (6, 2)
    assert (vision["waiting"], vision["waiting_gpus"]) == (1, 2)
    assert vision["allocated_by_owner"] == {"kim": 6}
    assert shown["research"]["allocated"] == 6
    (waiting,) = manager.queue()
    assert (waiting["kind"], waiting["reason"]) == (
        "quota",
        "team vision may hold 6 GPUs (limit) and holds 6: 2 more exceed it; used by kim (6)",
    )
    assert manager.explain("z", 2, team="vision")["kind"] == "quota"


def test_explain_names_servers_of_the_types_on_which_a_job_may_be_placed() -> None:
    servers = tuple(
        Node(name, number, {"cpus": 8}, tuple(Gpu(i, gpu_type) for i in range(8)))
        for number, (name, gpu_type) in enumerate({"h": "H100", "a": "A100"}.items())
    )
    with GPUResourceManager.from_url("memory://", inventory=servers) as manager:
        redefine(manager, teams=Teams((Team("va", 8, {"A100": 8}),), preemption=True))
        answer = manager.explain("t", 1, team="va", preemptible=False)
    assert (answer["would_be_granted"], answer["server_name"]) == (True, "a")
    assert {each["server_name"]: each["fits"] for each in answer["servers"]} == {"h": False, "a": True}
    assert answer["servers"][0]["reasons"] == ["has no A100"]


def test_a_higher_limit_starts_what_waits_for_it() -> None:
    manager = GPUResourceManager.from_url("memory://")
    redefine(manager, teams=RULES)
    manager.submit("x", 8, team="vision")
    made = manager.apply(ClusterDefinition(teams=Teams((Team("vision", 4, limit=8),))))
    assert "~ teams.vision.limit 6 → 8" in made["lines"]
    assert [entry["change"] for entry in manager.history()][-2:] == ["teamschanged", "granted"]


def test_a_diff_and_the_same_rules_change_nothing() -> None:
    manager = GPUResourceManager.from_url("memory://")
    rules = ClusterDefinition(teams=RULES)
    assert manager.diff(rules)["changed"]
    assert manager.snapshot().get("version", 0) == 0
    manager.apply(rules)
    assert not manager.apply(rules)["changed"]
    assert manager.snapshot()["version"] == 1


def test_a_history_with_rules_leads_to_the_same_state() -> None:
    manager = GPUResourceManager.from_url("memory://")
    redefine(manager, teams=RULES)
    manager.submit("x", 8, team="vision")
    manager.submit("y", 2, team="vision")
    history = collect(manager)
    assert history.before.teams == NO_TEAMS
    cluster = ClusterState.from_snapshot(history.before)
    for change in history.changes:
        cluster.apply(change)
    assert cluster.teams == RULES
    assert set(cluster.pending) == {"x"}


def test_another_user_is_refused_to_a_team_whose_jobs_that_user_could_not_end() -> None:
    """They were out of reach from then on, and kept their GPUs."""
    manager = GPUResourceManager.from_url("memory://")
    vision = ClusterDefinition(teams=Teams((Team("vision", user="vision"),)))
    for launcher in ("agent", "ssh"):
        lease = granted_lease(manager.submit(launcher, 2, team="vision"))
        manager.place_job(launcher, [JobPlace(launcher, "gpu-a")], fencing_token=lease["fencing_token"])
    refused = r"vision\.user: the user of the launcher runs the job of ssh \w{4}, which another cannot end"
    with pytest.raises(InvalidRequestError, match=refused):
        manager.apply(vision)
    manager.release("ssh", job_end="ended")
    assert manager.apply(vision)["lines"] == ["+ team vision, user vision"]
