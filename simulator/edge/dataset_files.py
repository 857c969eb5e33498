"""Reader and writer of the nine tables of a dataset; errors name file and line."""

from __future__ import annotations

import csv
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from simulator.edge.dataset import (
    BS_METRIC_STEP_S,
    METRIC_PERIOD_S,
    NO_METRIC,
    Category,
    Dataset,
    Device,
    Job,
    Kind,
    Task,
)
from simulator.errors import InputError
from simulator.io.files import write_csv

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
MAX_TIME_S = 1_000_000
"""Upper bound (s) of the times in tables and plans: every second up to it is simulated."""
MAX_NUMBER = 2**31 - 1
"""Upper bound of numbers, which are stored in arrays of 32 bits."""
MAY_BE_ZERO = {"Time", "Rate", "OnlineTime", "OfflineTime", "ArriveTime", "CPU", "Memory"}


def read_rows(path: Path, columns: tuple[str, ...]) -> Iterator[tuple[int, list[str]]]:
    """Yield (line, named columns as text) of every row; raise `InputError` for a missing file or column."""
    try:
        file = path.open(newline="", encoding="utf-8-sig")
    except FileNotFoundError:
        raise InputError("no such table", path=path) from None
    with file:
        rows = csv.reader(file)
        try:
            header = next(rows, [])
            missing = [name for name in columns if name not in header]
            if missing:
                raise InputError(f"the column {missing[0]} is missing", path=path, line=1)
            places = [header.index(name) for name in columns]
            width = max(places)
            for row in rows:
                if not row:
                    continue
                if len(row) <= width:
                    reason = f"{len(row)} values for {len(header)} columns"
                    raise InputError(reason, path=path, line=rows.line_num)
                yield rows.line_num, [row[place] for place in places]
        except (UnicodeDecodeError, csv.Error) as error:
            raise InputError(f"not a table of text: {error}", path=path) from error


def whole_number(text: str, column: str, path: Path, line: int) -> int:
    """Parse an integer of 0 or more; raise `InputError`."""
    try:
        value = int(text)
    except ValueError:
        raise InputError(f"{column} is {text!r}, not a whole number", path=path, line=line) from None
    if not 0 <= value <= MAX_NUMBER:
        reason = "below 0" if value < 0 else f"above {MAX_NUMBER}"
        raise InputError(f"{column} is {value}, {reason}", path=path, line=line)
    return value


class _Tables:
    """Tables of one folder while they are read and checked against each other."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def path(self, table: str) -> Path:
        return self.folder / f"{table}.csv"

    def numbers(self, table: str) -> Iterator[tuple[int, list[int]]]:
        path, columns = self.path(table), COLUMNS[table]
        positive = [
            name not in MAY_BE_ZERO and not name.endswith("Id") and name != "PrepareDuration"
            for name in columns
        ]
        for line, texts in read_rows(path, columns):
            try:
                values = [int(text) for text in texts]
            except ValueError:
                values = [-1]
            if min(values) < 0 or max(values) > MAX_NUMBER:  # parse one by one to name the column
                values = [
                    whole_number(text, name, path, line) for text, name in zip(texts, columns, strict=True)
                ]
            if 0 in values:
                for value, name, must in zip(values, columns, positive, strict=True):
                    if must and value == 0:
                        raise InputError(f"{name} must be above 0", path=path, line=line)
            yield line, values

    def keyed(self, table: str) -> dict[int, tuple[int, list[int]]]:
        """Return first column -> (line, row)."""
        found: dict[int, tuple[int, list[int]]] = {}
        for line, row in self.numbers(table):
            if row[0] in found:
                self.fail(table, line, f"{COLUMNS[table][0]} {row[0]} is given twice")
            found[row[0]] = line, row
        return found

    def fail(self, table: str, line: int | None, reason: str) -> NoReturn:
        raise InputError(reason, path=self.path(table), line=line)


def read_dataset(folder: Path) -> Dataset:
    """Read the dataset in that folder; raise `InputError` with file, line and reason."""
    if not folder.is_dir():
        raise InputError("no such folder of tables", path=folder)
    tables = _Tables(folder)
    categories = {key: Category(*row) for key, (_, row) in tables.keyed("category_table").items()}
    devices = _read_devices(tables)
    jobs, tasks = _read_jobs(tables, categories)
    capacity = np.zeros((2, len(devices), METRIC_PERIOD_S), dtype=np.int32)
    ues = [device for device in devices if device.kind == "UE"]
    links = np.full((2, len(ues), METRIC_PERIOD_S), NO_METRIC, dtype=np.int32)
    for _, (host_id, _, cpus, memory, _) in tables.numbers("host_table"):
        index = next(d.index for d in devices if d.kind == "Cloud" and d.device_id == host_id)
        capacity[0, index], capacity[1, index] = cpus, memory
    _read_bs_metric(tables, devices, capacity)
    _read_ue_metric(tables, devices, capacity, links)
    return Dataset(
        folder.name, categories, jobs, tasks, devices, capacity[0], capacity[1], links[0], links[1]
    )


def _read_devices(tables: _Tables) -> tuple[Device, ...]:
    clouds = tables.keyed("cloud_table")
    devices: list[Device] = []
    for line, (host_id, cloud_id, _, _, factor) in tables.keyed("host_table").values():
        if cloud_id not in clouds:
            tables.fail("host_table", line, f"CloudId {cloud_id} is not in cloud_table.csv")
        rate = clouds[cloud_id][1][1]
        if rate == 0:
            tables.fail("cloud_table", clouds[cloud_id][0], "Rate must be above 0")
        devices.append(Device(len(devices), "Cloud", host_id, factor, rate, cloud_id))
    if not devices:
        tables.fail("host_table", None, "the table has no host")
    for line, (bs_id, rate, factor) in tables.keyed("bs_table").values():
        if rate == 0:
            tables.fail("bs_table", line, "Rate must be above 0")
        devices.append(Device(len(devices), "BS", bs_id, factor, rate))
    for line, (ue_id, factor, online, offline) in tables.keyed("ue_table").values():
        if not online <= offline < METRIC_PERIOD_S:
            reason = f"online from {online} to {offline} is not within 0 to {METRIC_PERIOD_S - 1}"
            tables.fail("ue_table", line, reason)
        devices.append(Device(len(devices), "UE", ue_id, factor, online_s=online, offline_s=offline))
    return tuple(devices)


def _read_bs_metric(tables: _Tables, devices: tuple[Device, ...], capacity: Any) -> None:
    stations = {device.device_id: device.index for device in devices if device.kind == "BS"}
    missing = {(bs_id, at) for bs_id in stations for at in range(0, METRIC_PERIOD_S, BS_METRIC_STEP_S)}
    for line, (bs_id, at, cpus, memory) in tables.numbers("bs_metric"):
        if bs_id not in stations:
            tables.fail("bs_metric", line, f"BSId {bs_id} is not in bs_table.csv")
        if (bs_id, at) not in missing:
            tables.fail("bs_metric", line, f"Time {at} of BSId {bs_id} is not 0 or 600, or is given twice")
        missing.remove((bs_id, at))
        step = slice(at, at + BS_METRIC_STEP_S)
        capacity[0, stations[bs_id], step], capacity[1, stations[bs_id], step] = cpus, memory
    if missing:
        bs_id, at = min(missing)
        tables.fail("bs_metric", None, f"BSId {bs_id} has no row for Time {at}")


def _read_ue_metric(tables: _Tables, devices: tuple[Device, ...], capacity: Any, links: Any) -> None:
    ues = [device for device in devices if device.kind == "UE"]
    stations = {device.device_id for device in devices if device.kind == "BS"}
    rows = {device.device_id: row for row, device in enumerate(ues)}
    found: list[tuple[int, ...]] = []
    for line, (ue_id, at, rate, bs_id, cpus, memory) in tables.numbers("ue_metric"):
        if ue_id not in rows:
            tables.fail("ue_metric", line, f"UEId {ue_id} is not in ue_table.csv")
        if at >= METRIC_PERIOD_S:
            tables.fail("ue_metric", line, f"Time is {at}, above {METRIC_PERIOD_S - 1}")
        if bs_id not in stations:
            tables.fail("ue_metric", line, f"BSId {bs_id} is not in bs_table.csv")
        found.append((rows[ue_id], at, rate, bs_id, cpus, memory))
    if found:
        row, at, rate, bs_id, cpus, memory = np.array(found, dtype=np.int32).T
        first = len(devices) - len(ues)
        links[0, row, at], links[1, row, at] = rate, bs_id
        capacity[0, first + row, at], capacity[1, first + row, at] = cpus, memory
    for row, device in enumerate(ues):
        online = slice(device.online_s, device.offline_s + 1)
        gaps = np.flatnonzero(links[0, row, online] == NO_METRIC)
        if gaps.size:
            at = device.online_s + int(gaps[0])
            tables.fail("ue_metric", None, f"UEId {device.device_id} is online at {at} but has no row for it")


def _read_jobs(tables: _Tables, categories: dict[int, Category]) -> tuple[dict[int, Job], dict[int, Task]]:
    path = tables.path("task_table")
    arrivals = {}
    for job_id, (line, (_, arrival_s)) in tables.keyed("job_table").items():
        if arrival_s > MAX_TIME_S:
            tables.fail("job_table", line, f"ArriveTime is {arrival_s}, above {MAX_TIME_S}")
        arrivals[job_id] = arrival_s
    if not arrivals:
        tables.fail("job_table", None, "the table has no job")
    tasks: dict[int, Task] = {}
    lines: dict[int, int] = {}
    members: dict[int, list[int]] = {job_id: [] for job_id in arrivals}
    for line, texts in read_rows(path, COLUMNS["task_table"]):
        numbers = dict(zip(COLUMNS["task_table"], texts, strict=True))
        edges = [_edges(numbers.pop(name), name, path, line) for name in ("ParentTasks", "ChildTasks")]
        task_id, job_id, category_id, compute_s = (
            whole_number(text, name, path, line) for name, text in numbers.items()
        )
        if task_id in tasks:
            tables.fail("task_table", line, f"TaskId {task_id} is given twice")
        if job_id not in members:
            tables.fail("task_table", line, f"JobId {job_id} is not in job_table.csv")
        if category_id not in categories:
            tables.fail("task_table", line, f"CategoryId {category_id} is not in category_table.csv")
        if not 0 < compute_s <= MAX_TIME_S:
            tables.fail("task_table", line, f"ComputeDuration is {compute_s}, not within 1 to {MAX_TIME_S}")
        tasks[task_id] = Task(task_id, job_id, category_id, edges[0], edges[1], compute_s)
        lines[task_id] = line
        members[job_id].append(task_id)
    _check_graph(tasks, lambda task_id, reason: tables.fail("task_table", lines[task_id], reason))
    for job_id, task_ids in members.items():
        if not task_ids:
            tables.fail("job_table", None, f"JobId {job_id} has no task in task_table.csv")
    return {job_id: Job(job_id, at, tuple(members[job_id])) for job_id, at in arrivals.items()}, tasks


def _edges(text: str, column: str, path: Path, line: int) -> tuple[tuple[int, int], ...]:
    try:
        pairs = json.loads(text)
        edges = tuple((task_id, size) for task_id, size in pairs)
        if not all(type(value) is int and value >= 0 for edge in edges for value in edge):
            raise ValueError
    except (ValueError, TypeError):
        reason = f"{column} is {text!r}, not a list of [task id, size]"
        raise InputError(reason, path=path, line=line) from None
    return edges


def _check_graph(tasks: dict[int, Task], fail: Callable[[int, str], NoReturn]) -> None:
    both = ("parent", "child")
    for task in tasks.values():
        for word, edges in zip(both, (task.parents, task.children), strict=True):
            for other, _ in edges:
                if other not in tasks:
                    fail(task.task_id, f"task {task.task_id} has an unknown {word}, {other}")
                if tasks[other].job_id != task.job_id:
                    fail(task.task_id, f"the {word} {other} of task {task.task_id} belongs to another job")
    for task in tasks.values():
        for word, edges in zip(both, (task.parents, task.children), strict=True):
            for other, size in edges:
                back = tasks[other].children if word == "parent" else tasks[other].parents
                if (task.task_id, size) not in back:
                    claim = f"task {task.task_id} lists {word} {other} with size {size}"
                    fail(task.task_id, f"{claim}; task {other} does not match")
    waiting = {task.task_id: len(task.parents) for task in tasks.values()}
    ready = [task_id for task_id, parents in waiting.items() if not parents]
    while ready:
        task_id = ready.pop()
        del waiting[task_id]
        for child, _ in tasks[task_id].children:
            waiting[child] -= 1
            if not waiting[child]:
                ready.append(child)
    if waiting:
        fail(min(waiting), f"task {min(waiting)} is on or behind a cycle of parents")


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
