"""Plan: the commands of every second, and the two files with them."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from simulator.edge.dataset import Dataset, Device
from simulator.edge.dataset_files import MAX_TIME_S, read_rows, whole_number
from simulator.errors import InputError
from simulator.io.files import write_csv

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
class Step:
    """Commands of one second, in the order of their execution: delete, add, match."""

    deletes: list[int] = field(default_factory=list)
    adds: list[Add] = field(default_factory=list)
    matches: list[Match] = field(default_factory=list)


Plan = dict[int, Step]
"""Second -> its commands."""


def read_plan(folder: Path, dataset: Dataset) -> Plan:
    """Read the plan in that folder; raise `InputError` if it cannot be for this dataset."""
    plan: Plan = {}
    path = folder / "executor.csv"
    for line, (time, action, executor, category, kind, device) in read_rows(path, EXECUTOR_COLUMNS):
        at = _second(time, path, line)
        executor_id = whole_number(executor, "ExecutorId", path, line)
        step = plan.setdefault(at, Step())
        if action == "Delete":
            step.deletes.append(executor_id)
            continue
        if action != "Add":
            raise InputError(f"Action is {action!r}, neither Add nor Delete", path=path, line=line)
        category_id = whole_number(category, "CategoryId", path, line)
        device_id = whole_number(device, "DeviceId", path, line)
        if category_id not in dataset.categories:
            raise _foreign(f"CategoryId {category_id}", dataset, path, line)
        if (kind, device_id) not in dataset.by_name:
            raise _foreign(f"device {kind} {device_id}", dataset, path, line)
        step.adds.append(Add(executor_id, category_id, dataset.by_name[kind, device_id]))
    path = folder / "task.csv"
    for line, texts in read_rows(path, TASK_COLUMNS):
        at = _second(texts[0], path, line)
        executor_id, task_id = (
            whole_number(text, name, path, line)
            for text, name in zip(texts[1:], TASK_COLUMNS[1:], strict=True)
        )
        if task_id not in dataset.tasks:
            raise _foreign(f"TaskId {task_id}", dataset, path, line)
        plan.setdefault(at, Step()).matches.append(Match(executor_id, task_id))
    return plan


def _second(text: str, path: Path, line: int) -> int:
    at = whole_number(text, "Time", path, line)
    if at > MAX_TIME_S:
        raise InputError(f"Time is {at}, above {MAX_TIME_S}", path=path, line=line)
    return at


def _foreign(what: str, dataset: Dataset, path: Path, line: int) -> InputError:
    reason = f"{what} is not in dataset {dataset.name}: is this plan for another one?"
    return InputError(reason, path=path, line=line)


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
