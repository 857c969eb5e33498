"""Policy `water_gate`: shortest critical path first on the fastest device, slower ones behind a gate."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from functools import cache, partial
from graphlib import TopologicalSorter
from operator import attrgetter

from simulator.edge.dataset import KINDS, METRIC_PERIOD_S, Dataset, Device, JobGraph, Kind, Task
from simulator.edge.environment import Environment, Executor, check_feasible
from simulator.progress import Progress, no_progress

RESERVE_MARGIN_S = 5
"""A task waits for a busy executor if it is free within the category's preparation time plus this (s)."""


def plan_water_gate(
    dataset: Dataset, kinds: tuple[Kind, ...] = KINDS, *, seed: int = 0, progress: Progress = no_progress
) -> Environment:
    """Plan second by second until all jobs are done; return the environment, which has the plan.

    Jobs are sorted by their remaining critical path; in each second hosts, then base stations, then user
    devices take tasks from the front. A slower device may take a task of a job only if it ends before the
    hosts reach that job: the gate. The policy is deterministic, so `seed` has no effect.
    Source: the contest entry `reskipper/6GANA_AIC`.
    """
    check_feasible(dataset, kinds)
    environment = Environment(dataset, kinds)
    devices = sorted(environment.devices, key=attrgetter("compute_factor"))
    hosts = [device for device in devices if device.kind == "Cloud"]
    stations = [device for device in devices if device.kind == "BS"]
    ues = [device for device in devices if device.kind == "UE"]
    online = cache(partial(_online, dataset, ues))
    jobs = _JobTable(environment)
    reserved: dict[int, int] = {}
    while not environment.done:
        jobs.update()
        second = _Second(environment, reserved)
        if environment.executable:
            reach = max(second.serve_host(host, jobs.order) for host in hosts)
            if stations or ues:
                gate = _Gate(environment, jobs.order, reach, hosts)
                if stations:
                    tasks = gate.tasks(stations[0].compute_factor, attrgetter("by_children"))
                    for station in stations:
                        second.serve_behind(gate, tasks, station)
                if ues and (tasks := gate.tasks(ues[0].compute_factor, attrgetter("by_length"))):
                    for ue, rate in online(environment.now % METRIC_PERIOD_S):
                        second.serve_behind(gate, tasks, ue, rate)
        reserved = second.reserves
        environment.advance()
        progress(len(environment.end_s), len(dataset.tasks))
    return environment


class _RankedJob:
    """Job that has arrived; `critical_s` and `work_s` are of its tasks that neither run nor are done.

    `by_children` are the executable ones, those with the most children first; `by_length` the shortest first.
    """

    __slots__ = ("by_children", "by_length", "critical_s", "job", "topological", "work_s")

    def __init__(self, job: JobGraph, dataset: Dataset) -> None:
        self.job = job
        self.topological = topological_order(job, dataset)
        self.critical_s = self.work_s = 0
        self.by_children: list[Task] = []
        self.by_length: list[Task] = []

    def update(self, environment: Environment) -> None:
        longest: dict[int, int] = {}
        self.work_s = 0
        for task in self.topological:
            if task.task_id in environment.end_s or task.task_id in environment.running:
                continue
            before = max((longest.get(parent, 0) for parent, _ in task.parents), default=0)
            longest[task.task_id] = before + task.compute_s
            self.work_s += task.compute_s
        self.critical_s = max(longest.values(), default=0)
        ready = [task for task in self.topological if task.task_id in environment.executable]
        self.by_children = sorted(ready, key=lambda task: (-len(task.children), -task.compute_s))
        self.by_length = sorted(ready, key=lambda task: (task.compute_s, task.output_size))


def topological_order(job: JobGraph, dataset: Dataset) -> list[Task]:
    """Return the tasks of a job, parents before children."""
    order: TopologicalSorter[int] = TopologicalSorter(dict.fromkeys(job.task_ids, ()))
    for task_id in job.task_ids:
        for child, _ in dataset.tasks[task_id].children:
            order.add(child, task_id)
    return [dataset.tasks[task_id] for task_id in order.static_order()]


class _JobTable:
    """Jobs that have arrived and are not done, the shortest remaining critical path first."""

    def __init__(self, environment: Environment) -> None:
        self.environment = environment
        self.order: list[_RankedJob] = []
        self._ranked: dict[int, _RankedJob] = {}

    def update(self) -> None:
        environment, ranked = self.environment, self._ranked
        if not environment.touched_jobs:
            return
        for job_id in sorted(environment.touched_jobs):
            job = environment.dataset.jobs[job_id]
            if all(task_id in environment.end_s for task_id in job.task_ids):
                ranked.pop(job_id, None)
                continue
            if job_id not in ranked:
                ranked[job_id] = _RankedJob(job, environment.dataset)
            ranked[job_id].update(environment)
        environment.touched_jobs.clear()
        self.order = sorted(ranked.values(), key=attrgetter("critical_s"))


class _Gate:
    """Gate of the jobs beyond the hosts' reach that a slower device may serve.

    The model: the hosts' executors work on the first `reach` jobs in parallel, and on the next job when one
    of these is done; `levels` has the work (the water) after which the hosts reach the k-th job behind.
    """

    def __init__(
        self, environment: Environment, order: list[_RankedJob], reach: int, hosts: list[Device]
    ) -> None:
        self.behind = order[reach:]
        pools = [ranked.work_s for ranked in order[:reach]]
        heapq.heapify(pools)
        self.levels: list[int] = []
        for ranked in self.behind:
            self.levels.append(pools[0])
            heapq.heapreplace(pools, pools[0] + ranked.work_s)
        speed = sum(len(environment.on_device[host.index]) / host.compute_factor for host in hosts)
        self.water_per_s = speed / reach

    def tasks(self, least_factor: int, by: Callable[[_RankedJob], list[Task]]) -> list[tuple[Task, int]]:
        """Return (task, level) of the jobs behind, in order, without tasks too long for this factor."""
        return [
            (task, level)
            for ranked, level in zip(self.behind, self.levels, strict=True)
            for task in by(ranked)
            if task.compute_s * least_factor * self.water_per_s <= level
        ]


class _Second:
    """Commands of one second, with the executors reserved before (R) and those used so far (U)."""

    def __init__(self, environment: Environment, reserved: dict[int, int]) -> None:
        self.environment = environment
        self.now = environment.now
        self.reserved = reserved
        self.reserves: dict[int, int] = {}
        self.used: set[int] = set()
        self.taken: set[int] = set()

    def serve_host(self, host: Device, order: list[_RankedJob]) -> int:
        """Serve the jobs in order until the host is exhausted; return its reach: the last one served."""
        categories: set[int] | None = None
        reach = 1
        for visited, ranked in enumerate(order, 1):
            for task in ranked.by_children:
                if task.task_id in self.taken or (categories and task.category_id not in categories):
                    continue
                if self.place(task, host, may_create=categories is None):
                    self.taken.add(task.task_id)
                    reach = visited
                elif categories is None:
                    categories = self.categories_on(host)
                if categories is not None and not self.has_spare(host):
                    return reach
        return reach

    def serve_behind(
        self, gate: _Gate, tasks: list[tuple[Task, int]], device: Device, rate: int | None = None
    ) -> None:
        """Serve the tasks that pass the gate on this device; a user device has a `rate`."""
        categories: set[int] | None = None
        factor, water_per_s = device.compute_factor, gate.water_per_s
        for task, level in tasks:
            if task.task_id in self.taken or (categories and task.category_id not in categories):
                continue
            takes_s = task.compute_s * factor
            if rate is not None:
                takes_s += 2 * -(-task.output_size // rate)
            if takes_s * water_per_s > level:
                continue
            if self.place(task, device, may_create=categories is None):
                self.taken.add(task.task_id)
            elif categories is None:
                categories = self.categories_on(device)
            if categories is not None and not self.has_spare(device):
                return

    def categories_on(self, device: Device) -> set[int]:
        """Return the categories that a device can still take once it can have no more executors."""
        executors = self.environment.on_device[device.index].values()
        return {executor.category.category_id for executor in executors}

    def has_spare(self, device: Device) -> bool:
        for executor in self.environment.on_device[device.index].values():
            if executor.is_free(self.now) and executor.executor_id not in self.used:
                return True
        return False

    def place(self, task: Task, device: Device, *, may_create: bool) -> bool:
        """Assign, reserve or create an executor for the task; return False if the device has none for it."""
        environment = self.environment
        soonest: Executor | None = None
        free: Executor | None = None
        for executor in environment.on_device[device.index].values():
            if executor.category.category_id != task.category_id or executor.executor_id in self.used:
                continue
            holder = self.reserved.get(executor.executor_id)
            if holder is not None and holder != task.task_id:
                continue
            if executor.is_free(self.now):
                if free is None or holder is not None:
                    free = executor
            elif soonest is None or executor.free_from_s < soonest.free_from_s:
                soonest = executor
        if free is not None:
            environment.match(free, task.task_id)
            self.used.add(free.executor_id)
            return True
        category = environment.dataset.categories[task.category_id]
        max_wait_s = category.prepare_s + RESERVE_MARGIN_S
        if soonest is not None and soonest.free_from_s - self.now <= max_wait_s:
            self.reserve(soonest, task)
            return True
        if may_create and self.ensure_capacity(task, device):
            self.reserve(environment.add(category, device), task)
            return True
        return False

    def reserve(self, executor: Executor, task: Task) -> None:
        self.used.add(executor.executor_id)
        self.reserves[executor.executor_id] = task.task_id

    def ensure_capacity(self, task: Task, device: Device) -> bool:
        """Return True if an executor for the task fits; delete the oldest spare ones if necessary."""
        environment = self.environment
        category = environment.dataset.categories[task.category_id]
        free = environment.node(device).free
        cpus, memory_mib = free["cpus"], free["memory_mib"]
        evicted: list[Executor] = []
        spare = iter(environment.on_device[device.index].values())  # the oldest first
        while cpus < category.cpus or memory_mib < category.memory_mib:
            executor = next(spare, None)
            if executor is None:
                return False
            kept = executor.executor_id in self.used or executor.executor_id in self.reserved
            if executor.is_free(self.now) and not kept:
                evicted.append(executor)
                cpus += executor.category.cpus
                memory_mib += executor.category.memory_mib
        for executor in evicted:
            environment.delete(executor)
        return True


def _online(dataset: Dataset, ues: list[Device], second: int) -> list[tuple[Device, int]]:
    """Return (user device, rate) of those online and connected in a second, the fastest first."""
    online = [
        (ue, dataset.rate_rows[ue.index - dataset.first_ue][second])
        for ue in ues
        if dataset.is_online(ue, second)
    ]
    connected = [(ue, rate) for ue, rate in online if rate > 0]
    return sorted(connected, key=lambda pair: (pair[0].compute_factor, -pair[1]))
