"""Round policies on any workload: requests with run times, from files or from one's own history."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.changes import (
    Cancelled,
    Drained,
    InventoryChanged,
    MaintenanceChanged,
    Resumed,
    TeamsChanged,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu, Node, Request
from resource_manager.core.teams import Team, Teams
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.replay import Replay
from simulator.replay.report import save_timeline
from simulator.replay.workload import EventBatch, Job, Workload
from simulator.rounds.fixed_rounds import MAX_IDLE_ROUNDS, RESTART_S, ROUND_S, FixedRounds
from simulator.rounds.leases import uniform_nodes
from simulator.rounds.policies import ROUND_POLICIES, get_round_policy
from simulator.rounds.record import bars_of, curves, record_of, summarise
from simulator.rounds.studies import study_workload
from simulator.rounds.timed import timed_rounds
from tests.builders import node, nodes, present
from tests.simulator.refusing import assert_refused
from tests.simulator.rounds.small import shockwave_job, write_pollux, write_shockwave

RIGID = sorted(set(ROUND_POLICIES) - {"optimus"})


def workload(*batches: EventBatch, servers: int = 1, gpus: int = 4) -> Workload:
    nodes = [node(letter, gpus, 64) for letter in "nopq"[:servers]]
    return Workload("made", ClusterState(nodes).snapshot(), batches)


def arrival(at: float, *jobs: tuple[str, int, float]) -> EventBatch:
    requests = [(Request(name, gpus), runtime_s) for name, gpus, runtime_s in jobs]
    return EventBatch(at, arrivals=[Job(request, at, runtime_s) for request, runtime_s in requests])


def run(made: Workload, policy: str = "tiresias") -> FixedRounds:
    rounds = timed_rounds(made, get_round_policy(policy))
    rounds.run()
    allocator.check(rounds.leases.cluster)
    return rounds


@given(
    jobs=st.lists(
        st.tuples(st.integers(0, 3000), st.integers(1, 4), st.integers(1, 2000)), min_size=1, max_size=12
    ),
    policy=st.sampled_from(RIGID),
)
def test_every_job_ends_and_no_gpu_is_held_twice(jobs: list[tuple[int, int, int]], policy: str) -> None:
    batches = [
        arrival(at, (f"j{place}", gpus, runtime_s))
        for place, (at, gpus, runtime_s) in enumerate(sorted(jobs))
    ]
    rounds = run(workload(*batches, servers=2), policy)
    assert not rounds.leases.cluster.leases
    for job in rounds.jobs:
        assert job.jct_s is not None
        assert job.jct_s >= job.exclusive_s + RESTART_S
        held_s = sum(span.end - span.begin for span in job.spans)
        assert held_s == pytest.approx(job.exclusive_s + job.lost_gpu_s / job.gpus)
    assert max(sample.used_milli for sample in record_of(rounds).samples) <= 8000


def test_a_job_that_lost_its_gpus_goes_on_where_it_was() -> None:
    """Two jobs of all GPUs take turns, a minute each, and pay for every start."""
    rounds = run(workload(arrival(0, ("a", 4, 90.0), ("b", 4, 60.0))), "gandiva_fair")
    a, b = rounds.jobs
    assert (a.preemptions, b.preemptions) == (2, 1)
    assert a.ended_at == 60 + 2 * 2 * ROUND_S + ROUND_S
    assert b.ended_at == 60 + 4 * ROUND_S
    waits = [metrics.wait_s(job_run) for job_run in record_of(rounds).job_runs.values()]
    assert waits == [60 + 2 * ROUND_S, 60 + 2 * ROUND_S]
    summary = summarise(rounds)
    assert (summary["mean_wait_s"], summary["started"]) == (180.0, 2)
    assert "waits_of" not in summary


@pytest.mark.parametrize(("at", "started_at"), [(90, 60), (150, None)])
def test_a_job_that_is_cancelled_while_it_waits_again_counts_in_no_wait(
    at: int, started_at: int | None
) -> None:
    batches = [arrival(0, ("a", 4, 90.0), ("b", 4, 60.0)), EventBatch(at, external=[Cancelled("a", at)])]
    a = record_of(run(workload(*batches), "gandiva_fair")).job_runs["a"]
    assert (a.started_at, a.first_started_at, a.ended_at) == (started_at, 60, None)


def test_a_request_stays_on_one_server() -> None:
    """Three GPUs are free, but not on one server: `wide` waits until `b` has ended."""
    batches = [arrival(0, ("a", 1, 600.0), ("b", 2, 100.0)), arrival(60, ("wide", 2, 60.0))]
    a, b, wide = run(workload(*batches, servers=2, gpus=2)).jobs
    assert {a.spans[0].servers[0], b.spans[0].servers[0]} == {"n", "o"}
    assert b.ended_at == 190
    assert wide.started_at == 240


@pytest.mark.parametrize("policy", RIGID)
def test_a_drained_server_and_a_cancelled_job_are_heeded(policy: str) -> None:
    """Before it is open again, there is nobody to rank."""
    batches = [
        EventBatch(0, external=[Drained("n", 0.0, "closed")]),
        arrival(60, ("a", 4, 60.0), ("b", 4, 60.0)),
        EventBatch(600, external=[Cancelled("b", 600.0)]),
        EventBatch(900, external=[Resumed("n", 900.0)]),
    ]
    rounds = run(workload(*batches), policy)
    a, b = rounds.jobs
    assert a.started_at == 900
    assert b.spans == []
    assert b.cancelled_at == 600
    assert summarise(rounds)["cancelled"] == 1


def test_a_job_that_is_cancelled_before_its_first_round_waits_until_then() -> None:
    batches = [
        arrival(0, ("a", 1, 600.0)),
        arrival(61, ("b", 1, 60.0)),
        EventBatch(100, external=[Cancelled("b", 100.0)]),
    ]
    record = record_of(run(workload(*batches)))
    assert record.job_runs["b"].cancelled
    waiting = [(sample.at, sample.pending) for sample in record.samples]
    assert waiting == [(0, 1), (60, 0), (61, 1), (100, 0), (60 + RESTART_S + 600, 0)]


def team_jobs(*jobs: tuple[str, str, float, float]) -> EventBatch:
    """Return (name, team, stated and true runtime) of jobs of four GPUs that arrive at 0."""
    return EventBatch(
        0,
        arrivals=[
            Job(Request(name, 4, team=team, expected_runtime_s=stated_s), 0, runtime_s)
            for name, team, stated_s, runtime_s in jobs
        ],
    )


def rules(at: float, *teams: Team) -> EventBatch:
    return EventBatch(at, external=[TeamsChanged(Teams(teams), at)])


@pytest.mark.parametrize("policy", RIGID)
def test_a_job_that_a_limit_of_runtimes_stops_blocks_nobody(policy: str) -> None:
    """It waits for ever, as in the manager."""
    jobs = team_jobs(("long", "s", 7200.0, 7200.0), ("other", "t", 60.0, 60.0))
    long, other = run(workload(rules(0, Team("s", max_runtime_s=3600.0)), jobs), policy).jobs
    assert (long.spans, other.started_at) == ([], 60)


def test_a_job_that_runs_goes_on_under_a_new_limit_of_runtimes() -> None:
    jobs = team_jobs(("long", "s", 7200.0, 600.0))
    [long] = run(workload(jobs, rules(120, Team("s", max_runtime_s=3600.0)))).jobs
    assert (long.preemptions, long.ended_at) == (0, 60 + RESTART_S + 600)


@pytest.mark.parametrize("team", [Team("s", limit=4), Team("s", max_gpus_per_owner=4)])
def test_a_team_at_its_limit_leaves_the_gpus_to_others(team: Team) -> None:
    jobs = team_jobs(("a", "s", 90.0, 90.0), ("b", "s", 90.0, 90.0), ("c", "t", 600.0, 600.0))
    a, b, c = run(workload(rules(0, team), jobs, servers=2)).jobs
    assert (a.started_at, c.started_at, b.started_at) == (60, 60, 60 + RESTART_S + 90)


def test_jobs_of_a_team_take_turns_inside_its_limit() -> None:
    """What is ranked first has the right to it; the other loses its GPUs."""
    jobs = team_jobs(("a", "s", 600.0, 600.0), ("b", "s", 600.0, 600.0))
    a, b = run(workload(rules(0, Team("s", limit=4)), jobs, servers=2), "gandiva_fair").jobs
    assert a.preemptions > 1
    assert b.started_at == 120
    assert not any(x.begin < y.end and y.begin < x.end for x in a.spans for y in b.spans)


@pytest.mark.parametrize("end", [1200.0, 12_000.0])
def test_a_job_that_would_cross_a_window_blocks_nobody_and_starts_after_it(end: float) -> None:
    window = MaintenanceChanged((Window(1, ("n",), 600.0, end),), 0.0)
    jobs = team_jobs(("long", "", 3600.0, 3600.0), ("short", "", 120.0, 120.0))
    long, short = run(workload(EventBatch(0, external=[window]), jobs)).jobs
    assert (long.started_at, short.started_at) == (end, 60)


def test_the_end_of_each_window_is_waited_for() -> None:
    window = Window(1, ("n",), 600.0, 1200.0, every_s=9000.0)
    jobs = team_jobs(("first", "", 7200.0, 3600.0), ("second", "", 8000.0, 8000.0))
    changed = EventBatch(0, external=[MaintenanceChanged((window,), 0.0)])
    assert [job.started_at for job in run(workload(changed, jobs)).jobs] == [1200, 10_200]


def test_a_job_longer_than_the_time_between_windows_ends_no_replay() -> None:
    window = MaintenanceChanged((Window(1, ("n",), 600.0, 1200.0, every_s=7200.0),), 0.0)
    rounds = run(workload(EventBatch(0, external=[window]), team_jobs(("long", "", 9000.0, 9000.0))))
    assert (rounds.jobs[0].started_at, rounds.rounds) == (None, MAX_IDLE_ROUNDS)


def test_an_opening_between_windows_of_different_periods_is_waited_for() -> None:
    """The first occurrences of both, and those that come next, leave it too little time."""
    hour = 3600.0
    windows = (
        Window(1, ("n",), 10 * hour, 11 * hour, every_s=24 * hour),
        Window(2, ("n",), 22 * hour, 23 * hour, every_s=36 * hour),
    )
    changed = EventBatch(0, external=[MaintenanceChanged(windows, 0.0)])
    [job] = run(workload(changed, team_jobs(("long", "", 20 * hour, hour)))).jobs
    assert job.started_at == 35 * hour


def test_a_window_is_not_waited_for_by_jobs_that_start_at_no_time() -> None:
    """A replay of a job that fits nowhere, or only beyond a limit, went on until the end of any window."""
    far = MaintenanceChanged((Window(1, ("n",), 60.0, 9e7),), 0.0)
    limited = run(
        workload(EventBatch(0, external=[far]), rules(0, Team("s", limit=2)), team_jobs(("a", "s", 9.0, 9.0)))
    )
    labelled = Job(Request("a", 1, labels_required={"zone": "x"}), 0, 60.0)
    unknown = run(workload(EventBatch(0, external=[far]), EventBatch(0, arrivals=[labelled])))
    assert (limited.rounds, unknown.rounds) == (MAX_IDLE_ROUNDS, MAX_IDLE_ROUNDS)


def test_a_gang_waits_until_its_servers_are_open_together() -> None:
    servers = uniform_nodes(2, 4)
    windows = [Window(i, (servers[i].name,), 60.0, end) for i, end in enumerate((9000.0, 18_000.0))]
    gang = Job(Request("gang", 4, nodes=2, expected_runtime_s=600.0), 0, 600.0)
    batch = EventBatch(0, external=[MaintenanceChanged(tuple(windows), 0.0)], arrivals=[gang])
    [job] = run(Workload("made", ClusterState(servers).snapshot(), (batch,))).jobs
    assert job.started_at == 18_000


def test_a_server_that_leaves_counts_until_its_last_lease_has_ended(tmp_path: Path) -> None:
    """It loses its job in the next round; a change of it that comes later is about nothing that is there."""
    rounds = run(
        workload(
            arrival(0, ("a", 4, 600.0), ("b", 4, 600.0)),
            EventBatch(130, external=[InventoryChanged(nodes("n", 4, 64), 130.0)]),
            EventBatch(200, external=[Drained("o", 200.0, "gone")]),
            servers=2,
        )
    )
    found = {(sample.at < 180, sample.gpu_milli, sample.nodes) for sample in record_of(rounds).samples}
    assert found == {(True, 8000, 2), (False, 4000, 1)}
    assert summarise(rounds)["peak_allocated_percent"] == 100.0
    heat = curves(rounds)["heat"]
    assert heat["nodes"] == ["n", "o"]
    assert sum(heat["shares"][1]) * heat["end_s"] / len(heat["shares"][1]) == pytest.approx(120)
    save_timeline(bars_of(rounds), rounds.leases.nodes, tmp_path)
    assert (tmp_path / "timeline.png").is_file()


def test_a_server_that_comes_counts_from_then_on_and_changes_of_one_time_keep_their_order() -> None:
    both = InventoryChanged(nodes("no", 4, 64), 600.0)
    rounds = run(
        workload(
            arrival(0, ("a", 4, 3600.0), ("b", 4, 60.0)),
            EventBatch(600, external=[both, Drained("o", 600.0, "not yet")]),
            EventBatch(900, external=[Resumed("o", 900.0)]),
        )
    )
    assert rounds.jobs[1].started_at == 900
    sizes = {sample.at: sample.gpu_milli for sample in record_of(rounds).samples}
    assert [sizes[at] for at in (0, 60, 600, 900)] == [4000, 4000, 8000, 8000]


@pytest.mark.parametrize("policy", RIGID)
def test_a_job_whose_server_opens_starts_once_shares_may_be_computed_again(policy: str) -> None:
    servers = [Node("n", 1, {}, (Gpu(0, "H100"),)), Node("o", 2, {}, (Gpu(0, "A100"),))]
    jobs = [
        Job(Request("a", 1, gpu_types=("A100",)), 60, 36000.0),
        Job(Request("b", 1, gpu_types=("H100",)), 60, 60.0),
    ]
    closed, opened = Drained("n", 0.0, "closed"), Resumed("n", 900.0)
    batches = (EventBatch(0, external=[closed]), EventBatch(60, arrivals=jobs), EventBatch(900, [opened]))
    _, b = run(Workload("made", ClusterState(servers).snapshot(), batches), policy).jobs
    assert 900 <= present(b.started_at) <= 60 + 1000 + ROUND_S


def test_what_never_fits_ends_the_replay() -> None:
    rounds = run(
        workload(EventBatch(0, external=[Drained("n", 0.0, "for good")]), arrival(0, ("a", 4, 60.0)))
    )
    assert rounds.jobs[0].ended_at is None


@pytest.mark.parametrize("policy", RIGID)
def test_a_job_without_a_recorded_end_leaves_with_the_record(policy: str) -> None:
    batches = [arrival(0, ("a", 4, math.inf)), arrival(600, ("b", 4, 60.0))]
    a, b = run(workload(*batches), policy).jobs
    assert (a.started_at, a.cancelled_at, a.ended_at) == (60, 600, None)
    assert b.ended_at is not None


def test_a_job_at_the_time_of_day_of_a_record_without_events_is_drawn() -> None:
    """The record has no length, and is as far from 1970 as it is."""
    made = replace(workload(), present=(Job(Request("a", 4), 1.76e9, math.inf),))
    found = curves(run(made))
    assert found["heat"]["end_s"] == 0.0
    json.dumps(found, allow_nan=False)


def test_fairness_is_measured_against_an_equal_share() -> None:
    """Two jobs of a minute on one GPU: alone 60 s, with an equal share 120 s."""
    rounds = run(workload(arrival(0, ("a", 1, 60.0), ("b", 1, 60.0)), gpus=1))
    summary = summarise(rounds)
    assert rounds.jobs[1].jct_s == 60 + 2 * ROUND_S + RESTART_S + 60
    assert summary["worst_ftf"] == (60 + 2 * ROUND_S + RESTART_S + 60) / 120
    assert summary["unfair_percent"] == 100.0
    assert summary["preemptions"] == 0


def command(*arguments: str) -> Result:
    return CliRunner().invoke(main, list(arguments))


@pytest.fixture
def files(tmp_path: Path) -> list[str]:
    (tmp_path / "nodes.csv").write_text("node,gpus\nn0,4\n")
    (tmp_path / "jobs.csv").write_text("job,submit_s,runtime_s,gpus\na,0,300,4\nb,10,60,2\nc,20,60,2\n")
    return ["--trace", "csv", "--nodes", str(tmp_path / "nodes.csv"), "--jobs", str(tmp_path / "jobs.csv")]


@pytest.mark.parametrize("policy", RIGID)
def test_a_trace_of_one_s_own_under_every_policy(files: list[str], policy: str) -> None:
    result = command("replay", *files, "--policy", policy, "--json")
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    assert summary["policy"] == policy
    assert summary["ended"] == summary["jobs"] == 3
    assert summary["lost_gpu_s"] >= RESTART_S * 8


def test_optimus_needs_to_know_other_numbers_of_gpus(files: list[str]) -> None:
    result = command("replay", *files, "--policy", "optimus")
    assert result.exit_code == 2
    assert "this workload does not say how fast a job is on other numbers of GPUs" in result.stderr


def test_a_policy_that_resizes_jobs_is_refused_before_any_run(files: list[str], tmp_path: Path) -> None:
    out = tmp_path / "out"
    result = command(
        "compare", *files, "--policies", "first_fit,optimus", "--workers", "1", "--output-dir", str(out)
    )
    assert_refused(result, "optimus resizes jobs, and this workload does not say how fast")
    assert not out.exists()


def test_an_order_beside_a_round_policy_is_refused(files: list[str]) -> None:
    result = command("replay", *files, "--policy", "tiresias", "--order", "srtf")
    assert result.exit_code == 2
    assert "--order has no effect with tiresias" in result.stderr


def test_policies_of_both_kinds_are_compared(files: list[str], tmp_path: Path) -> None:
    report = tmp_path / "report.html"
    arguments = [
        "--policies",
        "first_fit,tiresias,gandiva_fair",
        "--order",
        "fifo,tiresias",
        "--workers",
        "1",
    ]
    result = command("compare", *files, *arguments, "--json", "--report", str(report))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    names = [row["name"] for row in summary["rows"]]
    assert names == ["first_fit, fifo", "first_fit, tiresias", "tiresias", "gandiva_fair"]
    assert any("Round policies preempt jobs" in line for line in summary["verdict"])
    assert "Finish-time fairness" in report.read_text()


def test_placement_policies_and_orders_take_the_jobs_of_a_study(tmp_path: Path) -> None:
    jobs = [shockwave_job(0, steps=5000, exclusive_s=500.0, gpus=4)]
    jobs += [shockwave_job(k, steps=10, exclusive_s=60.0, arrival_s=k) for k in range(1, 4)]
    data = str(write_shockwave(tmp_path, *jobs))
    chosen = ["--policies", "gandiva_fair,first_fit", "--order", "fifo,srtf", "--workers", "1", "--json"]
    result = command("compare", "--trace", "shockwave", "--data", data, *chosen)
    assert result.exit_code == 0, result.output
    rows = {row["name"]: row for row in json.loads(result.stdout)["rows"]}
    assert set(rows) == {"gandiva_fair", "first_fit, fifo", "first_fit, srtf"}
    assert rows["first_fit, fifo"]["ended"] == 4
    assert rows["first_fit, fifo"]["makespan_s"] == 500.0
    assert rows["first_fit, fifo"]["max_wait_s"] == 0.0


def test_a_large_job_of_pollux_is_a_gang_over_servers(tmp_path: Path) -> None:
    folder = write_pollux(tmp_path, "a,0,toy,6,8", "b,0,toy,60,64")
    made = study_workload("pollux", (str(folder), "1.0", "1"))
    a, b = Replay(made, first_fit, get_order("fifo")).run().job_runs.values()
    assert (a.started_at, b.started_at) == (0, 230)  # 66 GPUs are more than there are
    assert {job.request.team for job in made.jobs} == {"toy"}
