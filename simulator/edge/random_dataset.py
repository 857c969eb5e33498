"""Generator of datasets similar to the public ones, drawn from a seed."""

from __future__ import annotations

import numpy as np

from simulator.edge.dataset import (
    BS_METRIC_STEP_S,
    METRIC_PERIOD_S,
    NO_METRIC,
    Category,
    Dataset,
    Device,
    JobGraph,
    Task,
)
from simulator.errors import InputError

CATEGORIES = 50
ARRIVALS_END_S = 1200
MAX_REQUEST = 8
"""Upper bound of the CPUs and of the MiB an executor requests; every host has more."""


def generate(
    seed: int, *, jobs: int = 40, hosts: int = 1, stations: int = 2, ues: int = 120, tasks_per_job: int = 20
) -> Dataset:
    """Generate a dataset; equal arguments give equal datasets.

    The ranges are those of the public datasets: requests of 1 to 8, tasks of 5 to some hundred seconds,
    data of 1 to 50, user devices online for some minutes of 1,200 seconds, 5 to 10 times slower than the
    fastest host. Raises `InputError` for less than one job, host or task, or a number below 0.
    """
    for name, count, least in (
        ("seed", seed, 0),
        ("jobs", jobs, 1),
        ("hosts", hosts, 1),
        ("stations", stations, 0),
        ("ues", ues, 0),
        ("tasks_per_job", tasks_per_job, 1),
    ):
        if count < least:
            raise InputError(f"{name} must be {least} or more, got {count}")
    random = np.random.default_rng(seed)

    def between(low: int, high: int) -> int:
        return int(random.integers(low, high + 1))

    categories = {
        i: Category(i, between(1, MAX_REQUEST), between(1, MAX_REQUEST), between(1, 5))
        for i in range(CATEGORIES)
    }
    devices: list[Device] = []
    cloud_rate = between(10_000, 18_000)
    for host in range(hosts):
        devices.append(Device(len(devices), "Cloud", host, between(1, 2), cloud_rate, cloud_id=0))
    for station in range(stations):
        devices.append(Device(len(devices), "BS", station, between(2, 5), between(2000, 2500)))
    for ue in range(ues if stations else 0):
        online = between(0, METRIC_PERIOD_S - 60)
        offline = min(METRIC_PERIOD_S - 1, online + 30 + int(random.exponential(250)))
        device = Device(len(devices), "UE", ue, between(5, 10), online_s=online, offline_s=offline)
        devices.append(device)
    cpus = np.zeros((len(devices), METRIC_PERIOD_S), dtype=np.int32)
    memory = np.zeros_like(cpus)
    rates = np.full((sum(d.kind == "UE" for d in devices), METRIC_PERIOD_S), NO_METRIC, dtype=np.int32)
    links = rates.copy()
    for device in devices:
        for capacity in (cpus[device.index], memory[device.index]):
            if device.kind == "Cloud":
                capacity[:] = between(33, 64)
            elif device.kind == "BS":
                for at in range(0, METRIC_PERIOD_S, BS_METRIC_STEP_S):
                    capacity[at : at + BS_METRIC_STEP_S] = between(MAX_REQUEST, 32)
            else:
                _fill(random, capacity, device, 8, 16, changes=3)
        if device.kind == "UE":
            row = device.index - hosts - stations
            _fill(random, rates[row], device, 0, int(10 ** random.uniform(0.5, 2)), changes=12)
            _fill(random, links[row], device, 0, stations - 1, changes=1)
    tasks: dict[int, Task] = {}
    drawn: dict[int, JobGraph] = {}
    arrivals = np.sort(random.integers(0, ARRIVALS_END_S + 1, jobs)).tolist()
    for job_id, arrival_s in enumerate(arrivals):
        members = _graph(random, job_id, len(tasks), between(1, 2 * tasks_per_job - 1))
        tasks.update((task.task_id, task) for task in members)
        drawn[job_id] = JobGraph(job_id, arrival_s, tuple(task.task_id for task in members))
    name = f"generated-{seed}"
    return Dataset(name, categories, drawn, tasks, tuple(devices), cpus, memory, rates, links)


def _fill(
    random: np.random.Generator,
    values: np.ndarray[tuple[int, ...], np.dtype[np.int32]],
    device: Device,
    low: int,
    high: int,
    changes: int,
) -> None:
    """Fill the seconds in which the device is online with a step function."""
    at = device.online_s
    while at <= device.offline_s:
        until = min(device.offline_s + 1, at + 1 + int(random.exponential(METRIC_PERIOD_S / 4 / changes)))
        values[at:until] = random.integers(low, high + 1)
        at = until


def _graph(random: np.random.Generator, job_id: int, first: int, count: int) -> list[Task]:
    """Draw layers of tasks; each task after the first layer has parents in the previous layer."""
    layers: list[list[int]] = []
    place = 0
    while place < count:
        width = min(count - place, int(random.integers(1, 7)))
        layers.append(list(range(first + place, first + place + width)))
        place += width
    parents: dict[int, list[tuple[int, int]]] = {first + i: [] for i in range(count)}
    children: dict[int, list[tuple[int, int]]] = {first + i: [] for i in range(count)}
    scale = 10 ** random.uniform(0.8, 1.9)
    category_ids, compute_s = {}, {}
    for depth, layer in enumerate(layers):
        category_id, seconds = int(random.integers(CATEGORIES)), 5 + int(random.exponential(scale))
        for task_id in layer:
            category_ids[task_id] = category_id
            compute_s[task_id] = max(5, int(seconds * random.uniform(0.8, 1.2)))
            if depth:
                above = layers[depth - 1]
                chosen = random.permutation(above)[: random.integers(1, min(3, len(above)) + 1)]
                for parent in sorted(chosen.tolist()):
                    size = int(random.integers(1, 51))
                    parents[task_id].append((parent, size))
                    children[parent].append((task_id, size))
    return [
        Task(
            task_id,
            job_id,
            category_ids[task_id],
            tuple(parents[task_id]),
            tuple(children[task_id]),
            compute_s[task_id],
        )
        for task_id in parents
    ]
