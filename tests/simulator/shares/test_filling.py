"""Levels rise until no job gains without another's loss; they are those of a fill from the definition."""

from __future__ import annotations

from typing import Literal

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.shares import different_jobs
from simulator.shares.division import Division, Options, divide_fleet
from simulator.shares.instance import Instance, Job, Team
from simulator.timing import timed
from tests.simulator.shares.job_by_job import fill_job_by_job
from tests.simulator.shares.small import instances, uneven_jobs

VARIANTS = [
    Options(policy, pack=pack, agnostic=agnostic)
    for policy in ("max_min", "two_level")
    for pack, agnostic in ((False, False), (True, False), (False, True))
]


def assert_fits(instance: Instance, division: Division) -> None:
    assert (division.gpus >= 0).all()
    assert (division.gpus.sum(axis=0) <= np.array(list(instance.gpus.values())) + 1e-6).all()
    sizes = np.array([job.gpus for job in instance.jobs])
    assert (division.gpus.sum(axis=1) <= sizes + 1e-6).all()


@settings(max_examples=80)
@given(instances(), st.sampled_from(VARIANTS))
def test_levels_are_those_of_a_fill_job_by_job(instance: Instance, options: Options) -> None:
    division = divide_fleet(instance, options)
    first, levels = fill_job_by_job(instance, options)
    assert division.levels == pytest.approx([first], abs=1e-6)
    assert division.normalised == pytest.approx(levels, abs=1e-6)
    assert_fits(instance, division)


@settings(max_examples=40)
@given(instances(), st.booleans())
def test_gpus_yield_the_throughput(instance: Instance, agnostic: bool) -> None:
    """Without packing a job's throughput is that of the GPUs it has."""
    division = divide_fleet(instance, Options("two_level", agnostic=agnostic))
    for job, gpus, throughput in zip(instance.jobs, division.gpus, division.throughput, strict=True):
        assert gpus @ np.array(job.rates) / job.gpus == pytest.approx(throughput, abs=1e-6)
    units = [instance.proportional(job) for job in instance.jobs]
    assert division.throughput == pytest.approx(division.normalised * units)


@settings(max_examples=40)
@given(instances(), st.floats(0.01, 100))
def test_weights_and_units_are_relative(instance: Instance, factor: float) -> None:
    teams = {
        name: Team(weight=team.weight * factor, within=team.within) for name, team in instance.teams.items()
    }
    jobs = tuple(
        Job(job.name, None, tuple(rate * factor for rate in job.rates), job.team, job.weight, job.gpus)
        for job in instance.jobs
    )
    scaled = divide_fleet(Instance(instance.gpus, jobs, teams, {}), Options("two_level"))
    assert scaled.normalised == pytest.approx(
        divide_fleet(instance, Options("two_level")).normalised, abs=1e-6
    )


def three_jobs(within: Literal["fairness", "fifo"]) -> Instance:
    """Two of team a and one of b, on one GPU."""
    jobs = tuple(Job(name, None, (1.0,), team) for name, team in (("x", "a"), ("y", "a"), ("z", "b")))
    return Instance({"gpu": 1}, jobs, {name: Team(weight=1, within=within) for name in "ab"}, {})


def test_a_team_by_fairness_divides_its_weight() -> None:
    division = divide_fleet(three_jobs("fairness"), Options("two_level"))
    assert division.normalised == pytest.approx([0.25, 0.25, 0.5])
    assert division.levels == pytest.approx([0.5])


def test_a_team_by_fifo_serves_its_first_job() -> None:
    division = divide_fleet(three_jobs("fifo"), Options("two_level"))
    assert division.normalised == pytest.approx([0.5, 0.0, 0.5])


def test_the_second_job_rises_once_the_first_has_all_it_can_use() -> None:
    """With three GPUs nobody waits for a GPU; with two, the team's second job gets what is left."""
    instance = three_jobs("fifo")
    for gpus, shares in ((3, [1, 1, 1]), (2, [1, 0, 1])):
        enlarged = Instance({"gpu": gpus}, instance.jobs, instance.teams, {})
        assert divide_fleet(enlarged, Options("two_level")).normalised == pytest.approx(shares, abs=1e-9)


def test_a_job_of_several_gpus_has_a_level_as_many_times_lower() -> None:
    jobs = (Job("one", None, (1.0,)), Job("four", None, (1.0,), gpus=4))
    division = divide_fleet(Instance({"gpu": 4}, jobs, {}, {}), Options("max_min"))
    assert division.levels == pytest.approx([1.0])
    assert division.normalised == pytest.approx([1.0, 0.75])
    assert division.gpus == pytest.approx(np.array([[1.0], [3.0]]))


@pytest.mark.parametrize("within", ["fairness", "fifo"])
def test_hundreds_of_different_jobs_are_divided_in_seconds(within: Literal["fairness", "fifo"]) -> None:
    instance = different_jobs(1024 if within == "fairness" else 512, within)
    with timed() as times:
        division = divide_fleet(instance, Options("two_level"))
    assert times.cpu_s < 5
    assert_fits(instance, division)


@pytest.mark.parametrize("seed", [10, 28, 51])
def test_errors_do_not_add_up_until_a_program_has_no_solution(seed: int) -> None:
    """In 28, HiGHS loses its way in one program; in the others, its tolerance would forbid a later one."""
    instance = uneven_jobs(seed)
    assert_fits(instance, divide_fleet(instance, Options("two_level")))
