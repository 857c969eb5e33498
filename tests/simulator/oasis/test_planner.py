"""OASiS: the fast form equals the literal one, and every plan keeps the paper's promises."""

from __future__ import annotations

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings

from resource_manager.core.models import Lease
from simulator.errors import SimulationError
from simulator.oasis.calibrate import calibrate, share_gained
from simulator.oasis.ledger import PS, WORKER, Ledger
from simulator.oasis.model import Instance
from simulator.oasis.planner import Oasis, best_schedule
from simulator.oasis.prices import Prices, fit_prices
from simulator.oasis.random_instances import draw_history, draw_instance
from simulator.oasis.simulation import run, work_done
from tests.simulator.oasis.literal import LiteralPlanner
from tests.simulator.oasis.small import a_job, instances


@settings(max_examples=150)
@given(instances())
def test_the_fast_form_equals_the_literal_one(instance: Instance) -> None:
    ledger = Ledger(instance)
    prices = fit_prices(instance.jobs, instance)
    oasis = Oasis(ledger, prices)
    for job in sorted(instance.jobs, key=lambda job: job.arrival):
        payoff, deployment = LiteralPlanner(job, job.arrival, ledger, prices).best()
        schedule = best_schedule(job, job.arrival, ledger, prices)
        assert (schedule is None) == (not deployment)
        if schedule is not None:
            assert schedule.payoff == pytest.approx(payoff, rel=1e-9)
            placed = {(each.slot, each.role, each.server): each.count for each in schedule.shares}
            assert placed == deployment
        oasis.arrive(job, job.arrival)


def per_slot(deployment: dict[tuple[int, str, int], int]) -> Counter[tuple[int, str]]:
    counts: Counter[tuple[int, str]] = Counter()
    for (slot, role, _), count in deployment.items():
        counts[slot, role] += count
    return counts


@settings(max_examples=40)
@given(instances(jobs=8, slots=8))
def test_plans_keep_every_constraint_and_are_never_revised(instance: Instance) -> None:
    """`run` itself raises where leases break a constraint, so completing the run is the check."""
    watched: list[Oasis] = []
    booked: dict[int, dict[str, Lease]] = {}

    class Watch(Oasis):
        def arrive(self, job, slot):
            before = [dict(state.leases) for state in self.ledger.states]
            accepted = super().arrive(job, slot)
            for later, leases in enumerate(before):
                now = self.ledger.states[later].leases
                assert leases.items() <= now.items()
                assert {lease.request.owner for lease in now.values() if lease.lease_id not in leases} <= {
                    job.job_id
                }
                booked[later] = dict(now)
            return accepted

    def make(ledger: Ledger) -> Oasis:
        watched.append(Watch(ledger, fit_prices(instance.jobs, instance)))
        return watched[0]

    def ends(slot: int, ledger: Ledger) -> None:
        assert dict(ledger.states[slot].leases) == booked.get(slot, {})

    result = run(instance, make, on_slot=ends)
    assert result.completed == result.accepted
    assert all(not state.leases for state in watched[0].ledger.states)


@settings(max_examples=40)
@given(instances(jobs=8, slots=8))
def test_an_accepted_job_pays_and_prices_rise_with_use(instance: Instance) -> None:
    ledger = Ledger(instance)
    prices = fit_prices(instance.jobs, instance)
    oasis = Oasis(ledger, prices)
    one = (1,) * 5
    for job in instance.jobs:
        schedule = best_schedule(job, job.arrival, ledger, prices)
        before = {role: prices.unit_price(ledger.pool(role), one, 0) for role in (WORKER, PS)}
        assert oasis.arrive(job, job.arrival) == (schedule is not None)
        for role, old in before.items():
            assert (prices.unit_price(ledger.pool(role), one, 0) >= old).all()
        if schedule is None:
            continue
        assert schedule.payoff > 0
        assert sum(share.count for share in schedule.shares if share.role == WORKER) == job.work
        for share in schedule.shares:
            new = prices.unit_price(ledger.pool(share.role), one, 0)
            if prices.high[share.role][1] > prices.low[share.role]:
                assert new[share.slot, share.server] > before[share.role][share.slot, share.server]


def test_the_same_seed_gives_the_same_plan() -> None:
    plans = []
    for _ in range(2):
        instance = draw_instance(7, load=1.0)
        prices = fit_prices(draw_history(instance, 7), instance)
        ledger = Ledger(instance)
        oasis = Oasis(ledger, prices)
        for job in instance.jobs:
            oasis.arrive(job, job.arrival)
        plans.append([list(state.leases.values()) for state in ledger.states])
    assert plans[0] == plans[1]


def test_a_used_server_sends_the_next_job_to_another() -> None:
    """Four worker-slots, two at a time; the price of a used server makes the next job choose the other."""
    instance = Instance(4, ((2, 8, 8, 8, 10.0),) * 2, ((0, 8, 8, 8, 10.0),) * 2, (a_job(), a_job("next")))
    ledger = Ledger(instance)
    prices = fit_prices(instance.jobs, instance)
    first = best_schedule(instance.jobs[0], 0, ledger, prices)
    assert first is not None
    assert Oasis(ledger, prices).arrive(instance.jobs[0], 0)
    second = best_schedule(instance.jobs[1], 0, ledger, prices)
    assert second is not None
    # Finishing in two slots is worth far more than the first prices cost: two workers a slot, at once.
    assert per_slot({(s.slot, s.role, s.server): s.count for s in first.shares}) == Counter(
        {(0, WORKER): 2, (0, PS): 1, (1, WORKER): 2, (1, PS): 1}
    )
    assert {share.server for share in first.shares} == {0}
    assert {share.server for share in second.shares} == {1}


def test_a_job_that_cannot_finish_is_refused_at_once() -> None:
    job = a_job(epochs=20)
    instance = Instance(3, ((2, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (job, a_job("fits", epochs=1)))
    result = run(instance, lambda ledger: Oasis(ledger, fit_prices(instance.jobs, instance)))
    assert [outcome.accepted for outcome in result.outcomes] == [False, True]


def test_a_refused_job_offered_again_is_refused_again() -> None:
    """No plan is revised, so later there are fewer slots, and no price in them has fallen."""
    instance = draw_instance(3, jobs=20, load=2.0)
    prices = fit_prices(instance.jobs, instance).scaled(low=50.0)

    def accepted(reoffer_after: int) -> set[str]:
        result = run(instance, lambda ledger: Oasis(ledger, prices), reoffer_after=reoffer_after)
        return {outcome.job.job_id for outcome in result.outcomes if outcome.accepted}

    assert 0 < len(accepted(0)) < 20
    assert accepted(0) == accepted(1)


def test_the_ledger_refuses_an_allocation_that_does_not_fit_and_stays_unchanged() -> None:
    job = a_job()
    instance = Instance(1, ((2, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (job,))
    ledger = Ledger(instance)
    with pytest.raises(SimulationError, match="do not fit on worker-server-0"):
        ledger.place(0, job, WORKER, 0, 3)
    lease = ledger.place(0, job, WORKER, 0, 2)
    assert ledger.worker.fit(job, 0).tolist() == [[0]]
    ledger.remove(0, lease)
    assert ledger.worker.fit(job, 0).tolist() == [[2]]
    np.testing.assert_array_equal(ledger.worker.free[0], ledger.worker.capacity)


@pytest.mark.parametrize(
    ("slot", "role", "count", "complaint"),
    [
        (0, WORKER, 1, "before it arrives"),
        (1, WORKER, 3, "3 workers for 2 chunks"),
        (1, WORKER, 2, "sends 4 Gb/s to PS that take 0"),
        (1, PS, 1, "1 PS for 0 workers"),
    ],
)
def test_a_broken_constraint_is_found_in_the_leases(slot: int, role: str, count: int, complaint: str) -> None:
    job = a_job(arrival=1)
    instance = Instance(4, ((8, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (job,))
    ledger = Ledger(instance)
    ledger.place(slot, job, role, 0, count)
    with pytest.raises(SimulationError, match=complaint):
        work_done({job.job_id: job}, slot, ledger.end_slot(slot))


def test_prices_start_at_low_and_end_at_high() -> None:
    job = a_job()
    instance = Instance(4, ((2, 2, 4, 2, 4.0),), ((0, 8, 8, 8, 10.0),), (job,))
    prices = fit_prices(instance.jobs, instance)
    ledger = Ledger(instance)
    only_gpu = (1, 0, 0, 0, 0)
    share = 1 / 2
    assert prices.unit_price(ledger.worker, only_gpu, 0)[0, 0] == pytest.approx(share * prices.low[WORKER])
    ledger.place(0, job, WORKER, 0, 2)
    found = prices.unit_price(ledger.worker, only_gpu, 0)[0, 0]
    assert found == pytest.approx(share * prices.high[WORKER][0])
    # At full use, one worker's GPU alone costs the highest utility that the most valuable job could have.
    assert found == pytest.approx(job.utility(job.shortest_duration))


def test_finishing_in_the_slot_of_its_arrival_takes_one_slot() -> None:
    """The utility is half the priority where the duration is the target."""
    job = a_job(arrival=3, target=1.0, priority=8.0)
    assert job.utility_at(3) == job.utility(1) == 4.0


def test_the_price_range_ignores_outliers_of_the_history_at_either_end() -> None:
    """Priorities 0 to 100, all else equal: the fifth percentile gives L, the ninety-fifth U."""
    history = [a_job(f"job-{k}", priority=max(float(k), 1e-9), sensitivity=0.0) for k in range(101)]
    instance = Instance(200, ((2, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (a_job(),))
    prices = fit_prices(history, instance, utility_floor=0.5, eta=1.0, outliers=0.05)
    # One worker takes shares of 1/2, 1/8, 1/4, 1/8 and 1/5 and four worker-slots; any finish is worth half.
    assert prices.low[WORKER] == pytest.approx(5 / 2 / (4 * (1 / 2 + 1 / 8 + 1 / 4 + 1 / 8 + 1 / 5)) / 4)
    assert prices.high[WORKER][0] == pytest.approx(95 / 2 / (1 / 2))


def test_alpha_is_the_largest_logarithm_and_at_least_one() -> None:
    flat = Prices({WORKER: 2.0, PS: 2.0}, {WORKER: (2.0,) * 5, PS: (4.0,) * 5})
    steep = Prices({WORKER: 2.0, PS: 2.0}, {WORKER: (2.0,) * 5, PS: (4.0, 2e6, 4.0, 4.0, 4.0)})
    assert flat.alpha == 1.0
    assert steep.alpha == pytest.approx(math.log(1e6))


def test_an_urgent_job_does_not_make_all_prices_zero() -> None:
    """f(T - a) of a job with a steep utility underflows in floating point; the floor keeps L above it."""
    calm, urgent = a_job("calm"), a_job("urgent", sensitivity=6.0, target=1.0)
    instance = Instance(200, ((2, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (calm, urgent))
    low = {floor: fit_prices(instance.jobs, instance, floor, eta=1.0).low[WORKER] for floor in (0.5, 1e-300)}
    assert low[0.5] > 1e-3
    assert low[1e-300] < 1e-200


def test_an_empty_cluster_accepts_the_jobs_that_its_prices_were_fitted_on() -> None:
    """At first prices, workers and PS cost the least valuable job no more than its utility."""
    for seed in range(20):
        instance = draw_instance(seed, jobs=6, load=1.0)
        prices = fit_prices(instance.jobs, instance)
        for job in instance.jobs:
            if job.utility(job.shortest_duration) >= 0.5 * job.priority:
                first = sum(
                    job.work * prices.unit_price(ledger.pool(role), demand, 0)[0, 0]
                    for ledger in [Ledger(instance)]
                    for role, demand in ((WORKER, job.worker_units), (PS, job.ps_units))
                )
                assert first <= job.utility(job.shortest_duration)


def test_an_outlier_in_a_history_changes_no_estimate() -> None:
    instance = draw_instance(1, load=1.0)
    history = draw_history(instance, 1)
    odd = a_job("odd", priority=1e6, target=30.0)
    plain, odder = (fit_prices(jobs, instance, outliers=0.05) for jobs in (history, (*history, odd)))
    for role in (WORKER, PS):
        assert odder.low[role] == pytest.approx(plain.low[role], rel=0.2)
        assert odder.high[role] == pytest.approx(plain.high[role], rel=0.2)


def test_calibration_chooses_the_least_mean_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    """Three floors; the mean of 1 / share counts, so one bad instance weighs more than a good one."""
    training = [
        (draw_instance(seed, jobs=3), draw_history(draw_instance(seed, jobs=3), seed)) for seed in (1, 2)
    ]
    shares = {0.1: (0.9, 0.1), 0.2: (0.4, 0.5), 0.3: (0.3, 0.3)}

    def share_gained(instance: Instance, history: object, utility_floor: float, eta: float) -> float:
        return shares[utility_floor][[each for each, _ in training].index(instance)]

    monkeypatch.setattr("simulator.oasis.calibrate.FLOORS", tuple(shares))
    monkeypatch.setattr("simulator.oasis.calibrate.ETA_FACTORS", (1.0,))
    monkeypatch.setattr("simulator.oasis.calibrate.share_gained", share_gained)
    told: list[tuple[int, int]] = []
    found = calibrate(training, lambda done, total: told.append((done, total)))
    assert found.utility_floor == 0.2
    assert found.share == pytest.approx(0.45)
    assert told == [(1, 3), (2, 3), (3, 3)]


def test_training_jobs_that_end_too_late_to_be_worth_anything_lose_nothing() -> None:
    late = a_job(epochs=200, sensitivity=6.0, target=1.0)  # exp(-6 x 199) is 0 in floating point
    instance = Instance(200, ((2, 8, 8, 8, 10.0),), ((0, 8, 8, 8, 10.0),), (late,))
    assert share_gained(instance, (late,), 0.5, 0.5) == 1.0


def test_the_eta_of_the_proof_exists_where_no_server_has_what_the_jobs_request() -> None:
    job = a_job(worker=(1, 0, 0, 0, 0.0), ps=(0, 0, 0, 0, 0.0), gradient=0.0)
    instance = Instance(4, ((0, 4, 0, 0, 0.0),), ((0, 4, 0, 0, 0.0),), (job,))
    assert fit_prices(instance.jobs, instance, eta=None).alpha == 1.0
