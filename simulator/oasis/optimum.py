"""The offline optimum: a time-indexed integer programme over all jobs, known in advance, solved with HiGHS.

Workers and PS are first counted by server type, which keeps the programme small. Afterwards the counts are
laid out server by server; a set of completions that cannot be laid out is excluded by a cut.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.oasis.ledger import PS, WORKER, Ledger
from simulator.oasis.model import RESOURCES, Instance, TrainingJob
from simulator.oasis.planner import allocate_shares, best_schedule
from simulator.oasis.prices import Prices, fit_prices, safe_eta
from simulator.oasis.programme import Completions, Plan, Programme

TIME_LIMIT_S = 300.0

QUICK_TRY_S = 3.0
"""Time for a first attempt, enough for most programmes; a programme that needs more is tightened first."""

SOLVING_SHARE = 0.8
"""Fraction of the time for solving; the rest is reserved for laying the solution out by server."""

TIGHTENING_SHARE = 0.2
"""At most this fraction of the time goes into tightening."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan found; `bound` is no lower than the best possible utility.

    `proven`: the plan is optimal (to a millionth). `gap` is (bound - utility) / utility.
    """

    plan: Plan
    utility: float
    bound: float
    proven: bool
    seconds: float

    @property
    def gap(self) -> float:
        return max(0.0, self.bound - self.utility) / max(self.utility, 1e-12)


class FixedPlan:
    """Scheduler whose plans are all given in advance."""

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self.ledger = ledger
        self.plan = plan

    def arrive(self, job: TrainingJob, slot: int) -> bool:
        shares = self.plan.get(job.job_id, ())
        allocate_shares(self.ledger, job, shares)
        return bool(shares)

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        """Do nothing: every slot was allocated on arrival."""


def find_optimum(instance: Instance, time_limit_s: float = TIME_LIMIT_S) -> Optimum:
    """Return the plan of largest utility with all jobs known, or the best one found within the time."""
    started = time.monotonic()
    deadline = started + time_limit_s
    jobs = [job for job in instance.jobs if job.arrival + job.shortest_duration <= instance.slots]
    plan: Plan = {}
    bound = math.fsum(job.utility(job.shortest_duration) for job in jobs)
    programme = Programme(instance, jobs)
    proven = not programme.model.columns  # then no job that fits its slots is worth anything
    tightened = False
    while not proven and (left_s := deadline - time.monotonic()) > 0:
        solution = programme.model.solve(SOLVING_SHARE * left_s if tightened else min(left_s, QUICK_TRY_S))
        bound = min(bound, solution.bound)
        if not solution.optimal and not tightened:
            tightened = True
            programme.tighten(time.monotonic() + TIGHTENING_SHARE * time_limit_s)
            continue
        if not solution.values:
            break
        completions = programme.completions(solution)
        found = programme.lay_out(solution, completions, deadline)
        if isinstance(found, list):
            if solution.optimal and programme.exclude_overfull(found, deadline):
                continue
            by_server, decided = lay_out_by_server(instance, jobs, completions, deadline)
            if by_server is None:
                if not (decided and solution.optimal):
                    break
                programme.exclude(completions)
                continue
            found = by_server
        plan, proven = found, solution.optimal
        break
    if not proven:
        plan = max(plan, plan_online(instance, jobs), key=lambda each: worth(instance, each))
    plan = top_up(instance, jobs, plan)
    utility = worth(instance, plan)
    return Optimum(plan, utility, max(bound, utility), proven, time.monotonic() - started)


def lay_out_by_server(
    instance: Instance, jobs: Sequence[TrainingJob], completions: Completions, deadline: float
) -> tuple[Plan | None, bool]:
    """Return a plan with these completions, server by server, and whether the answer was found in time."""
    programme = Programme(instance, jobs, fixed=completions)
    solution = programme.model.solve(deadline - time.monotonic())
    if not solution.values:
        return None, solution.infeasible
    plan = programme.lay_out(solution, completions, deadline)
    return (None, False) if isinstance(plan, list) else (plan, True)


def plan_online(instance: Instance, jobs: Sequence[TrainingJob]) -> Plan:
    """Return OASiS's own best plan over some values of eta, the fallback when the time is too short."""
    eta = safe_eta(jobs, instance)
    plans = [plan_at_prices(instance, jobs, fit_prices(jobs, instance, eta=eta / 10**k)) for k in range(8)]
    return max(plans, key=lambda plan: worth(instance, plan))


def top_up(instance: Instance, jobs: Sequence[TrainingJob], plan: Plan) -> Plan:
    """Return the plan with the jobs that the programme left out as worthless, where capacity is free."""
    nothing = {WORKER: math.ulp(0.0), PS: math.ulp(0.0)}
    free = Prices(nothing, {role: (price,) * len(RESOURCES) for role, price in nothing.items()})
    return plan_at_prices(instance, jobs, free, plan)


def plan_at_prices(
    instance: Instance, jobs: Sequence[TrainingJob], prices: Prices, before: Plan | None = None
) -> Plan:
    """Return OASiS's plans, job by job in order of arrival, added to the given plan."""
    ledger = Ledger(instance)
    plan = dict(before or {})
    for job in jobs:
        allocate_shares(ledger, job, plan.get(job.job_id, ()))
    for job in sorted((job for job in jobs if job.job_id not in plan), key=lambda job: job.arrival):
        schedule = best_schedule(job, job.arrival, ledger, prices)
        if schedule is not None:
            allocate_shares(ledger, job, schedule.shares)
            plan[job.job_id] = schedule.shares
    return plan


def worth(instance: Instance, plan: Plan) -> float:
    """Return the utility of the plan."""
    return math.fsum(
        job.utility_at(max(share.slot for share in plan[job.job_id] if share.role == WORKER))
        for job in instance.jobs
        if job.job_id in plan
    )
