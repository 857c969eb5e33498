"""Policy `timetable`: reserve a device and a time for every task in advance, in the best job order found."""

from __future__ import annotations

import math
from collections import defaultdict
from copy import deepcopy
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from resource_manager.manager.plurals import counted
from simulator.edge.dataset import KINDS, METRIC_PERIOD_S, Category, Dataset, Device, Kind
from simulator.edge.environment import Environment, Executor, check_feasible
from simulator.edge.water_gate import topological_order
from simulator.errors import SimulationError
from simulator.progress import Progress, no_progress

if TYPE_CHECKING:
    from simulator.edge.timetable_search import Problem, Timetable

WORK_WEIGHTS = (5.0, 15.0)
"""Weights of the work of a job (s on all hosts and stations) against its arrival (s) in a job order."""

PRICES = (0.3, 1.0, 0.0)
"""Prices of fast capacity, as fractions of the delay it causes to the jobs placed later."""

TASKS_PLACED = 40_000
MAX_TRIALS = 30
"""Limits of the search, in placed tasks and in trials: equal on every machine."""

MAX_CELLS = 10**8
"""Upper bound of devices times seconds in a timetable, which takes a few times eight bytes for each."""


def plan_timetable(
    dataset: Dataset,
    kinds: tuple[Kind, ...] = KINDS,
    *,
    seed: int = 0,
    progress: Progress = no_progress,
    tasks_placed: int = TASKS_PLACED,
) -> Environment:
    """Plan all jobs in advance and execute the plan; return the environment, which has the plan.

    The free capacity and the link rate of every device are known for every second. Jobs are placed one
    after another, each task where it ends first, in a timetable of free capacity by device and second:
    executors are prepared before they are needed, and no task is started on a device that goes offline or
    shrinks too soon. (List scheduling by upward rank with insertion: Topcuoglu et al., HEFT, 2002.) A task
    on a host or base station is charged for the delay of the jobs placed after it, and tasks with slack
    move to user devices. The order of the jobs, by arrival and by work, is then varied at random and kept
    if the mean job completion time falls (a (1+1) evolution strategy on random keys: Bean, 1994).

    Unlike `water_gate`, it uses jobs before they arrive: it is an offline policy.
    """
    check_feasible(dataset, kinds)
    devices = devices_of(dataset, kinds)
    problem = arrays_of(dataset, devices)
    trials = max(1, min(MAX_TRIALS, tasks_placed // len(dataset.tasks)))
    timetable = search(dataset, devices, problem, seed, trials, progress)
    return carry_out(dataset, kinds, devices, timetable)


def search(
    dataset: Dataset, devices: list[Device], problem: Problem, seed: int, trials: int, progress: Progress
) -> Timetable:
    """Return the best timetable of that many trials."""
    from simulator.edge.timetable_search import FAR_S, build

    random = np.random.default_rng(seed)
    length = (problem.compute + problem.prepare)[:, None]
    work = np.bincount(problem.job_of, (length * problem.toll[:, : problem.first_ue]).mean(axis=1))
    empty = empty_timetable(dataset, devices, problem, first_horizon(dataset, devices, problem))
    settings = [(work_weight, price) for work_weight in WORK_WEIGHTS for price in PRICES]
    best_total, best, best_keys = FAR_S, empty, (0.0, 0.0, np.zeros(len(work)))
    trial = 0
    while trial < trials or best_total == FAR_S:
        if trial < len(settings):
            keys = (*settings[trial], np.zeros(len(work)))
        else:
            keys = vary(best_keys, random)
        work_weight, price, noise = keys
        timetable = deepcopy(empty)
        order = np.argsort(problem.arrival + work_weight * work * np.exp(noise), kind="stable")
        total = build(problem, timetable, order, price)
        if total == FAR_S:  # not enough free capacity: extend the horizon
            horizon = 2 * empty.free_cpus.shape[1]
            empty = empty_timetable(dataset, devices, problem, horizon)
            continue
        if total < best_total:
            best_total, best, best_keys = total, timetable, keys
        trial += 1
        progress(trial, trials)
    return best


Keys = tuple[float, float, npt.NDArray[np.float64]]


def vary(keys: Keys, random: np.random.Generator) -> Keys:
    """Draw a neighbour: about a third of the jobs earlier or later, weight and price slightly different."""
    work_weight, price, noise = keys
    moved = random.random(len(noise)) < 0.3
    return (
        work_weight * math.exp(random.normal(0, 0.1)),
        price * math.exp(random.normal(0, 0.15)),
        noise + moved * random.normal(0, 0.3, len(noise)),
    )


def devices_of(dataset: Dataset, kinds: tuple[Kind, ...]) -> list[Device]:
    """Return hosts, base stations, then user devices, the fastest first."""
    chosen = [device for device in dataset.devices if device.kind in kinds]
    return sorted(chosen, key=lambda d: d.compute_factor if d.kind == "UE" else 0)


def arrays_of(dataset: Dataset, devices: list[Device]) -> Problem:
    from simulator.edge.timetable_search import Problem

    tasks, jobs = list(dataset.tasks.values()), list(dataset.jobs.values())
    place = {task.task_id: i for i, task in enumerate(tasks)}
    job_place = {job.job_id: i for i, job in enumerate(jobs)}
    categories = [dataset.categories[task.category_id] for task in tasks]
    numbers = {category_id: i for i, category_id in enumerate(dataset.categories)}
    rank = upward_ranks(dataset)
    members = [sorted(job.task_ids, key=lambda task_id: -rank[task_id]) for job in jobs]
    edges = [(place[parent], size) for task in tasks for parent, size in task.parents]
    fixed = [device for device in devices if device.kind != "UE"]
    rows = [device.index - dataset.first_ue for device in devices if device.kind == "UE"]
    station = np.full(dataset.ue_bs.shape, -1)
    for device in dataset.devices:
        if device.kind == "BS":
            station[dataset.ue_bs == device.device_id] = device.index
    return Problem(
        kind=_whole([KINDS.index(device.kind) for device in devices]),
        factor=_whole([device.compute_factor for device in devices]),
        rate=_whole([device.rate for device in devices]),
        cloud=_whole([device.cloud_id for device in devices]),
        online=_whole([device.online_s for device in devices]),
        offline=_whole([device.offline_s for device in devices]),
        first_ue=len(fixed),
        link_rate=dataset.ue_rate[rows].astype(np.int64),
        link_bs=station[rows].astype(np.int64),
        cpus=_whole([category.cpus for category in categories]),
        memory=_whole([category.memory_mib for category in categories]),
        prepare=_whole([max(1, category.prepare_s) for category in categories]),
        compute=_whole([task.compute_s for task in tasks]),
        category=_whole([numbers[task.category_id] for task in tasks]),
        output=_whole([task.output_size for task in tasks]),
        edge_from=_whole(np.cumsum([0, *(len(task.parents) for task in tasks)])),
        edge_task=_whole([parent for parent, _ in edges]),
        edge_size=_whole([size for _, size in edges]),
        job_of=_whole([job_place[task.job_id] for task in tasks]),
        arrival=_whole([job.arrival_s for job in jobs]),
        job_from=_whole(np.cumsum([0, *map(len, members)])),
        job_tasks=_whole([place[task_id] for task_ids in members for task_id in task_ids]),
        toll=tolls(dataset, fixed, categories),
    )


def _whole(values: Any) -> npt.NDArray[np.int64]:
    return np.asarray(values, dtype=np.int64)


def tolls(dataset: Dataset, fixed: list[Device], categories: list[Category]) -> npt.NDArray[np.float64]:
    """Return, by task and host or base station, the fraction of all their compute the task takes there."""
    rows = [device.index for device in fixed]
    capacity = np.stack([dataset.cpus[rows].mean(axis=1), dataset.memory_mib[rows].mean(axis=1)], axis=1)
    capacity = np.maximum(capacity, 1)
    speed = capacity.mean(axis=1) / [device.compute_factor for device in fixed]
    asked = np.array([[category.cpus, category.memory_mib] for category in categories])
    share: npt.NDArray[np.float64] = (asked[:, None, :] / capacity).max(axis=2) * (speed / speed.sum())
    return share


def upward_ranks(dataset: Dataset) -> dict[int, int]:
    """Return the upward rank of each task: seconds of computing on the longest path to the end of its job."""
    rank: dict[int, int] = {}
    for job in dataset.jobs.values():
        for task in reversed(topological_order(job, dataset)):
            rank[task.task_id] = task.compute_s + max((rank[child] for child, _ in task.children), default=0)
    return rank


def first_horizon(dataset: Dataset, devices: list[Device], problem: Problem) -> int:
    """Return the seconds of whole metric periods that should suffice for all work on the fastest host."""
    host = min((d for d in devices if d.kind == "Cloud"), key=lambda d: d.compute_factor)
    length = problem.compute * host.compute_factor + problem.prepare
    cpus, memory_mib = np.maximum(dataset.first_capacity(host), 1)
    work = max((length * problem.cpus).sum() / cpus, (length * problem.memory).sum() / memory_mib)
    longest = max(upward_ranks(dataset).values()) * host.compute_factor
    periods: int = math.ceil((problem.arrival.max() + 1.3 * work + 2 * longest) / METRIC_PERIOD_S)
    return periods * METRIC_PERIOD_S


def empty_timetable(dataset: Dataset, devices: list[Device], problem: Problem, horizon: int) -> Timetable:
    """Return a timetable without allocations.

    The free capacity of a second is the lower one of its start and end, because executors that no longer
    fit at the end are killed.
    """
    from simulator.edge.timetable_search import NONE, Timetable

    if horizon * len(devices) > MAX_CELLS:
        raise SimulationError(
            f"dataset {dataset.name}: a timetable of {horizon:,} s for {counted(len(devices), 'device')} is "
            "too large; plan with --policy water_gate"
        )
    rows = [device.index for device in devices]
    arrays: dict[str, Any] = {}
    for name, capacity in (("free_cpus", dataset.cpus[rows]), ("free_memory", dataset.memory_mib[rows])):
        lasting = np.minimum(capacity, np.roll(capacity, -1, axis=1))
        for row, device in enumerate(devices):
            if device.kind == "UE":  # it keeps its executors until the end of its last second
                lasting[row, device.offline_s] = capacity[row, device.offline_s]
                lasting[row, : device.online_s] = lasting[row, device.offline_s + 1 :] = 0
        arrays[name] = np.tile(lasting.astype(np.int32), (1, horizon // METRIC_PERIOD_S))
    tasks, cells = len(problem.compute), (problem.first_ue, problem.category.max() + 1)
    for name in ("device", "held", "start", "end", "kept_on", "before", "after"):
        arrays[name] = np.full(tasks, NONE, dtype=np.int64)
    arrays["tails"] = np.full((*cells, np.bincount(problem.category).max()), NONE, dtype=np.int64)
    arrays["tail_count"] = np.zeros(cells, dtype=np.int64)
    return Timetable(**arrays, latest=np.zeros(tasks, dtype=np.int64))


def carry_out(
    dataset: Dataset, kinds: tuple[Kind, ...], devices: list[Device], timetable: Timetable
) -> Environment:
    """Execute a timetable; raise `SimulationError` if the environment deviates from it."""
    environment = Environment(dataset, kinds)
    tasks = list(dataset.tasks.values())
    device, end, after = (values.tolist() for values in (timetable.device, timetable.end, timetable.after))
    created, matched = defaultdict(list), defaultdict(list)
    for i, start in enumerate(timetable.start.tolist()):
        matched[start].append(i)
        if timetable.before[i] < 0:
            created[int(timetable.held[i])].append(i)
    executors: dict[int, Executor] = {}
    over: dict[int, list[Executor]] = defaultdict(list)
    while not environment.done:
        now = environment.now
        for executor in over[now]:
            if executor.executor_id in environment.on_device[executor.device.index]:  # else offline
                environment.delete(executor)
        for i in created[now]:
            category = dataset.categories[tasks[i].category_id]
            executors[i] = environment.add(category, devices[device[i]])
        for i in matched[now]:
            executor = executors.pop(i)
            environment.match(executor, tasks[i].task_id)
            if executor.free_from_s != end[i]:
                raise SimulationError(
                    f"task {tasks[i].task_id} ends at {executor.free_from_s}, but was planned for {end[i]}"
                )
            if after[i] >= 0:
                executors[after[i]] = executor
            else:
                over[end[i]].append(executor)
        environment.advance()
    return environment
