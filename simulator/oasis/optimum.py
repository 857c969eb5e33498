"""The offline optimum: every job known beforehand, a time-indexed integer programme solved with HiGHS.

Workers and PS are counted by server type first, which keeps the programme small; whether the counts can be
laid out server by server is checked afterwards, and a set of completions that cannot be is cut off.
"""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from simulator.oasis.ledger import PS, WORKER, Ledger
from simulator.oasis.milp import Maximisation, Solution
from simulator.oasis.model import RESOURCES, Instance, Job, Units
from simulator.oasis.packing import ServerType, capacity_rows, most_on, overfull_weights, pack, server_types
from simulator.oasis.planner import Share, best_schedule, book
from simulator.oasis.prices import Prices, fit_prices, safe_eta

WORTHLESS = 1e-7
"""A completion worth less than this share of the highest priority is left out of the programme."""

TIME_LIMIT_S = 300.0

QUICK_TRY_S = 3.0
"""Most programmes are solved in this time; one that is not is tightened first."""

SOLVING_SHARE = 0.8
"""The rest of the time is kept for laying the solution out."""

TIGHTENING_ROUNDS = 3
TIGHTENING_SHARE = 0.2
"""At most this share of the time goes into tightening."""

Completions = dict[str, int]
"""Job id -> the slot it is finished in."""

Plan = Mapping[str, tuple[Share, ...]]
"""Job id -> where it runs; a job that is left out is refused."""


Crowd = tuple[str, int, tuple[float, ...]]
"""Role, server type and counts by job that do not pack onto the servers of that type."""


@dataclass(frozen=True, slots=True)
class Optimum:
    """The best plan found; `bound` is no lower than the best possible utility.

    `proven`: the plan is optimal (to a millionth). `gap` is (bound - utility) / utility. `cuts` counts the
    times that a solution fitted by server type and not server by server.
    """

    plan: Plan
    utility: float
    bound: float
    proven: bool
    seconds: float
    cuts: int

    @property
    def gap(self) -> float:
        return max(0.0, self.bound - self.utility) / max(self.utility, 1e-12)


class Booked:
    """A scheduler that has all its plans from the start."""

    def __init__(self, ledger: Ledger, plan: Plan) -> None:
        self.ledger = ledger
        self.plan = plan

    def arrive(self, job: Job, slot: int) -> bool:
        shares = self.plan.get(job.job_id, ())
        book(self.ledger, job, shares)
        return bool(shares)

    def begin_slot(self, slot: int, remaining: Mapping[str, int]) -> None:
        """Nothing to do: every slot was booked on arrival."""


class Programme:
    """The integer programme: does a job finish in slot t, and how many of its workers and PS run where.

    With `fixed`, every server is a type of its own, exactly these jobs finish in exactly these slots, and
    the question is only whether that can be.
    """

    def __init__(self, instance: Instance, jobs: Sequence[Job], fixed: Completions | None = None) -> None:
        self.instance = instance
        self.jobs = [job for job in jobs if fixed is None or job.job_id in fixed]
        self.fixed = fixed
        self.model = Maximisation()
        self.types = {WORKER: server_types(instance.worker_servers), PS: server_types(instance.ps_servers)}
        if fixed is not None:
            self.types = {
                role: tuple(ServerType(kind.capacity, (server,)) for kind in types for server in kind.servers)
                for role, types in self.types.items()
            }
        self.finished: dict[tuple[str, int], int] = {}
        self.count: dict[tuple[str, str, int, int], int] = {}
        for job in self.jobs:
            self._add_job(job)
        for role, types in self.types.items():
            for index, kind in enumerate(types):
                self._add_capacity(role, index, kind)

    def _add_job(self, job: Job) -> None:
        model = self.model
        ends = self._ends(job)
        if not ends:
            return
        worth = [0.0 if self.fixed else job.utility_at(end) for end in ends]
        # To be finished by a slot and not only by the next one is worth the difference.
        finished = {
            end: model.add(1, gain - later)
            for end, gain, later in zip(ends, worth, [*worth[1:], 0.0], strict=True)
        }
        for end in ends[1:]:
            model.constrain({finished[end - 1]: 1.0, finished[end]: -1.0}, at_most=0)
        if self.fixed is not None:
            model.constrain({finished[ends[-1]]: 1.0}, at_least=1)
        done: dict[int, float] = {}
        most = self._most_workers(job)
        edges = lower_hull(job.ps_for[: 1 + most])
        for slot in range(job.arrival, ends[-1] + 1):
            workers, servers = (self._add_counts(job, role, slot) for role in (WORKER, PS))
            done |= workers
            going_on = {finished[ends[-1]]: -float(most)}
            if slot > ends[0]:
                going_on[finished[slot - 1]] = float(most)
            model.constrain({**workers, **going_on}, at_most=0)
            for slope, offset in edges:
                model.constrain(
                    {**dict.fromkeys(servers, 1.0), **dict.fromkeys(workers, -slope)}, at_least=offset
                )
            if edges:
                model.constrain({**dict.fromkeys(servers, 1.0), **dict.fromkeys(workers, -1.0)}, at_most=0)
            owed = [max(0, job.work - max(0, end - slot) * most) for end in ends]
            steps = {
                finished[end]: float(later - now)
                for end, now, later in zip(ends, owed, [*owed[1:], 0], strict=True)
                if now > later
            }
            if steps:
                model.constrain({**done, **steps}, at_least=0)
        self.finished |= {(job.job_id, slot): column for slot, column in finished.items()}

    def _ends(self, job: Job) -> range:
        """The slots that the job may end in."""
        if self.fixed is not None:
            return range(self.fixed[job.job_id], self.fixed[job.job_id] + 1)
        worthless = WORTHLESS * max(each.priority for each in self.jobs)
        first = job.arrival + job.shortest_duration - 1
        last = first
        while last < self.instance.slots and job.utility_at(last) > worthless:
            last += 1
        return range(first, last)

    def _most_workers(self, job: Job) -> int:
        """How many workers the job could have in one slot if it were alone."""
        room = sum(most_on(kind, job.worker_units) for kind in self.types[WORKER])
        return min(job.chunks, job.work, room)

    def _add_counts(self, job: Job, role: str, slot: int) -> dict[int, float]:
        workers = self._most_workers(job)
        most = workers if role == WORKER else job.ps_for[workers]
        columns: dict[int, float] = {}
        for index, kind in enumerate(self.types[role]):
            upper = min(most, most_on(kind, demand_of(job, role)))
            if upper:
                column = self.model.add(upper)
                self.count[job.job_id, role, index, slot] = column
                columns[column] = 1.0
        return columns

    def _add_capacity(self, role: str, index: int, kind: ServerType) -> None:
        demands = [demand_of(job, role) for job in self.jobs]
        for row in capacity_rows(kind, demands):
            self._limit(role, index, row)

    def _limit(self, role: str, index: int, weights: Sequence[float]) -> None:
        """In no slot do the counts on a server type, so weighted, exceed its number of servers."""
        for slot in range(self.instance.slots):
            terms = {
                self.count[key]: weight
                for job, weight in zip(self.jobs, weights, strict=True)
                if weight and (key := (job.job_id, role, index, slot)) in self.count
            }
            if len(terms) > 1:
                self.model.constrain(terms, at_most=len(self.types[role][index].servers))

    def tighten(self, deadline: float) -> None:
        """Rules out what the relaxed programme would crowd onto servers, round by round."""
        for _ in range(TIGHTENING_ROUNDS):
            relaxed = self.model.solve(deadline - time.monotonic(), relaxed=True)
            if not relaxed.values:
                return
            crowds: dict[Crowd, None] = {}
            for role, types in self.types.items():
                for index in range(len(types)):
                    for slot in range(self.instance.slots):
                        columns = [self.count.get((job.job_id, role, index, slot)) for job in self.jobs]
                        wanted = tuple(
                            0.0 if column is None else round(relaxed.values[column], 6) for column in columns
                        )
                        if sum(amount > 0 for amount in wanted) > 1:
                            crowds[role, index, wanted] = None
            if not self.thin_out(list(crowds), deadline):
                return

    def completions(self, solution: Solution) -> Completions:
        found: Completions = {}
        for (job_id, slot), column in self.finished.items():
            if solution.whole(column):
                found.setdefault(job_id, slot)
        return found

    def cut_off(self, completions: Completions) -> None:
        """Not all of these jobs finish by these slots."""
        terms = {self.finished[job_id, slot]: 1.0 for job_id, slot in completions.items()}
        self.model.constrain(terms, at_most=len(terms) - 1)

    def lay_out(self, solution: Solution, completions: Completions, deadline: float) -> Plan | list[Crowd]:
        """The solution's counts server by server, or those that could not be packed in time."""
        chosen = [job for job in self.jobs if job.job_id in completions]
        plan: dict[str, list[Share]] = {job.job_id: [] for job in chosen}
        left = {job.job_id: job.work for job in chosen}
        crowds: dict[Crowd, None] = {}
        for slot in range(self.instance.slots):
            workers = {
                job.job_id: self._counts(solution, job, WORKER, slot, left[job.job_id]) for job in chosen
            }
            servers = {
                job.job_id: self._counts(solution, job, PS, slot, job.ps_for[sum(workers[job.job_id])])
                for job in chosen
            }
            for job in chosen:
                left[job.job_id] -= sum(workers[job.job_id])
            for role, counts in ((WORKER, workers), (PS, servers)):
                demands = [demand_of(job, role) for job in self.jobs]
                for index, kind in enumerate(self.types[role]):
                    wanted = tuple(
                        counts[job.job_id][index] if job.job_id in counts else 0 for job in self.jobs
                    )
                    if not any(wanted) or (role, index, wanted) in crowds:
                        continue
                    packed = pack(kind, wanted, demands, deadline - time.monotonic())
                    if packed is None:
                        crowds[role, index, wanted] = None
                        continue
                    for job, on_servers in zip(self.jobs, packed, strict=True):
                        if on_servers:
                            plan[job.job_id] += (
                                Share(slot, role, server, count) for server, count in on_servers.items()
                            )
        return list(crowds) or {job_id: tuple(shares) for job_id, shares in plan.items()}

    def thin_out(self, crowds: Sequence[Crowd], deadline: float) -> bool:
        """Rules such crowds out in every slot; whether a row was found that does."""
        found = False
        for role, index, wanted in crowds:
            demands = [demand_of(job, role) for job in self.jobs]
            weights = overfull_weights(self.types[role][index], wanted, demands, deadline)
            if weights is not None:
                self._limit(role, index, weights)
                found = True
        return found

    def _counts(self, solution: Solution, job: Job, role: str, slot: int, most: int) -> list[int]:
        """The solution's count by server type, cut to `most` in all."""
        counts = []
        for index in range(len(self.types[role])):
            column = self.count.get((job.job_id, role, index, slot))
            counts.append(0 if column is None else min(most, solution.whole(column)))
            most -= counts[-1]
        return counts


def lower_hull(values: Sequence[int]) -> list[tuple[float, float]]:
    """Edges (slope, offset) of the lower convex hull of the points (x, values[x]), flat ones left out.

    PS >= slope x workers + offset holds for every whole number of workers and is tighter in between than
    the plain bandwidth constraint, which it implies at whole numbers.
    """
    hull: list[tuple[int, int]] = []
    for x, y in enumerate(values):
        while len(hull) > 1 and (hull[-1][1] - hull[-2][1]) * (x - hull[-2][0]) >= (y - hull[-2][1]) * (
            hull[-1][0] - hull[-2][0]
        ):
            hull.pop()
        hull.append((x, y))
    edges = []
    for (x, y), (next_x, next_y) in itertools.pairwise(hull):
        slope = (next_y - y) / (next_x - x)
        if slope:
            edges.append((slope, y - slope * x))
    return edges


def demand_of(job: Job, role: str) -> Units:
    """What one worker, or one PS, of the job takes."""
    return job.worker_units if role == WORKER else job.ps_units


def find_optimum(instance: Instance, time_limit_s: float = TIME_LIMIT_S) -> Optimum:
    """The plan of largest utility with all jobs known, or the best one found within the time."""
    started = time.monotonic()
    deadline = started + time_limit_s
    jobs = [job for job in instance.jobs if job.arrival + job.shortest_duration <= instance.slots]
    plan: Plan = {}
    proven, cuts = not jobs, 0
    bound = math.fsum(job.utility(job.shortest_duration) for job in jobs)
    programme = Programme(instance, jobs)
    tightened = False
    while jobs and (left_s := deadline - time.monotonic()) > 0:
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
            if solution.optimal and programme.thin_out(found, deadline):
                cuts += 1
                continue
            by_server, decided = lay_out_by_server(instance, jobs, completions, deadline)
            if by_server is None:
                if not (decided and solution.optimal):
                    break
                programme.cut_off(completions)
                cuts += 1
                continue
            found = by_server
        plan, proven = found, solution.optimal
        break
    if not proven:
        plan = max(plan, plan_online(instance, jobs), key=lambda each: worth(instance, each))
    plan = top_up(instance, jobs, plan)
    utility = worth(instance, plan)
    return Optimum(plan, utility, max(bound, utility), proven, time.monotonic() - started, cuts)


def lay_out_by_server(
    instance: Instance, jobs: Sequence[Job], completions: Completions, deadline: float
) -> tuple[Plan | None, bool]:
    """A plan with these completions, server by server, and whether the question was settled in time."""
    programme = Programme(instance, jobs, fixed=completions)
    solution = programme.model.solve(deadline - time.monotonic())
    if not solution.values:
        return None, solution.infeasible
    plan = programme.lay_out(solution, completions, deadline)
    return (None, False) if isinstance(plan, list) else (plan, True)


def plan_online(instance: Instance, jobs: Sequence[Job]) -> Plan:
    """OASiS's own best plan over some values of eta, to fall back on when the time is too short."""
    eta = safe_eta(jobs, instance)
    plans = [plan_at_prices(instance, jobs, fit_prices(jobs, instance, eta=eta / 10**k)) for k in range(8)]
    return max(plans, key=lambda plan: worth(instance, plan))


def top_up(instance: Instance, jobs: Sequence[Job], plan: Plan) -> Plan:
    """The plan with what the programme left out as worthless, where there is room for it."""
    nothing = {WORKER: math.ulp(0.0), PS: math.ulp(0.0)}
    free = Prices(nothing, {role: (price,) * len(RESOURCES) for role, price in nothing.items()})
    return plan_at_prices(instance, jobs, free, plan)


def plan_at_prices(
    instance: Instance, jobs: Sequence[Job], prices: Prices, before: Plan | None = None
) -> Plan:
    """What OASiS would book, job by job in order of arrival, beside what is planned before."""
    ledger = Ledger(instance)
    plan = dict(before or {})
    for job in jobs:
        book(ledger, job, plan.get(job.job_id, ()))
    for job in sorted((job for job in jobs if job.job_id not in plan), key=lambda job: job.arrival):
        schedule = best_schedule(job, job.arrival, ledger, prices)
        if schedule is not None:
            book(ledger, job, schedule.shares)
            plan[job.job_id] = schedule.shares
    return plan


def worth(instance: Instance, plan: Plan) -> float:
    """The utility of the plan."""
    return math.fsum(
        job.utility_at(max(share.slot for share in plan[job.job_id] if share.role == WORKER))
        for job in instance.jobs
        if job.job_id in plan
    )
