"""Replay with rules of teams: what preemption brings and costs, with and without it side by side."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from resource_manager.core.cluster import ClusterState
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import get_order
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.replay import Replay
from simulator.replay.workload import read_workload

JOBS = """job,submit_s,runtime_s,gpus,team
long,0,36000,4,b
owed,3600,600,4,a
"""
RULES = Teams((Team("a", 4),), preemption=True)


@pytest.fixture
def trace(tmp_path: Path) -> tuple[Path, Path]:
    (tmp_path / "nodes.csv").write_text("node,gpus\nn,4\n")
    (tmp_path / "jobs.csv").write_text(JOBS)
    return tmp_path / "nodes.csv", tmp_path / "jobs.csv"


def compare(trace: tuple[Path, Path], teams: Path, *options: str) -> Result:
    source = ("--trace", "csv", "--nodes", str(trace[0]), "--jobs", str(trace[1]), "--policies", "first_fit")
    return CliRunner().invoke(main, ["compare", *source, "--teams", str(teams), *options])


def test_a_preempted_job_goes_on_from_its_last_checkpoint(trace: tuple[Path, Path]) -> None:
    replay = Replay(read_workload(*trace), get_policy("first_fit"), get_order("fifo"), RULES)
    record = replay.run()
    owed, long = record.job_runs["owed"], record.job_runs["long"]
    assert (owed.started_at, owed.ended_at) == (3630.0, 4230.0)  # after the preemption delay
    assert [(part.lease.granted_at, part.ended_at) for part in long.parts] == [(0.0, 3630.0)]
    assert long.saved_s == 3600.0
    assert long.ended_at == 4230.0 + 36000.0 - 3600.0
    assert (metrics.wait_s(long), metrics.lost_gpu_s(long)) == (600.0, 30.0 * 4)
    assert [begin for _, begin, _ in metrics.spans(long, 1e9)] == [0.0, 4230.0]
    state = ClusterState.from_snapshot(record.workload.start)
    for change in record.changes:
        state.apply(change)
    assert not state.leases
    assert not state.pending


def test_with_and_without_preemption_stand_side_by_side(trace: tuple[Path, Path], tmp_path: Path) -> None:
    teams = tmp_path / "teams.toml"
    teams.write_text("preemption = true\n[teams.a]\nguaranteed = 4\n")
    done = compare(trace, teams, "--workers", "1", "--output-dir", str(tmp_path / "out"))
    assert done.exit_code == 0, done.output
    runs = json.loads((tmp_path / "out" / "summary.json").read_text())["runs"]
    assert [run["preemption"] for run in runs] == [False, True]
    assert [run["teams"]["a"]["mean_wait_s"] for run in runs] == [32400.0, 30.0]
    assert [run["teams"]["the rest"]["preempted"] for run in runs] == [0, 1]
    page = (tmp_path / "out" / "report.html").read_text()
    assert "teams with a guarantee wait 30 s instead of 9 hours on average" in page
    assert "By team" in page


def test_a_wrong_teams_file_is_one_line_and_writes_nothing(trace: tuple[Path, Path], tmp_path: Path) -> None:
    teams = tmp_path / "teams.toml"
    teams.write_text("[teams.a]\nguaranteed = 5\n")
    done = compare(trace, teams, "--output-dir", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert "teams.toml:2:1: " in done.output
    assert not (tmp_path / "out").exists()
