"""Reader and writer of the nine tables of a dataset; errors name file and line."""

from __future__ import annotations

import json
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path
from typing import Any

import numpy as np

from simulator.edge.dataset import (
    BS_METRIC_STEP_S,
    METRIC_PERIOD_S,
    NO_METRIC,
    Category,
    Dataset,
    Device,
    JobGraph,
    Kind,
    Task,
)
from simulator.errors import InputError
from simulator.io.files import write_csv
from simulator.io.rows import MAX_SHOWN, Row, read_csv

COLUMNS = {
    "cloud_table": ("CloudId", "Rate"),
    "host_table": ("HostId", "CloudId", "CPU", "Memory", "ComputeFactor"),
    "bs_table": ("BSId", "Rate", "ComputeFactor"),
    "bs_metric": ("BSId", "Time", "CPU", "Memory"),
    "ue_table": ("UEId", "ComputeFactor", "OnlineTime", "OfflineTime"),
    "ue_metric": ("UEId", "Time", "Rate", "BSId", "CPU", "Memory"),
    "category_table": ("CategoryId", "RequestCPU", "RequestMemory", "PrepareDuration"),
    "job_table": ("JobId", "ArriveTime"),
    "task_table": ("TaskId", "JobId", "CategoryId", "ParentTasks", "ChildTasks", "ComputeDuration"),
}
NUMBERS_OF_TASK = ("TaskId", "JobId", "CategoryId", "ComputeDuration")
MAX_TIME_S = 1_000_000
"""Upper bound (s) of the times in tables and plans: every second up to it is simulated."""
MAX_RUN_S = 10 * MAX_TIME_S
"""Upper bound (s) of a task on the slowest device, for the same reason."""
MAX_NUMBER = 2**31 - 1
"""Upper bound of numbers, which are stored in arrays of 32 bits."""
MAY_BE_ZERO = {"Time", "Rate", "OnlineTime", "OfflineTime", "ArriveTime", "CPU", "Memory", "PrepareDuration"}


class _Tables:
    """Tables of one folder while they are read and checked against each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, table: str) -> Path:
        return self.folder / f"{table}.csv"

    def rows(self, table: str) -> Iterator[Row]:
        return read_csv(self.path(table), COLUMNS[table])

    def numbers(self, table: str) -> Iterator[tuple[Row, list[int]]]:
        columns = COLUMNS[table]
        positive = [name not in MAY_BE_ZERO and not name.endswith("Id") for name in columns]
        for row in self.rows(table):
            values = row.wholes(columns, MAX_NUMBER)
            if 0 in values:
                for value, name, must in zip(values, columns, positive, strict=True):
                    if must and value == 0:
                        raise row.fail(f"{name} must be above 0")
            yield row, values

    def keyed(self, table: str) -> dict[int, tuple[Row, list[int]]]:
        """Return first column -> (row, its values)."""
        found: dict[int, tuple[Row, list[int]]] = {}
        for row, values in self.numbers(table):
            if values[0] in found:
                raise row.fail(f"{COLUMNS[table][0]} {values[0]} is given twice")
            found[values[0]] = row, values
        return found

    def fail(self, table: str, reason: str) -> InputError:
        return InputError(reason, path=self.path(table))


def read_dataset(folder: Path) -> Dataset:
    """Read the dataset in that folder; raise `InputError` with file, line and reason."""
    if not folder.is_dir():
        raise InputError("no such folder of tables", path=folder)
    tables = _Tables(folder)
    categories = _read_categories(tables)
    devices, hosts = _read_devices(tables)
    jobs, tasks = _read_jobs(tables, categories, max(device.compute_factor for device in devices))
    capacity = np.zeros((2, len(devices), METRIC_PERIOD_S), dtype=np.int32)
    ues = [device for device in devices if device.kind == "UE"]
    links = np.full((2, len(ues), METRIC_PERIOD_S), NO_METRIC, dtype=np.int32)
    capacity[:, : len(hosts)] = np.transpose(hosts)[:, :, np.newaxis]
    _read_bs_metric(tables, devices, capacity)
    _read_ue_metric(tables, devices, capacity, links)
    return Dataset(folder.resolve().name, categories, jobs, tasks, devices, *capacity, *links)


def _read_categories(tables: _Tables) -> dict[int, Category]:
    categories = {}
    for key, (row, values) in tables.keyed("category_table").items():
        categories[key] = category = Category(*values)
        if category.prepare_s > MAX_TIME_S:
            raise row.fail(f"PrepareDuration is {category.prepare_s}, above {MAX_TIME_S}")
    return categories


def _read_devices(tables: _Tables) -> tuple[tuple[Device, ...], list[tuple[int, int]]]:
    """Return the devices, hosts first, and the CPUs and MiB of each host."""
    clouds = tables.keyed("cloud_table")
    devices: list[Device] = []
    hosts: list[tuple[int, int]] = []
    for row, (host_id, cloud_id, cpus, memory, factor) in tables.keyed("host_table").values():
        if cloud_id not in clouds:
            raise row.fail(f"CloudId {cloud_id} is not in cloud_table.csv")
        rate = clouds[cloud_id][1][1]
        if rate == 0:
            raise clouds[cloud_id][0].fail("Rate must be above 0")
        devices.append(Device(len(devices), "Cloud", host_id, factor, rate, cloud_id))
        hosts.append((cpus, memory))
    if not devices:
        raise tables.fail("host_table", "the table has no host")
    for row, (bs_id, rate, factor) in tables.keyed("bs_table").values():
        if rate == 0:
            raise row.fail("Rate must be above 0")
        devices.append(Device(len(devices), "BS", bs_id, factor, rate))
    for row, (ue_id, factor, online, offline) in tables.keyed("ue_table").values():
        if not online <= offline < METRIC_PERIOD_S:
            raise row.fail(f"online from {online} to {offline} is not within 0 to {METRIC_PERIOD_S - 1}")
        devices.append(Device(len(devices), "UE", ue_id, factor, online_s=online, offline_s=offline))
    return tuple(devices), hosts


def _read_bs_metric(tables: _Tables, devices: tuple[Device, ...], capacity: Any) -> None:
    stations = {device.device_id: device.index for device in devices if device.kind == "BS"}
    missing = {(bs_id, at) for bs_id in stations for at in range(0, METRIC_PERIOD_S, BS_METRIC_STEP_S)}
    for row, (bs_id, at, cpus, memory) in tables.numbers("bs_metric"):
        if bs_id not in stations:
            raise row.fail(f"BSId {bs_id} is not in bs_table.csv")
        if (bs_id, at) not in missing:
            raise row.fail(f"Time {at} of BSId {bs_id} is not 0 or 600, or is given twice")
        missing.remove((bs_id, at))
        step = slice(at, at + BS_METRIC_STEP_S)
        capacity[0, stations[bs_id], step], capacity[1, stations[bs_id], step] = cpus, memory
    if missing:
        bs_id, at = min(missing)
        raise tables.fail("bs_metric", f"BSId {bs_id} has no row for Time {at}")


def _read_ue_metric(tables: _Tables, devices: tuple[Device, ...], capacity: Any, links: Any) -> None:
    ues = [device for device in devices if device.kind == "UE"]
    stations = {device.device_id for device in devices if device.kind == "BS"}
    place = {device.device_id: index for index, device in enumerate(ues)}
    found: dict[tuple[int, int], tuple[int, ...]] = {}
    for row, (ue_id, at, rate, bs_id, cpus, memory) in tables.numbers("ue_metric"):
        if ue_id not in place:
            raise row.fail(f"UEId {ue_id} is not in ue_table.csv")
        if at >= METRIC_PERIOD_S:
            raise row.fail(f"Time is {at}, above {METRIC_PERIOD_S - 1}")
        if bs_id not in stations:
            raise row.fail(f"BSId {bs_id} is not in bs_table.csv")
        if (ue_id, at) in found:
            raise row.fail(f"Time {at} of UEId {ue_id} is given twice")
        found[ue_id, at] = (place[ue_id], at, rate, bs_id, cpus, memory)
    if found:
        index, at, rate, bs_id, cpus, memory = np.array(list(found.values()), dtype=np.int32).T
        first = len(devices) - len(ues)
        links[0, index, at], links[1, index, at] = rate, bs_id
        capacity[0, first + index, at], capacity[1, first + index, at] = cpus, memory
    for index, device in enumerate(ues):
        online = slice(device.online_s, device.offline_s + 1)
        gaps = np.flatnonzero(links[0, index, online] == NO_METRIC)
        if gaps.size:
            at = device.online_s + int(gaps[0])
            raise tables.fail("ue_metric", f"UEId {device.device_id} is online at {at} but has no row for it")


def _read_jobs(
    tables: _Tables, categories: dict[int, Category], slowest: int
) -> tuple[dict[int, JobGraph], dict[int, Task]]:
    arrivals = {}
    for job_id, (row, (_, arrival_s)) in tables.keyed("job_table").items():
        if arrival_s > MAX_TIME_S:
            raise row.fail(f"ArriveTime is {arrival_s}, above {MAX_TIME_S}")
        arrivals[job_id] = arrival_s
    if not arrivals:
        raise tables.fail("job_table", "the table has no job")
    tasks: dict[int, Task] = {}
    rows: dict[int, Row] = {}
    members: dict[int, list[int]] = {job_id: [] for job_id in arrivals}
    for row in tables.rows("task_table"):
        parents, children = (_edges(row, name) for name in ("ParentTasks", "ChildTasks"))
        task_id, job_id, category_id, compute_s = row.wholes(NUMBERS_OF_TASK, MAX_NUMBER)
        if task_id in tasks:
            raise row.fail(f"TaskId {task_id} is given twice")
        if job_id not in members:
            raise row.fail(f"JobId {job_id} is not in job_table.csv")
        if category_id not in categories:
            raise row.fail(f"CategoryId {category_id} is not in category_table.csv")
        if not 0 < compute_s <= MAX_TIME_S:
            raise row.fail(f"ComputeDuration is {compute_s}, not within 1 to {MAX_TIME_S}")
        if compute_s * slowest > MAX_RUN_S:
            raise row.fail(
                f"ComputeDuration {compute_s} x the largest ComputeFactor, {slowest}, is above {MAX_RUN_S}"
            )
        tasks[task_id] = Task(task_id, job_id, category_id, parents, children, compute_s)
        rows[task_id] = row
        members[job_id].append(task_id)
    _check_graph(tasks, rows)
    for job_id, task_ids in members.items():
        if not task_ids:
            raise tables.fail("job_table", f"JobId {job_id} has no task in task_table.csv")
    return {job_id: JobGraph(job_id, at, tuple(members[job_id])) for job_id, at in arrivals.items()}, tasks


def _edges(row: Row, column: str) -> tuple[tuple[int, int], ...]:
    text = row.text(column)
    try:
        pairs = json.loads(text)
        edges = tuple((task_id, size) for task_id, size in pairs)
        if not all(type(value) is int and 0 <= value <= MAX_NUMBER for edge in edges for value in edge):
            raise ValueError
    except (ValueError, TypeError, RecursionError):
        reason = f"not a list of [task id, size] with sizes up to {MAX_NUMBER}"
        raise row.fail(f"{column} is {text[:MAX_SHOWN]!r}, {reason}") from None
    if len({task_id for task_id, _ in edges}) < len(edges):
        raise row.fail(f"{column} names a task twice")
    return edges


def _check_graph(tasks: dict[int, Task], rows: dict[int, Row]) -> None:
    both = ("parent", "child")
    for task in tasks.values():
        for word, edges in zip(both, (task.parents, task.children), strict=True):
            for other, _ in edges:
                if other not in tasks:
                    raise rows[task.task_id].fail(f"task {task.task_id} has an unknown {word}, {other}")
                if tasks[other].job_id != task.job_id:
                    raise rows[task.task_id].fail(
                        f"the {word} {other} of task {task.task_id} belongs to another job"
                    )
    for task in tasks.values():
        for word, edges in zip(both, (task.parents, task.children), strict=True):
            for other, size in edges:
                back = tasks[other].children if word == "parent" else tasks[other].parents
                if (task.task_id, size) not in back:
                    claim = f"task {task.task_id} lists {word} {other} with size {size}"
                    raise rows[task.task_id].fail(f"{claim}; task {other} does not match")
    try:
        TopologicalSorter(
            {id_: [parent for parent, _ in task.parents] for id_, task in tasks.items()}
        ).prepare()
    except CycleError as error:
        first = min(error.args[1])
        raise rows[first].fail(f"task {first} is on a cycle of parents") from None


def write_dataset(dataset: Dataset, folder: Path) -> None:
    """Write the nine tables; `read_dataset` returns the same dataset."""
    by_kind: dict[Kind, list[Device]] = {"Cloud": [], "BS": [], "UE": []}
    for device in dataset.devices:
        by_kind[device.kind].append(device)
    cpus, memory = dataset.cpus, dataset.memory_mib
    rows: dict[str, list[tuple[Any, ...]]] = {
        "cloud_table": sorted({(d.cloud_id, d.rate) for d in by_kind["Cloud"]}),
        "host_table": [
            (d.device_id, d.cloud_id, cpus[d.index, 0], memory[d.index, 0], d.compute_factor)
            for d in by_kind["Cloud"]
        ],
        "bs_table": [(d.device_id, d.rate, d.compute_factor) for d in by_kind["BS"]],
        "bs_metric": [
            (d.device_id, at, cpus[d.index, at], memory[d.index, at])
            for at in range(0, METRIC_PERIOD_S, BS_METRIC_STEP_S)
            for d in by_kind["BS"]
        ],
        "ue_table": [(d.device_id, d.compute_factor, d.online_s, d.offline_s) for d in by_kind["UE"]],
        "ue_metric": [
            (
                d.device_id,
                at,
                dataset.ue_rate[row, at],
                dataset.ue_bs[row, at],
                cpus[d.index, at],
                memory[d.index, at],
            )
            for row, d in enumerate(by_kind["UE"])
            for at in np.flatnonzero(dataset.ue_rate[row] != NO_METRIC).tolist()
        ],
        "category_table": [
            (c.category_id, c.cpus, c.memory_mib, c.prepare_s) for c in dataset.categories.values()
        ],
        "job_table": [(job.job_id, job.arrival_s) for job in dataset.jobs.values()],
        "task_table": [
            (
                task.task_id,
                task.job_id,
                task.category_id,
                json.dumps(task.parents),
                json.dumps(task.children),
                task.compute_s,
            )
            for task in dataset.tasks.values()
        ],
    }
    for table, columns in COLUMNS.items():
        write_csv(folder / f"{table}.csv", columns, rows[table])
