"""FIFO, DRF, RRH and Dorm schedule by their rules, within the same constraints as OASiS."""

from __future__ import annotations

from collections import defaultdict

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulator.errors import InputError
from simulator.oasis.baselines import dorm, drf
from simulator.oasis.experiment import ALGORITHMS, SCHEDULERS, OasisCase, compare
from simulator.oasis.ledger import WORKER, Ledger, count_of, role_of
from simulator.oasis.model import Amounts, Instance, TrainingJob
from simulator.oasis.prices import fit_prices
from simulator.oasis.random_instances import draw_history, draw_instance, scale_to_load
from simulator.oasis.simulation import InstanceRun, run
from tests.simulator.oasis.small import a_job, instances

SERVER = (8, 32, 64, 32, 20.0)


def play(instance: Instance, name: str, seed: int = 0) -> tuple[InstanceRun, dict[int, dict[str, int]]]:
    """Return the run, and the workers of each job in each slot. `run` raises where a constraint is broken."""
    workers: dict[int, dict[str, int]] = defaultdict(lambda: defaultdict(int))

    def watch(slot: int, ledger: Ledger) -> None:
        for lease in ledger.states[slot].leases.values():
            if role_of(lease) == WORKER:
                workers[slot][lease.request.owner] += count_of(lease)

    case = OasisCase(seed, instance, fit_prices(instance.jobs, instance))
    result = run(instance, lambda ledger: SCHEDULERS[name](ledger, case), on_slot=watch)
    return result, workers


@pytest.mark.parametrize("name", [name for name in SCHEDULERS if name != "oasis"])
@settings(max_examples=15)
@given(instance=instances(jobs=6, slots=8), seed=st.integers(0, 5))
def test_every_constraint_holds_and_the_same_seed_gives_the_same_run(
    name: str, instance: Instance, seed: int
) -> None:
    (first, workers), (second, again) = play(instance, name, seed), play(instance, name, seed)
    assert first.outcomes == second.outcomes
    assert workers == again


def test_fifo_starts_in_order_of_arrival_and_keeps_the_gang() -> None:
    jobs = tuple(a_job(f"job-{index}", chunks=8, epochs=3, worker=(3, 1, 1, 1, 1.0)) for index in range(4))
    instance = Instance(200, (SERVER,), ((0, 32, 64, 32, 20.0),), jobs)
    result, workers = play(instance, "fifo")
    starts = [min(slot for slot, held in workers.items() if job.job_id in held) for job in jobs]
    assert starts == sorted(starts)
    assert starts[-1] > 0
    for job in jobs:
        sizes = {held[job.job_id] for held in workers.values() if job.job_id in held}
        assert len(sizes) == 1
    assert result.completed == 4


def test_rrh_starts_the_job_with_the_most_utility_per_resource() -> None:
    """One worker at a time; the job that arrives second is worth ten times as much."""
    jobs = [a_job(name, chunks=1, priority=worth) for name, worth in (("dull", 10.0), ("dear", 100.0))]
    instance = Instance(20, ((1, 8, 8, 8, 20.0),), ((0, 8, 8, 8, 20.0),), tuple(jobs))
    result, workers = play(instance, "rrh")
    assert result.accepted == 2
    assert dict(workers[0]) == {"dear": 1}


def test_in_fifo_a_job_that_does_not_fit_blocks_the_jobs_behind_it() -> None:
    """Nine GPUs: the second needs eight and waits for the first; the third needs one, which is free."""
    large = {"chunks": 1, "gradient": 0.0, "worker": (8, 1, 1, 1, 0.0)}
    jobs = (
        a_job("first", **large),
        a_job("second", **large),
        a_job("third", **large | {"worker": (1, 1, 1, 1, 0.0)}),
    )
    _, workers = play(Instance(20, ((9, 32, 64, 32, 20.0),), ((0, 32, 64, 32, 20.0),), jobs), "fifo")
    assert dict(workers[0]) == {"first": 1}
    begins = {job.job_id: min(slot for slot, held in workers.items() if job.job_id in held) for job in jobs}
    assert begins["third"] == begins["second"] > 0


def test_drf_gives_equal_dominant_shares() -> None:
    """The example of Ghodsi et al.: 9 CPUs and 18 GB, users of (1 CPU, 4 GB) and (3 CPUs, 1 GB)."""
    memory = a_job("memory", chunks=50, epochs=50, gradient=0.0, worker=(0, 1, 4, 0, 0.0))
    cpu = a_job("cpu", chunks=50, epochs=50, gradient=0.0, worker=(0, 3, 1, 0, 0.0))
    instance = Instance(60, ((0, 9, 18, 0, 0),), ((0, 1, 1, 1, 1.0),), (memory, cpu))
    _, workers = play(instance, "drf")
    assert dict(workers[0]) == {"memory": 3, "cpu": 2}
    assert drf.dominant_share(Ledger(instance), memory, 3) == pytest.approx(2 / 3)


def test_the_dominant_share_may_be_one_of_the_parameter_servers() -> None:
    job = a_job(chunks=4, worker=(1, 1, 2, 1, 2.0), ps=(0, 4, 2, 1, 2.0))
    ledger = Ledger(Instance(9, ((8, 32, 64, 32, 20.0),), ((0, 16, 64, 32, 20.0),), (job,)))
    assert drf.dominant_share(ledger, job, 3) == pytest.approx(3 * 4 / 16)


def test_rrh_refuses_a_job_that_costs_the_others_more() -> None:
    dear = [a_job(f"dear-{index}", priority=100.0, sensitivity=2.0, target=3.0) for index in range(3)]
    worthless = a_job("worthless", chunks=2, epochs=30, priority=1.0, sensitivity=0.0)
    instance = Instance(60, ((2, 8, 8, 8, 20.0),), ((0, 8, 8, 8, 20.0),), (*dear, worthless))
    result, _ = play(instance, "rrh")
    accepted = {outcome.job.job_id for outcome in result.outcomes if outcome.accepted}
    assert "dear-0" in accepted
    assert "worthless" not in accepted


def test_dorm_bounds_the_unfairness_of_a_full_cluster() -> None:
    """Eight workers of `all` use most, but are 0.5 from the fair half, and so is each of the other jobs."""
    worker = {"all": (1, 1, 1, 1, 1.0), "gpu": (1, 0, 0, 0, 0.0), "cpu": (0, 1, 0, 0, 0.0)}
    jobs = tuple(a_job(name, chunks=8, gradient=0.0, worker=one) for name, one in worker.items())
    instance = Instance(9, ((8, 8, 8, 8, 8.0),), ((0, 64, 64, 64, 64.0),), jobs)
    ledger = Ledger(instance)
    fair = dorm.fair_workers(ledger, jobs)
    assert fair == pytest.approx([4, 4, 4])
    found = dorm.Dorm(ledger, instance).repartition(jobs)
    assert found is not None
    distances = [abs(found[job.job_id] - workers) / 8 for job, workers in zip(jobs, fair, strict=True)]
    assert sum(distances) <= dorm.FAIRNESS_LOSS * 2 * 5 + 1e-6
    assert found["all"] > 4


def test_dorm_bounds_the_jobs_resized_at_a_time() -> None:
    instance = draw_instance(2, jobs=12, slots=30, servers=3, load=1.5)
    _, workers = play(instance, "dorm")
    for slot in range(1, instance.slots):
        before, now = workers[slot - 1], workers[slot]
        stayed = [job_id for job_id in before if job_id in now]
        # Shrinking to the work that is left, in a job's last slot, is no adjustment.
        resized = sum(now[job_id] > before[job_id] for job_id in stayed)
        assert resized <= max(1, -(-len(stayed) * dorm.ADJUSTMENTS // 1))


def test_drawn_jobs_keep_the_ranges_of_the_paper() -> None:
    instance = draw_instance(11, jobs=300, slots=100, servers=5)
    assert [job.arrival for job in instance.jobs] == sorted(job.arrival for job in instance.jobs)
    for job in instance.jobs:
        assert 50 <= job.epochs <= 200
        assert 5 <= job.chunks <= 100
        assert 10 <= job.minibatches <= 100
        assert 0 <= job.worker[0] <= 4
        assert 1 <= job.worker[1] <= 10
        assert 2 <= job.worker[2] <= 32
        assert 0.1 <= job.worker[4] <= 5 <= job.ps[4] <= 20
        assert 1 <= job.priority <= 100
        assert 1 <= job.target <= 15
        assert job.arrival + job.shortest_duration <= instance.slots
    kinds = [sum(test(job.sensitivity) for job in instance.jobs) / 300 for test in (
        lambda gamma: gamma == 0, lambda gamma: 0 < gamma <= 1, lambda gamma: 4 <= gamma <= 6
    )]  # fmt: skip
    assert kinds == pytest.approx([0.10, 0.55, 0.35], abs=0.08)


@pytest.mark.parametrize("load", [0.3, 1.0, 2.5])
def test_the_load_is_reached_and_durations_are_unchanged(load: float) -> None:
    plain = draw_instance(4, jobs=20, slots=50, servers=4)
    scaled = scale_to_load(plain, load)
    assert scaled.load() == pytest.approx(load, rel=0.05)
    assert [job.shortest_duration for job in scaled.jobs] == [job.shortest_duration for job in plain.jobs]


def test_a_history_shares_no_job_with_the_instance() -> None:
    instance = draw_instance(4, load=1.0)
    history = draw_history(instance, 4)
    assert len(history) == 200
    assert {job.priority for job in history}.isdisjoint(job.priority for job in instance.jobs)
    assert draw_history(instance, 4) == history


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_job_of_next_to_no_work_takes_one_slot(name: str) -> None:
    job = a_job(chunks=1, epochs=1, minibatch_slots=1e-12, gradient=0.0)
    assert (job.work, job.shortest_duration) == (1, 1)
    assert outcome_of(job, (4, 4, 8, 4, 10.0), name) == 0


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_job_on_servers_without_what_it_requests_does_not_run(name: str) -> None:
    assert outcome_of(a_job(worker=(1, 0, 0, 0, 0.0), gradient=0.0), (0, 4, 8, 4, 10.0), name) is None


def outcome_of(job: TrainingJob, server: Amounts, name: str) -> int | None:
    """Return the slot in which the job ends, alone on that worker server."""
    instance = Instance(5, (server,), ((0, 8, 8, 8, 10.0),), (job,))
    case = OasisCase(0, instance, fit_prices(instance.jobs, instance))
    [result] = compare(case, [name]).runs[name].outcomes
    return result.completion


def test_a_worker_requests_at_least_a_millionth_of_something() -> None:
    with pytest.raises(InputError, match="a worker must request a resource; w is all zeros, to a millionth"):
        a_job(worker=(0, 1e-9, 0, 0, 0.0), gradient=0.0)
