"""Plan: the commands of every second, and the two files with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simulator.edge.dataset import Dataset, Device
from simulator.edge.dataset_files import MAX_NUMBER, MAX_TIME_S
from simulator.errors import InputError
from simulator.io.files import write_csv
from simulator.io.rows import Row, read_csv

EXECUTOR_COLUMNS = ("Time", "Action", "ExecutorId", "CategoryId", "DeviceType", "DeviceId")
TASK_COLUMNS = ("Time", "ExecutorId", "TaskId")


@dataclass(frozen=True, slots=True)
class Add:
    """Create an executor of a category on a device."""

    executor_id: int
    category_id: int
    device: Device


@dataclass(frozen=True, slots=True)
class Match:
    """Start a task on an executor."""

    executor_id: int
    task_id: int


@dataclass(slots=True)
class Commands:
    """Commands of one second, in the order of their execution: delete, add, match."""

    deletes: list[int] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)


Plan = dict[int, Commands]
"""Second -> its commands."""


def read_plan(folder: Path, dataset: Dataset) -> Plan:
    """Read the plan in that folder; raise `InputError` if it cannot be for this dataset."""
    plan: Plan = {}
    for row in read_csv(folder / "executor.csv", EXECUTOR_COLUMNS):
        executor_id = row.whole("ExecutorId", most=MAX_NUMBER)
        step = plan.setdefault(row.whole("Time", most=MAX_TIME_S), Commands())
        action, kind = row.text("Action"), row.text("DeviceType")
        if action == "Delete":
            step.deletes.append(executor_id)
            continue
        if action != "Add":
            raise row.fail(f"Action is {action!r}, neither Add nor Delete")
        category_id, device_id = row.wholes(("CategoryId", "DeviceId"), MAX_NUMBER)
        if category_id not in dataset.categories:
            raise _foreign(f"CategoryId {category_id}", dataset, row)
        if (kind, device_id) not in dataset.by_name:
            raise _foreign(f"device {kind} {device_id}", dataset, row)
        step.adds.append(Add(executor_id, category_id, dataset.by_name[kind, device_id]))
    for row in read_csv(folder / "task.csv", TASK_COLUMNS):
        executor_id, task_id = row.wholes(("ExecutorId", "TaskId"), MAX_NUMBER)
        if task_id not in dataset.tasks:
            raise _foreign(f"TaskId {task_id}", dataset, row)
        plan.setdefault(row.whole("Time", most=MAX_TIME_S), Commands()).matches.append(
            Match(executor_id, task_id)
        )
    return plan


def _foreign(what: str, dataset: Dataset, row: Row) -> InputError:
    return row.fail(f"{what} is not in dataset {dataset.name}: is this plan for another one?")


def write_plan(plan: Plan, folder: Path) -> None:
    """Write `executor.csv` and `task.csv`, with the columns of the published plans."""
    executors: list[tuple[object, ...]] = []
    tasks: list[tuple[int, int, int]] = []
    for at, step in sorted(plan.items()):
        executors += ((at, "Delete", executor_id, "", "", "") for executor_id in step.deletes)
        executors += (
            (at, "Add", add.executor_id, add.category_id, add.device.kind, add.device.device_id)
            for add in step.adds
        )
        tasks += ((at, match.executor_id, match.task_id) for match in step.matches)
    write_csv(folder / "executor.csv", EXECUTOR_COLUMNS, executors)
    write_csv(folder / "task.csv", TASK_COLUMNS, tasks)
