"""Replay with rules of teams: what preemption brings and costs, with and without it side by side."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import STARVATION_LIMIT_S, get_order
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.replay import Replay
from simulator.replay.verdict import by_team
from simulator.replay.workload import EventBatch, Job, Workload, read_workload
from tests.builders import nodes

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


def test_the_table_of_jobs_has_the_first_start_of_one_that_was_preempted(
    trace: tuple[Path, Path], tmp_path: Path
) -> None:
    (tmp_path / "teams.toml").write_text("preemption = true\n[teams.a]\nguaranteed = 4\n")
    files = ("--trace", "csv", "--nodes", str(trace[0]), "--jobs", str(trace[1]))
    more = ("--teams", str(tmp_path / "teams.toml"), "--output-dir", str(tmp_path / "out"))
    done = CliRunner().invoke(main, ["replay", *files, *more])
    assert done.exit_code == 0, done.output
    with (tmp_path / "out" / "jobs.csv").open() as file:
        assert [float(row["started_s"]) for row in csv.DictReader(file)] == [0.0, 3630.0]


def test_a_wrong_teams_file_is_one_line_and_writes_nothing(trace: tuple[Path, Path], tmp_path: Path) -> None:
    teams = tmp_path / "teams.toml"
    teams.write_text("[teams.a]\nguaranteed = 5\n")
    done = compare(trace, teams, "--output-dir", str(tmp_path / "out"))
    assert done.exit_code == 2
    assert done.output.count("\n") == 1
    assert "teams.toml:2:1: " in done.output
    assert not (tmp_path / "out").exists()


def test_preemption_alone_is_a_rule_that_is_compared(trace: tuple[Path, Path], tmp_path: Path) -> None:
    """It serves priorities inside a team; without it, that file says nothing."""
    teams = tmp_path / "teams.toml"
    teams.write_text("preemption = true\n")
    done = compare(trace, teams, "--workers", "1", "--json")
    assert done.exit_code == 0, done.output
    runs = json.loads(done.stdout)["runs"]
    assert [(run["preemption"], list(run["teams"])) for run in runs] == [
        (False, [metrics.THE_REST]),
        (True, [metrics.THE_REST]),
    ]


def started_at(rules: Teams, *jobs: tuple[Request, float, float], order: str = "fifo") -> dict[str, float]:
    """Return when each (request, submission, runtime) last started, on one server of four GPUs."""
    batches = (EventBatch(at, arrivals=[Job(request, at, runtime_s)]) for request, at, runtime_s in jobs)
    workload = Workload("made", ClusterState(nodes("n", 4)).snapshot(), tuple(batches))
    runs = Replay(workload, get_policy("first_fit"), get_order(order), rules).run().job_runs
    return {name: run.started_at for name, run in runs.items() if run.started_at is not None}


def test_the_queue_is_looked_at_when_a_team_s_own_minimum_runtime_is_over() -> None:
    rules = replace(RULES, teams=(*RULES.teams, Team("b", min_runtime_s=3600.0)))
    long, owed = Request("long", 4, team="b"), Request("owed", 4, team="a")
    assert started_at(rules, (long, 0.0, 36000.0), (owed, 10.0, 600.0))["owed"] == 3600.0


def test_the_queue_is_looked_at_when_a_request_s_own_delay_is_over() -> None:
    long, owed = Request("long", 4, team="b"), Request("owed", 4, team="a", preemption_delay_s=45.0)
    assert started_at(RULES, (long, 0.0, 36000.0), (owed, 700.0, 600.0))["owed"] == 745.0


def test_the_queue_is_looked_at_when_a_request_has_waited_for_a_day() -> None:
    """Until then `big`, which is shorter, comes first and keeps free what it cannot use."""
    jobs = (
        (Request("run", 2), 0.0, 300_000.0),
        (Request("ends", 2), 0.0, 10_000.0),
        (Request("older", 1, expected_runtime_s=900.0), 0.0, 900.0),
        (Request("old", 1, expected_runtime_s=900.0), 1.0, 900.0),
        (Request("big", 4, expected_runtime_s=10.0), 2.0, 10.0),
    )
    starts = started_at(Teams(), *jobs, order="srtf")
    limits = [STARVATION_LIMIT_S, 1.0 + STARVATION_LIMIT_S]
    assert [starts["older"], starts["old"]] == pytest.approx(limits, rel=1e-9)


def of_teams(preemption: bool, **waits: tuple[int, int, float]) -> dict[str, Any]:
    """Return a result in which each team has (jobs, jobs that started, mean wait) and a guarantee."""
    case = {"name": str(preemption), "policy": "p", "order": "o", "preemption": preemption}
    teams = {
        name: {"guaranteed": "1", "jobs": jobs, "started": started, "mean_wait_s": wait_s}
        for name, (jobs, started, wait_s) in waits.items()
    }
    return {"case": case, "summary": {"preemptions": 0, "lost_gpu_s": 0.0, "teams": teams}}


def test_the_mean_wait_of_several_teams_is_that_of_the_jobs_that_started() -> None:
    before, now = of_teams(False, a=(1000, 1, 36000.0), b=(3, 3, 0.0)), of_teams(True, a=(9, 9, 60.0))
    [line] = by_team([before, now])
    assert "teams with a guarantee wait 60 s instead of 2.5 hours on average" in line
