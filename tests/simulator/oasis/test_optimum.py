"""The offline optimum equals that of an exhaustive search, and bounds every scheduler's utility."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given, settings

from simulator.oasis.ledger import PS, WORKER
from simulator.oasis.milp import Maximisation, Solution
from simulator.oasis.model import Instance, TrainingJob, Units, to_units
from simulator.oasis.optimum import FixedPlan, find_optimum
from simulator.oasis.packing import capacity_rows, pack, server_types
from simulator.oasis.planner import Oasis
from simulator.oasis.prices import fit_prices
from simulator.oasis.programme import lower_hull
from simulator.oasis.random_instances import draw_instance
from simulator.oasis.simulation import run
from tests.simulator.oasis.small import a_job, instances


def every_course(job: TrainingJob, slots: int) -> list[tuple[int, ...]]:
    """Return every way to spread exactly the job's work over the slots, and the one of not running."""
    ranges = [range(min(job.chunks, job.work) + 1 if slot >= job.arrival else 1) for slot in range(slots)]
    return [(0,) * slots, *(course for course in itertools.product(*ranges) if sum(course) == job.work)]


def brute_force(instance: Instance) -> float:
    """Return the best utility over every combination of courses that fits every slot, server by server."""
    capacities = {
        WORKER: [to_units(server) for server in instance.worker_servers],
        PS: [to_units(server) for server in instance.ps_servers],
    }
    known: dict[tuple[str, tuple[int, ...]], bool] = {}

    def fits(counts: tuple[int, ...]) -> bool:
        servers = tuple(job.ps_for[count] for job, count in zip(instance.jobs, counts, strict=True))
        for role, wanted in ((WORKER, counts), (PS, servers)):
            if (role, wanted) not in known:
                demands = [job.worker_units if role == WORKER else job.ps_units for job in instance.jobs]
                known[role, wanted] = place_all(capacities[role], list(zip(demands, wanted, strict=True)))
            if not known[role, wanted]:
                return False
        return True

    best = 0.0
    for courses in itertools.product(*(every_course(job, instance.slots) for job in instance.jobs)):
        utility = sum(
            job.utility_at(max(slot for slot, count in enumerate(course) if count))
            for job, course in zip(instance.jobs, courses, strict=True)
            if any(course)
        )
        if utility > best and all(fits(counts) for counts in zip(*courses, strict=True)):
            best = utility
    return best


def place_all(free: list[Units], wanted: list[tuple[Units, int]]) -> bool:
    """Return whether every worker finds a server, trying every server for each."""
    if not wanted:
        return True
    (demand, count), *others = wanted
    if count == 0:
        return place_all(free, others)
    tried = set()
    for index, room in enumerate(free):
        left = tuple(have - need for have, need in zip(room, demand, strict=True))
        if min(left) < 0 or room in tried:
            continue
        tried.add(room)
        if place_all([*free[:index], left, *free[index + 1 :]], [(demand, count - 1), *others]):
            return True
    return False


@settings(max_examples=60)
@given(instances(jobs=3, slots=3, most_servers=2))
def test_the_optimum_equals_brute_force(instance: Instance) -> None:
    optimum = find_optimum(instance, 60)
    assert optimum.proven
    assert optimum.utility == pytest.approx(brute_force(instance), rel=1e-5)
    result = run(instance, partial(FixedPlan, plan=optimum.plan))
    assert result.utility == pytest.approx(optimum.utility)


def test_counts_that_fit_by_type_but_not_by_server_are_cut_off() -> None:
    """Two servers of 5 GPUs and 5 CPUs: by sum each demand fits three times, by server it does not."""
    server = (5, 5, 50, 50, 10.0)
    demands = ((3, 2), (2, 3), (3, 3), (2, 2))
    jobs = tuple(
        a_job(
            f"job-{index}", chunks=1, epochs=1, minibatch_slots=1.0, gradient=0.0, worker=(*demand, 1, 1, 0.0)
        )
        for index, demand in enumerate(demands)
    )
    instance = Instance(1, (server, server), ((0, 8, 8, 8, 10.0),), jobs)
    optimum = find_optimum(instance, 60)
    assert optimum.proven
    assert optimum.utility == pytest.approx(brute_force(instance), rel=1e-6)


def test_the_optimum_of_jobs_that_are_worth_nothing_is_nothing() -> None:
    instance = Instance(5, ((8, 8, 8, 8, 8.0),), ((0, 8, 8, 8, 10.0),), (a_job(sensitivity=1e9, target=0.0),))
    optimum = find_optimum(instance, 60)
    assert (optimum.utility, optimum.bound, optimum.proven) == (0.0, 0.0, True)


@settings(max_examples=100)
@given(instances(jobs=4))
def test_rounded_capacity_rows_exclude_no_counts_that_pack(instance: Instance) -> None:
    demands = [job.worker_units for job in instance.jobs]
    for kind in server_types(instance.worker_servers):
        rows = capacity_rows(kind, demands)
        for counts in itertools.product(range(4), repeat=len(demands)):
            capacities = [kind.capacity] * len(kind.servers)
            if place_all(capacities, list(zip(demands, counts, strict=True))):
                for row in rows:
                    assert np.dot(row, counts) <= len(kind.servers) + 1e-9
                assert pack(kind, counts, demands, 10.0) is not None


def test_the_hull_allows_exactly_the_required_ps() -> None:
    values = [0, 1, 1, 2, 2, 2, 3]
    edges = lower_hull(values)
    for x, y in enumerate(values):
        assert np.ceil(max(slope * x + offset for slope, offset in edges) - 1e-9) == y


@pytest.mark.parametrize("seed", range(1, 6))
def test_the_optimum_bounds_oasis_within_its_ratio(seed: int) -> None:
    instance = draw_instance(seed, jobs=5, slots=12, servers=2, load=1.0)
    optimum = find_optimum(instance, 60)
    prices = fit_prices(instance.jobs, instance)
    utility = run(instance, lambda ledger: Oasis(ledger, prices)).utility
    assert optimum.proven
    assert utility <= optimum.utility * (1 + 1e-6)
    assert optimum.utility <= 2 * prices.alpha * utility


def test_an_unproven_optimum_is_reported_as_not_proven(monkeypatch: pytest.MonkeyPatch) -> None:
    """The solver finds the best solution each time, but runs out of time before it has proven it."""
    solve = Maximisation.solve

    def hurried(model: Maximisation, time_limit_s: float, *, relaxed: bool = False) -> Solution:
        found = solve(model, time_limit_s, relaxed=relaxed)
        return replace(found, optimal=False, bound=1.5 * found.objective)

    instance = draw_instance(1, jobs=4, slots=10, servers=2, load=1.0)
    sure = find_optimum(instance, 60)
    monkeypatch.setattr(Maximisation, "solve", hurried)
    unsure = find_optimum(instance, 60)
    assert (sure.proven, unsure.proven) == (True, False)
    assert unsure.utility == pytest.approx(sure.utility)
    assert unsure.bound > unsure.utility


def test_an_optimum_cut_short_by_time_is_not_proven() -> None:
    instance = draw_instance(3, jobs=10, slots=30, servers=5, load=1.0)
    optimum = find_optimum(instance, 0.2)
    assert not optimum.proven
    assert optimum.gap > 0
    assert run(instance, partial(FixedPlan, plan=optimum.plan)).utility == pytest.approx(optimum.utility)
