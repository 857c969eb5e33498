"""Pollux' workloads under Tiresias and Optimus: every job ends in the published second."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from resource_manager.scheduling import allocator
from resource_manager.scheduling.queue.orders import FIRST_QUEUE_GPU_S
from simulator.cli import main
from simulator.rounds.fixed_rounds import RESTART_S, FixedRounds
from simulator.rounds.policies import get_round_policy
from simulator.rounds.pollux import PolluxJob, read_jobs
from simulator.rounds.step_times import Measured, StepTime, StepTimes
from simulator.rounds.studies import study
from tests.simulator.refusing import assert_refused
from tests.simulator.rounds.small import study_replay, write_pollux, write_workload

replay = partial(study_replay, "pollux")


@pytest.mark.parametrize("workload", ["1", "2", "3", "4"])
@pytest.mark.parametrize("load", ["0.5", "1.0"])
@pytest.mark.parametrize("policy", ["tiresias", "optimus"])
def test_every_job_ends_in_the_published_second(
    pollux_data: Path, policy: str, load: str, workload: str
) -> None:
    result = replay(pollux_data, "--load", load, "--workload", workload, "--policy", policy)
    assert result.exit_code == 0, result.output
    expected = json.loads((pollux_data / "expected" / f"{policy}-{load}.json").read_text())
    summary, published = json.loads(result.stdout), expected["workloads"][workload]
    assert summary["jct_s"] == published["jct_s"]
    assert summary["mean_jct_s"] == published["mean_jct_s"]
    assert summary["jobs"] == len(published["jct_s"])


def run(folder: Path, policy: str) -> dict[str, PolluxJob]:
    rounds = study("pollux", (str(folder), "1.0", "1"), get_round_policy(policy))
    assert isinstance(rounds, FixedRounds)
    rounds.run()
    allocator.check(rounds.leases.cluster)
    assert not rounds.leases.cluster.leases, "all leases are released"
    return {job.name: job for job in rounds.jobs if isinstance(job, PolluxJob)}


def test_a_job_starts_at_the_next_full_minute_and_pays_the_restart(tmp_path: Path) -> None:
    """It comes at 70, starts at 120, makes progress from 150 on: 200 s for two epochs."""
    [job] = run(write_pollux(tmp_path, "a,70,toy,1,8"), "tiresias").values()
    assert job.ended_at == 120 + RESTART_S + 200
    assert job.jct_s == job.ended_at - 70
    assert job.lost_gpu_s == RESTART_S
    assert job.exclusive_s == RESTART_S + 200


def test_gpus_of_a_job_that_ended_are_free_at_the_end_of_the_round(tmp_path: Path) -> None:
    """`b` needs all GPUs; `a` ends at 290, so `b` starts at 300."""
    jobs = run(write_pollux(tmp_path, "a,0,toy,1,8", "b,60,toy,64,64"), "tiresias")
    assert jobs["a"].ended_at == 290
    assert jobs["b"].started_at == 300


def test_a_smaller_job_overtakes_one_that_does_not_fit(tmp_path: Path) -> None:
    jobs = run(write_pollux(tmp_path, "a,0,toy,60,64", "b,0,toy,8,64", "c,0,toy,4,64"), "tiresias")
    assert jobs["a"].started_at == jobs["c"].started_at == 60
    assert jobs["b"].started_at == 300


def test_attained_service_moves_a_job_behind_new_ones(tmp_path: Path) -> None:
    """64 GPUs reach 16 GPU-hours in 15 minutes; then a job that came later takes their place."""
    folder = write_pollux(tmp_path, "long,0,toy,64,64", "late,120,toy,32,64", epochs=40)
    long, late = run(folder, "tiresias").values()
    assert late.started_at == 60 + FIRST_QUEUE_GPU_S / 64
    assert long.preemptions == 1
    # 30 minutes on 32 GPUs later `late` is in the second queue too, behind `long`, which displaces it.
    assert long.spans[1].begin == late.spans[0].end == late.started_at + FIRST_QUEUE_GPU_S / 32
    assert long.ended_at is not None
    assert late.ended_at is not None
    assert long.ended_at < late.ended_at


def test_a_job_keeps_its_gpus_while_others_come_and_go(tmp_path: Path) -> None:
    jobs = run(write_pollux(tmp_path, "a,0,toy,3,8", "b,0,toy,6,8", "c,120,toy,5,8", epochs=9), "tiresias")
    assert [len(job.spans) for job in jobs.values()] == [1, 1, 1]
    assert jobs["a"].spans[0].servers == ("server-0",) * 3
    assert jobs["b"].spans[0].servers == ("server-1",) * 4 + ("server-2",) * 2  # the most free first


def test_optimus_gives_gpus_where_they_save_time(tmp_path: Path) -> None:
    """Steps take as long on more GPUs, so after the first, which accumulates, none saves anything."""
    jobs = run(write_pollux(tmp_path, "a,0,toy,1,64", "b,0,toy,1,64"), "optimus")
    assert [len(job.spans[0].servers) for job in jobs.values()] == [2, 2]


def test_a_shape_is_looked_up_in_its_smallest_rotation() -> None:
    times = StepTimes(
        [((1, 2), 4, StepTime(1.0, 0.5)), ((1, 2), 8, StepTime(3.0, 0.5)), ((1,), 4, StepTime(9.0, 0.0))],
        [Measured(2, 3, 4, StepTime(5.0, 0.0))],
    )
    assert times.of((2, 1), 4) == times.of((1, 2), 4) == StepTime(1.0, 0.5)
    assert times.of((2, 1), 6) == StepTime(2.0, 0.5)


def test_batches_are_split_over_gpus_and_accumulated(tmp_path: Path) -> None:
    [job] = read_jobs(write_pollux(tmp_path, "a,0,toy,1,8"), "1.0", "1")
    local = job.application.local_batch
    assert local(8, 1) == (8, 0)
    assert local(64, 1) == (32, 1)  # one GPU above the smallest batch accumulates at least once
    assert local(64, 3) == (21, 0)  # at most 64 // 3
    assert local(64, 4) == (16, 0)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("a,0,llama,1,8", "workload-1.csv:2: unknown application 'llama'; known are toy"),
        ("a,0,toy,0,8", "workload-1.csv:2: num_replicas must be above 0"),
        ("a,0,toy,65,8", "workload-1.csv:2: num_replicas is 65, above 64"),
        ("a,x,toy,1,8", "workload-1.csv:2: time is 'x', not a whole number"),
        ("a,0,toy,1,100", "workload-1.csv:2: batch_size is 100, not from 8 to 64 as for toy"),
        ("a,0,toy,1", "workload-1.csv:2: 4 values for 5 columns"),
        ("a,0,toy,1,8\na,0,toy,1,8", "workload-1.csv:3: the name 'a' is empty or used twice"),
    ],
)
def test_bad_rows_are_named(tmp_path: Path, row: str, message: str) -> None:
    assert_refused(replay(write_pollux(tmp_path, row)), message)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--load", "2.0"], "no such workload: "),
        (["--workload", "9"], "has --load 1.0 --workload 1"),
        (["--policy", "first_fit"], "unknown round policy 'first_fit'; known are "),
        (["--jobs", "x"], "--jobs cannot be used with --trace pollux"),
        (["--order", "fifo"], "--order cannot be used with --trace pollux"),
    ],
)
def test_wrong_options_are_one_line(tmp_path: Path, options: list[str], message: str) -> None:
    assert_refused(replay(write_pollux(tmp_path, "a,0,toy,1,8"), *options), message)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("applications.json", None, "applications.json: cannot be read"),
        ("applications.json", "[]", "applications.json: not an object of applications"),
        ("applications.json", '{"toy": {"epochs": 0}}', "toy: epochs is 0, not a whole number above 0"),
        ("applications/toy/placements.csv", None, "placements.csv: cannot be read"),
        ("applications/toy/placements.csv", "placement,local_bsz,step_time,sync_time\n10,1,1,0\n",
         "placements.csv:2: placement is '10', not the numbers of GPUs"),
        ("applications/toy/placements.csv", "placement,local_bsz,step_time,sync_time\n1,1,0,0\n",
         "placements.csv:2: step_time is 0.0 and sync_time 0.0, not a part of it"),
        ("applications/toy/placements.csv", "placement,local_bsz,step_time,sync_time\n", "toy: no step time"),
        ("applications/toy/validation-8.csv", "progress,iteration,grad_sqr,grad_var\n1,1,0,0\n2,2,1,0\n",
         "validation-8.csv: grad_sqr and grad_var are both 0"),
        ("applications/toy/validation-8.csv", "progress,iteration,grad_sqr,grad_var\n2,1,1,0\n1,2,1,0\n",
         "validation-8.csv: progress falls"),
        ("applications/toy/validation-8.csv", None, "total batch size of 8 is outside the tables, 64 to 64"),
        ("applications/toy/validation-8.csv", "progress,iteration,grad_sqr,grad_var\n1,1,1,0\n",
         "validation-8.csv: 1 epochs, fewer than the 2 to run"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = write_pollux(tmp_path, "a,0,toy,1,8")
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    assert_refused(replay(folder), message)


def test_the_folder_writes_jobs_and_pictures(tmp_path: Path) -> None:
    folder, out = write_pollux(tmp_path / "data", "a,0,toy,1,8", "b,0,toy,64,64"), tmp_path / "out"
    result = replay(folder, "--output-dir", str(out))
    assert result.exit_code == 0, result.output
    summary: dict[str, Any] = json.loads(result.stdout)
    assert {
        "makespan_s",
        "worst_ftf",
        "unfair_percent",
        "allocated_percent",
        "preemptions",
        "lost_gpu_s",
    } < set(summary)
    assert summary["makespan_s"] == 300 + RESTART_S + 200
    assert summary["lost_gpu_s"] == RESTART_S * 65
    assert {path.name for path in out.iterdir()} >= {
        "jobs.csv",
        "report.html",
        "timeline.png",
        "how-long-jobs-take.png",
        "finish-time-fairness.png",
    }
    assert (out / "jobs.csv").read_text().splitlines()[1].startswith("a,1,0,60,290,290,0,1,30")


def test_the_makespan_begins_with_the_first_arrival(tmp_path: Path) -> None:
    folder = write_pollux(tmp_path, "a,107,toy,1,8", "b,300,toy,64,64")
    alone = json.loads(replay(folder).stdout)
    more = ("--policies", "tiresias", "--workers", "1", "--json")
    compared = CliRunner().invoke(main, ["compare", "--trace", "pollux", "--data", str(folder), *more])
    [run] = json.loads(compared.stdout)["runs"]
    assert alone["makespan_s"] == run["makespan_s"] == max(alone["jct_s"]["a"], 193 + alone["jct_s"]["b"])


def test_share_policies_run_on_these_workloads_too(tmp_path: Path) -> None:
    """Two jobs of all GPUs take turns under equal shares, one after the other under Tiresias."""
    folder = write_pollux(tmp_path, "a,0,toy,64,64", "b,0,toy,64,64", epochs=6)
    write_workload(folder, "a,0,toy,64,64", "b,0,toy,64,64")
    turns = {name: run(folder, name)["b"].started_at for name in ("tiresias", "gandiva_fair")}
    assert turns["gandiva_fair"] == 120
    assert turns["tiresias"] is not None
    assert turns["tiresias"] > 600


def test_a_shape_that_nothing_was_measured_near_is_named(tmp_path: Path) -> None:
    folder = write_pollux(tmp_path, "a,0,toy,64,64")
    scalability = folder / "applications" / "toy" / "scalability.csv"
    scalability.write_text("num_nodes,num_replicas,local_bsz,step_time,sync_time\n")
    assert_refused(replay(folder), "toy: no step time was measured near 1 sample a GPU on 64 GPUs")


def test_a_job_that_hardly_makes_progress_ends_the_replay(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("simulator.rounds.fixed_rounds.MAX_ROUNDS", 50)
    folder = write_pollux(tmp_path, "a,0,toy,1,8", epoch_progress=1e9)
    assert_refused(replay(folder), "not all jobs ended within 50 rounds: a job runs for too long")
