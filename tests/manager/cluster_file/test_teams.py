"""Teams files: their contents, and one line with file, line and reason for a wrong one."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from resource_manager import GPUResourceManager
from resource_manager.core.teams import Team, Teams, stated
from resource_manager.errors import ClusterFileError, InvalidRequestError
from resource_manager.manager.cluster_file.reading import ClusterFiles, load_teams
from resource_manager.manager.cluster_file.team_tables import TeamsTable
from tests.builders import granted_lease, redefine

GOOD = """
preemption = true
min_runtime = "5min"
preemption_delay = 10

[gpu_weights]
A100 = 2

[teams.research]
guaranteed = 20

[teams.vision]
guaranteed = { A100 = 8, H100 = 8 }
limit = 24
weight = 2
parent = "research"
max_runtime = "3d"
max_gpus_per_owner = 8
idle_below = 10
idle_after = "2h"
"""


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "teams.toml"
    path.write_text(text)
    return path


def test_a_file_states_the_rules(tmp_path: Path) -> None:
    rules = load_teams(written(tmp_path, GOOD))
    vision = Team("vision", 16, {"A100": 8, "H100": 8}, 24, 2.0, "research", 259_200.0, 8, None, 10.0, 7200.0)
    assert rules == Teams((Team("research", 20), vision), True, 300.0, 10.0, gpu_weights={"A100": 2})
    assert TeamsTable.model_validate(stated(rules)).rules() == rules


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[teams.a]\nguaranted = 2\n", 2, "teams.a.guaranted: is not a key of this file"),
        ("[teams.a]\nguaranteed = -1\n", 2, "teams.a.guaranteed: must be greater than or equal to 0, got -1"),
        ("[teams.'größe']\nlimit = -1\n", 2, 'teams."größe".limit: must be'),
        ('[teams."a\\u200b"]\n', 1, "has a control or an invisible character"),
        ('[teams.""]\n', 1, "must have at least 1 character, got ''"),
        ("preemption = 1\n", 1, "preemption: "),
        ("# hi\n\nmin_runtime = '3 fortnights'\n", 3, "must be seconds or a text such as 45s"),
        ("[teams.a]\nlimit = 3\n[teams.'b c']\nweight = 1\nlimit = 'x'\n", 5, 'teams."b c".limit: '),
        ("[teams.interns]\nlimit = 'x'\n", 2, "teams.interns.limit: "),
        ("[teams.a]\nidle_below = 101\n", 2, "teams.a.idle_below: "),
        ("[teams.a]\nidle_after = 0\n", 2, "teams.a.idle_after: "),
        ("[teams.a]\nlimit = \n", 2, "Invalid value"),
        ("[teams]\nx = { limit = 'a' }\n", 2, "teams.x.limit: "),
    ],
)
def test_a_wrong_file_is_one_line_with_its_place(tmp_path: Path, text: str, line: int, reason: str) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ClusterFileError) as caught:
        load_teams(path)
    assert re.match(rf"{re.escape(str(path))}:{line}:\d+: ", str(caught.value))
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ClusterFileError, match="No such file"):
        load_teams(tmp_path / "none.toml")


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("[teams.a]\nguaranteed = 30\n[teams.b]\nguaranteed = 3\n", 4, "add up to 33 GPUs"),
        ("[teams.a]\nparent = 'b'\n[teams.b]\nparent = 'a'\n", 2, "a cycle of parents: a -> b -> a"),
        ("[teams.a]\nguaranteed = 3\nlimit = 2\n", 3, "2 is below what the team is guaranteed, 3"),
        ("[teams.a]\nguaranteed = { B200 = 1 }\n", 2, "no server has a GPU of type 'B200'"),
        ("[teams.a]\nguaranteed = 3\n", 1, "teams.vision: the team is missing but holds leases (x vnpm)"),
    ],
)
def test_rules_that_the_state_contradicts_change_nothing(
    tmp_path: Path, text: str, line: int, reason: str
) -> None:
    manager = GPUResourceManager.from_url("memory://")
    redefine(manager, teams=Teams((Team("vision"),)))
    manager.submit("x", 2, team="vision")
    before = manager.snapshot()
    path = written(tmp_path, text)
    files = ClusterFiles([path])
    with pytest.raises(InvalidRequestError) as caught:
        manager.apply(files.form)
    found = str(files.located(caught.value))
    assert re.match(rf"{re.escape(str(path))}:{line}:\d+: teams\.", found)
    assert reason in found
    assert manager.snapshot() == before


def test_a_team_stays_while_a_member_of_its_gang_is_held(tmp_path: Path) -> None:
    manager = GPUResourceManager.from_url("memory://")
    nodes = [replace(node, address=node.name) for node in manager.inventory]
    redefine(manager, nodes=nodes, teams=Teams((Team("vision"),)))
    lease = granted_lease(manager.submit("x", 2, nodes=2, team="vision"))
    manager.release_members("x", [0], fencing_token=lease["fencing_token"])
    files = ClusterFiles([written(tmp_path, "[teams.a]\nguaranteed = 3\n")])
    with pytest.raises(InvalidRequestError, match="the team is missing but holds leases"):
        manager.apply(files.form)
