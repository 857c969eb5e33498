"""Alike jobs are one group; whatever tells two jobs apart keeps them in two."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from simulator.shares.division import Options, divide_fleet
from simulator.shares.groups import group_jobs
from simulator.shares.instance import Instance, Job, Team

TEAMS = {"a": Team(weight=1, within="fairness"), "queue": Team(weight=1, within="fifo")}
ALIKE = Job("x", "kind", (1.0, 3.0), "a")


def members(*jobs: Job, by_team: bool = True, agnostic: bool = False) -> list[tuple[int, ...]]:
    instance = Instance({"old": 2, "new": 2}, jobs, TEAMS, {})
    return [group.members for group in group_jobs(instance, by_team=by_team, agnostic=agnostic)]


def test_jobs_that_differ_in_their_name_only_are_alike() -> None:
    other = replace(ALIKE, name="z", kind=None, rates=(1.0, 1.0))
    assert members(ALIKE, other, replace(ALIKE, name="y")) == [(0, 2), (1,)]


@pytest.mark.parametrize(
    "change", [{"gpus": 2}, {"weight": 2.0}, {"kind": None, "rates": (2.0, 3.0)}, {"team": "queue"}], ids=str
)
def test_what_tells_jobs_apart(change: dict[str, Any]) -> None:
    assert members(ALIKE, replace(ALIKE, name="y", **change)) == [(0,), (1,)]


def test_jobs_of_a_queue_are_told_apart_by_their_place() -> None:
    jobs = [replace(ALIKE, name=name, team="queue") for name in "xyz"]
    assert members(*jobs) == [(0,), (1,), (2,)]
    assert members(*jobs, by_team=False) == [(0, 1, 2)]


def test_without_knowledge_of_types_throughputs_tell_nothing_apart() -> None:
    assert members(ALIKE, replace(ALIKE, name="y", kind=None, rates=(5.0, 5.0)), agnostic=True) == [(0, 1)]


def test_two_jobs_of_a_group_share_a_gpu_half_and_half() -> None:
    """Together each is as fast as alone, so that two jobs have what one has of one GPU."""
    jobs = (Job("x", "k", (1.0,)), Job("y", "k", (1.0,)))
    instance = Instance({"gpu": 1}, jobs, {}, {("k", "k"): ((1.0,), (1.0,))})
    assert divide_fleet(instance, Options("max_min")).normalised == pytest.approx([0.5, 0.5])
    packed = divide_fleet(instance, Options("max_min", pack=True))
    assert packed.normalised == pytest.approx([1.0, 1.0])
    assert packed.gpus.ravel() == pytest.approx([0.5, 0.5])


def test_one_job_does_not_share_with_itself() -> None:
    instance = Instance({"gpu": 1}, (Job("x", "k", (1.0,)),), {}, {("k", "k"): ((9.0,), (9.0,))})
    assert divide_fleet(instance, Options("max_min", pack=True)).normalised == pytest.approx([1.0])
