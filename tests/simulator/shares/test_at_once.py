"""The program of a published figure: whatever the solver, its level is the optimum and its shares fit."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.shares.division import Options, divide_fleet
from simulator.shares.instance import Instance, Job, Team
from tests.simulator.shares.small import instances, rates_of

THREE = Instance(
    {"old": 3, "newer": 3, "new": 3},
    tuple(Job(name, None, (1.0, 2.0, 3.0), "a", weight) for name, weight in (("x", 1), ("y", 2), ("z", 1))),
    {"a": Team(weight=1, within="fairness")},
    {},
)


@pytest.mark.parametrize("solver", ["highs", "ecos"])
@settings(max_examples=30)
@given(instance=instances(), agnostic=st.booleans())
def test_the_first_level_is_that_of_filling(instance: Instance, solver: str, agnostic: bool) -> None:
    """Unless M, which stands above all that one job could have on one type, is lower."""
    pytest.importorskip(solver if solver == "ecos" else "highspy", reason="needs ECOS: pip install '.[ecos]'")
    division = divide_fleet(
        instance, Options("two_level", agnostic=agnostic, settle="at_once", solver=solver)
    )
    [filled] = divide_fleet(instance, Options("two_level", agnostic=agnostic)).levels
    rates = np.ones(1) if agnostic else rates_of(instance)
    most = (np.array([[job.gpus] for job in instance.jobs]) * rates).max()
    everyone_is_active = len(instance.jobs) == sum(
        1 if team.within == "fifo" else len([job for job in instance.jobs if job.team == name])
        for name, team in instance.teams.items()
        if any(job.team == name for job in instance.jobs)
    )
    bounded = filled if everyone_is_active else min(filled, most)
    assert division.levels == pytest.approx([bounded], rel=1e-5)
    assert (division.gpus.sum(axis=0) <= np.array(list(instance.gpus.values())) + 1e-6).all()


def test_three_jobs_on_nine_idle_gpus_are_held_below_what_they_could_have() -> None:
    """The printed figure of such a row; filled, each has a GPU for all of the time."""
    pytest.importorskip("ecos", reason="compares with a figure of ECOS: pip install '.[ecos]'")
    agnostic = Options("two_level", agnostic=True)
    at_once = replace(agnostic, settle="at_once", solver="ecos")
    assert divide_fleet(THREE, agnostic).normalised == pytest.approx([1, 1, 1])
    assert divide_fleet(THREE, at_once).normalised.round(3).tolist() == [0.787, 1, 0.787]


def test_a_program_for_each_place_in_the_queues() -> None:
    fifo = replace(THREE, teams={"a": Team(weight=1, within="fifo")})
    for instance, programs in ((THREE, 1), (fifo, 3)):
        division = divide_fleet(instance, Options("two_level", settle="at_once"))
        assert division.programs == programs
        assert len(division.levels) == 1
