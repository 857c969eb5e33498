"""The integer programme of the offline optimum: workers and PS counted by server type, slot by slot."""

from __future__ import annotations

import itertools
import time
from collections.abc import Mapping, Sequence

from simulator.oasis.ledger import PS, WORKER, demand_of
from simulator.oasis.milp import Maximisation, Solution
from simulator.oasis.model import Instance, TrainingJob
from simulator.oasis.packing import (
    ServerType,
    capacity_rows,
    max_count_on,
    overfull_weights,
    pack,
    server_types,
)
from simulator.oasis.planner import Share

WORTHLESS = 1e-7
"""A completion worth less than this fraction of the highest priority is left out of the programme."""

TIGHTENING_ROUNDS = 3

Completions = dict[str, int]
"""Job id -> the slot it is finished in."""

Plan = Mapping[str, tuple[Share, ...]]
"""Job id -> its shares of servers; a job that is left out is refused."""

OverfullCounts = tuple[str, int, tuple[float, ...]]
"""Role, server type and counts by job that do not pack onto the servers of that type."""


class Programme:
    """The integer programme: for each job, if it is finished by slot t and how many workers and PS run there.

    With `fixed`, every server is a type of its own, exactly these jobs finish in exactly these slots, and the
    only question is feasibility.
    """

    def __init__(
        self, instance: Instance, jobs: Sequence[TrainingJob], fixed: Completions | None = None
    ) -> None:
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
            demands = [demand_of(job, role) for job in self.jobs]
            for index, kind in enumerate(types):
                for row in capacity_rows(kind, demands):
                    self._limit(role, index, row)

    def _add_job(self, job: TrainingJob) -> None:
        model = self.model
        ends = self._ends(job)
        if not ends:
            return
        worth = [0.0 if self.fixed else job.utility_at(end) for end in ends]
        # Finishing by a slot instead of by the next one is worth the difference of their utilities.
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

    def _ends(self, job: TrainingJob) -> range:
        """Return the slots that the job may end in."""
        if self.fixed is not None:
            return range(self.fixed[job.job_id], self.fixed[job.job_id] + 1)
        worthless = WORTHLESS * max(each.priority for each in self.jobs)
        first = job.arrival + job.shortest_duration - 1
        last = first
        while last < self.instance.slots and job.utility_at(last) > worthless:
            last += 1
        return range(first, last)

    def _most_workers(self, job: TrainingJob) -> int:
        """Return how many workers the job could have in one slot if it were alone."""
        fitting = sum(max_count_on(kind, job.worker_units) for kind in self.types[WORKER])
        return min(job.chunks, job.work, fitting)

    def _add_counts(self, job: TrainingJob, role: str, slot: int) -> dict[int, float]:
        workers = self._most_workers(job)
        most = workers if role == WORKER else job.ps_for[workers]
        columns: dict[int, float] = {}
        for index, kind in enumerate(self.types[role]):
            upper = min(most, max_count_on(kind, demand_of(job, role)))
            if upper:
                column = self.model.add(upper)
                self.count[job.job_id, role, index, slot] = column
                columns[column] = 1.0
        return columns

    def _limit(self, role: str, index: int, weights: Sequence[float]) -> None:
        """Limit the weighted counts on a server type to its number of servers, in every slot."""
        for slot in range(self.instance.slots):
            terms = {
                self.count[key]: weight
                for job, weight in zip(self.jobs, weights, strict=True)
                if weight and (key := (job.job_id, role, index, slot)) in self.count
            }
            if len(terms) > 1:
                self.model.constrain(terms, at_most=len(self.types[role][index].servers))

    def tighten(self, deadline: float) -> None:
        """Exclude, round by round, counts of the relaxed programme that overfill servers."""
        for _ in range(TIGHTENING_ROUNDS):
            relaxed = self.model.solve(deadline - time.monotonic(), relaxed=True)
            if not relaxed.values:
                return
            crowds: dict[OverfullCounts, None] = {}
            for role, types in self.types.items():
                for index in range(len(types)):
                    for slot in range(self.instance.slots):
                        columns = [self.count.get((job.job_id, role, index, slot)) for job in self.jobs]
                        wanted = tuple(
                            0.0 if column is None else round(relaxed.values[column], 6) for column in columns
                        )
                        if sum(amount > 0 for amount in wanted) > 1:
                            crowds[role, index, wanted] = None
            if not self.exclude_overfull(list(crowds), deadline):
                return

    def completions(self, solution: Solution) -> Completions:
        found: Completions = {}
        for (job_id, slot), column in self.finished.items():
            if solution.whole(column):
                found.setdefault(job_id, slot)
        return found

    def exclude(self, completions: Completions) -> None:
        """Exclude the solutions in which all of these jobs finish by these slots."""
        terms = {self.finished[job_id, slot]: 1.0 for job_id, slot in completions.items()}
        self.model.constrain(terms, at_most=len(terms) - 1)

    def lay_out(
        self, solution: Solution, completions: Completions, deadline: float
    ) -> Plan | list[OverfullCounts]:
        """Return the solution's counts server by server, or those that could not be packed in time."""
        chosen = [job for job in self.jobs if job.job_id in completions]
        plan: dict[str, list[Share]] = {job.job_id: [] for job in chosen}
        left = {job.job_id: job.work for job in chosen}
        crowds: dict[OverfullCounts, None] = {}
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

    def exclude_overfull(self, crowds: Sequence[OverfullCounts], deadline: float) -> bool:
        """Exclude the overfull counts in every slot; return whether a row was found that does."""
        found = False
        for role, index, wanted in crowds:
            demands = [demand_of(job, role) for job in self.jobs]
            weights = overfull_weights(self.types[role][index], wanted, demands, deadline)
            if weights is not None:
                self._limit(role, index, weights)
                found = True
        return found

    def _counts(self, solution: Solution, job: TrainingJob, role: str, slot: int, most: int) -> list[int]:
        """Return the solution's count by server type, cut to `most` in all."""
        counts = []
        for index in range(len(self.types[role])):
            column = self.count.get((job.job_id, role, index, slot))
            counts.append(0 if column is None else min(most, solution.whole(column)))
            most -= counts[-1]
        return counts


def lower_hull(values: Sequence[int]) -> list[tuple[float, float]]:
    """Return edges (slope, offset) of the lower convex hull of the points (x, values[x]), without flat ones.

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
