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

from resource_manager.core.changes import Cancelled, Drained, Resumed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.scheduling import allocator
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import get_order
from simulator.cli import main
from simulator.replay import metrics
from simulator.replay.replay import Replay
from simulator.replay.workload import EventBatch, Job, Workload
from simulator.rounds.fixed_rounds import RESTART_S, ROUND_S, FixedRounds
from simulator.rounds.policies import ROUND_POLICIES, get_round_policy
from simulator.rounds.record import curves, record_of, summarise
from simulator.rounds.studies import study_workload
from simulator.rounds.timed import timed_rounds
from tests.builders import node
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
