"""Shockwave's trace in Gavel's rounds: fairness and completion times equal the published floats."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from resource_manager.errors import how_to_install
from resource_manager.scheduling import allocator
from simulator.rounds.gavel_rounds import MAX_FAILURES, RESTART_S, ROUND_S, GavelRounds
from simulator.rounds.linear_programs import get_solver
from simulator.rounds.policies import get_round_policy
from simulator.rounds.policies.shockwave_shares import (
    gandiva_fair,
    max_min_fairness,
    max_sum_throughput,
    min_total_duration,
)
from simulator.rounds.shockwave import ShockwaveJob, read_jobs
from simulator.rounds.studies import study
from tests.simulator.refusing import assert_refused
from tests.simulator.rounds.small import shockwave_job, study_replay, write_shockwave

FIGURES = ("makespan_s", "mean_jct_s", "worst_ftf", "unfair_percent", "rounds", "jct_s", "ftf")
replay = partial(study_replay, "shockwave")


@pytest.mark.parametrize(("policy", "solver"), [("gandiva_fair", ""), ("max_min_fairness", "ecos")])
def test_every_figure_is_the_published_float(shockwave_data: Path, policy: str, solver: str) -> None:
    if solver == "ecos":
        pytest.importorskip("ecos", reason="the published shares are those of ECOS: pip install '.[ecos]'")
    folder = shockwave_data
    result = replay(folder, "--policy", policy, *(("--solver", solver) if solver else ()))
    assert result.exit_code == 0, result.output
    summary = json.loads(result.stdout)
    expected = json.loads((folder / "expected" / f"{policy}.json").read_text())
    assert {name: summary[name] for name in FIGURES} == {name: expected[name] for name in FIGURES}


def test_jobs_run_in_the_published_rounds(shockwave_data: Path) -> None:
    """The expected files also list the jobs of each round."""
    folder = shockwave_data
    rounds = study("shockwave", (str(folder),), get_round_policy("gandiva_fair"))
    rounds.run()
    allocator.check(rounds.leases.cluster)
    expected = json.loads((folder / "expected" / "gandiva_fair.json").read_text())["scheduled"]
    starts = sorted({span.begin for job in rounds.jobs for span in job.spans})
    first = {job.name for job in rounds.jobs if job.spans and job.spans[0].begin == starts[0]}
    assert first == {str(job) for job in expected[0]}


@pytest.mark.parametrize("policy", ["max_min_fairness", "min_total_duration", "max_sum_throughput"])
def test_the_solvers_agree_on_the_optimum(shockwave_data: Path, policy: str) -> None:
    """Many shares are optimal; the least GPU time, the duration and the throughput are the same."""
    pytest.importorskip("ecos", reason="compares ECOS with HiGHS")
    jobs = read_jobs(shockwave_data)[:60]
    shares = {
        "max_min_fairness": max_min_fairness,
        "min_total_duration": min_total_duration,
        "max_sum_throughput": max_sum_throughput,
    }[policy]
    worth = []
    for name in ("highs", "ecos"):
        found = shares(jobs, 32.0, get_solver(name))
        assert all(0 <= share <= 1 for share in found)
        assert sum(job.gpus * share for job, share in zip(jobs, found, strict=True)) <= 32 + 1e-6
        if policy == "max_sum_throughput":
            worth.append(sum(job.rate * share for job, share in zip(jobs, found, strict=True)))
        elif policy == "max_min_fairness":
            worth.append(min(job.gpus * share for job, share in zip(jobs, found, strict=True)))
        else:
            worth.append(
                max(job.steps_left / (job.rate * share) for job, share in zip(jobs, found, strict=True))
            )
    # Interior points need not use up the duration found, whose bounds the search leaves 5 % apart.
    assert worth[0] == pytest.approx(worth[1], rel=0.05 if policy == "min_total_duration" else 1e-5)


def test_gandiva_fair_gives_every_job_the_same_share(tmp_path: Path) -> None:
    jobs = read_jobs(write_shockwave(tmp_path, *(shockwave_job(k, gpus=1 + k % 2) for k in range(64))))
    assert list(gandiva_fair(jobs[:10], 32.0, get_solver("highs"))) == [1.0] * 10
    assert list(gandiva_fair(jobs, 32.0, get_solver("highs"))) == [0.5] * 64


def test_a_job_without_gpus_takes_no_share_from_the_others(tmp_path: Path) -> None:
    jobs = read_jobs(write_shockwave(tmp_path, *(shockwave_job(k) for k in range(7))))
    jobs[-1].gpus = 0
    solve = get_solver("highs")
    assert list(max_min_fairness(jobs, 4.0, solve)[:-1]) == pytest.approx([4 / 6] * 6)
    assert list(max_min_fairness(jobs[-1:], 4.0, solve)) == [1.0], "nor where all are without"


def run(folder: Path, policy: str = "gandiva_fair") -> list[ShockwaveJob]:
    rounds = study("shockwave", (str(folder),), get_round_policy(policy))
    assert isinstance(rounds, GavelRounds)
    rounds.run()
    assert not rounds.leases.cluster.leases, "all leases are released"
    return list(rounds.jobs)


def test_a_round_lasts_as_long_as_its_slowest_job(tmp_path: Path) -> None:
    """1,200 steps fit into a round of 120 s; the second job ends inside, after 10 s."""
    long, short = run(write_shockwave(tmp_path, shockwave_job(0, steps=2400), shockwave_job(1)))
    assert (long.ended_at, short.ended_at) == (2 * ROUND_S, 10.0)


def test_only_a_job_that_did_not_run_before_pays_a_restart(tmp_path: Path) -> None:
    """In the first round nobody pays; the job that comes at 120 loses 20 s of its first round."""
    jobs = [shockwave_job(0, steps=3600), shockwave_job(1, steps=2400, arrival_s=60.0)]
    first, second = run(write_shockwave(tmp_path, *jobs))
    assert first.ended_at == 3 * ROUND_S
    assert first.lost_gpu_s == 0
    assert second.ended_at == 3 * ROUND_S + RESTART_S
    assert second.lost_gpu_s == RESTART_S


def test_noise_doubles_the_batch_size_and_keeps_the_epochs(tmp_path: Path) -> None:
    """20 samples a batch: 20 steps an epoch. From epoch 10 on 40 are allowed: then 10 steps an epoch."""
    folder = write_shockwave(
        tmp_path,
        shockwave_job(0, batch_size=20, mode="gns", steps=3000),
        noise={"LM": {"20": {"1": [[10, 40]]}}},
    )
    [job] = run(folder)
    # Round 1: 1,200 of 3,000 steps, epoch 60 of 150. The size is noted after it, and changed after round 2,
    # when epoch 120 of 150 is reached: 30 epochs of 10 steps are left.
    assert job.batch_size == 40
    assert (job.run, job.total) == (1500, 1500)
    assert job.ended_at == 2 * ROUND_S + 30


def test_accordion_returns_to_the_first_size_in_critical_epochs(tmp_path: Path) -> None:
    [job] = read_jobs(write_shockwave(tmp_path, shockwave_job(0, mode="accordion", steps=3000)))
    job.decide()
    assert job.pending_batch_size is None  # LM is critical before epoch 10
    job.run = 110
    job.decide()
    assert job.pending_batch_size == 80
    job.adapt()
    assert (job.batch_size, job.total, job.run) == (80, 1500, 55)
    job.run = 20
    job.decide()
    assert job.pending_batch_size == 40


def test_a_job_without_steps_left_ends_after_five_empty_rounds(tmp_path: Path) -> None:
    """A change of size rounds epochs up and may leave nothing to do; others go on meanwhile."""
    folder = write_shockwave(tmp_path, shockwave_job(0, steps=9600), shockwave_job(1, steps=2400))
    rounds = study("shockwave", (str(folder),), get_round_policy("gandiva_fair"))
    empty = rounds.jobs[1]
    assert isinstance(empty, ShockwaveJob)
    empty.run = empty.total
    rounds.run()
    assert empty.ended_at == (MAX_FAILURES - 1) * ROUND_S


def test_a_job_that_arrives_later_than_all_others_have_ended_still_runs(tmp_path: Path) -> None:
    jobs = run(write_shockwave(tmp_path, shockwave_job(0), shockwave_job(1, arrival_s=5000.0)))
    assert jobs[1].ended_at is not None
    assert jobs[1].ended_at >= 5010.0


def test_optimus_resizes_jobs_of_this_trace(tmp_path: Path) -> None:
    [job] = run(write_shockwave(tmp_path, shockwave_job(0, steps=1600)), "optimus")
    assert len(job.spans[0].servers) == 4
    assert job.ended_at == 40.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model": "GPT"}, "jobs.json: item 1: unknown model 'GPT'"),
        ({"mode": "magic"}, "jobs.json: item 1: mode is 'magic', not one of static, accordion, gns"),
        ({"gpus": 3}, "throughputs.json has no rate of LM at batch size 40 on 3 GPUs"),
        ({"gpus": 64}, "jobs.json: item 1: gpus is 64, above 32"),
        ({"steps": 0}, "jobs.json: item 1: steps and exclusive_s must be above 0"),
        ({"arrival_s": "soon"}, "jobs.json: item 1: arrival_s is 'soon', not a number"),
    ],
)
def test_bad_jobs_are_named(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    assert_refused(replay(write_shockwave(tmp_path, shockwave_job(0, **change))), message)


@pytest.mark.parametrize(
    ("file", "text", "message"),
    [
        ("jobs.json", None, "jobs.json: cannot be read: No such file"),
        ("jobs.json", "{}", "jobs.json: not a list of objects"),
        ("jobs.json", "[]", "jobs.json: the trace lists no job"),
        ("throughputs.json", "{}", "throughputs.json: not steps_per_s by model, batch size and GPUs"),
        ("throughputs.json", '{"steps_per_s": {"LM": {"40": {"1": -1}}}, "dataset_size": {"LM": 4}}',
         "throughputs.json: LM, batch size 40, 1 GPU: rate is -1.0"),
        ("throughputs.json", '{"steps_per_s": {}, "dataset_size": {"LM": 1e400}}', "not steps_per_s by"),
        ("gns.json", '{"LM": {"40": {"1": [3]}}}', "gns.json: not [epoch, batch size] by model"),
        ("gns.json", '{"LM": {"40": {"1": [[1e400, 8]]}}}', "gns.json: not [epoch, batch size] by model"),
    ],
)  # fmt: skip
def test_bad_files_are_named(tmp_path: Path, file: str, text: str | None, message: str) -> None:
    folder = write_shockwave(tmp_path, shockwave_job(0))
    (folder / file).unlink()
    if text is not None:
        (folder / file).write_text(text)
    assert_refused(replay(folder), message)


def test_jobs_must_be_in_order_of_arrival(tmp_path: Path) -> None:
    jobs = [shockwave_job(0, arrival_s=5.0), shockwave_job(1)]
    assert_refused(
        replay(write_shockwave(tmp_path, *jobs)), "jobs.json: item 2: arrival_s is 0.0, before that"
    )
    assert_refused(replay(write_shockwave(tmp_path, shockwave_job(0), shockwave_job(0))), "appears twice")


def test_wrong_options_are_one_line(tmp_path: Path) -> None:
    folder = write_shockwave(tmp_path, shockwave_job(0))
    assert_refused(replay(folder, "--policy", "themis"), "unknown round policy 'themis'; known are ")
    assert_refused(replay(folder, "--load", "1.0"), "--load cannot be used with --trace shockwave")


def test_a_missing_ecos_says_how_to_install_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "ecos", None)
    folder = write_shockwave(tmp_path, shockwave_job(0))
    result = replay(folder, "--policy", "max_min_fairness", "--solver", "ecos")
    assert_refused(result, f"--solver ecos needs ecos (GPL-3): {how_to_install('ecos')}")
    assert replay(folder, "--policy", "max_min_fairness").exit_code == 0
