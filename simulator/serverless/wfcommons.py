"""Reader of workflows in WfCommons instances (WfFormat 1.5, JSON)."""

from __future__ import annotations

import codecs
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError

from simulator.io.documents import first_error
from simulator.io.rows import MAX_VALUE
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import (
    DEFAULT_MEMORY_MIB,
    DEFAULT_PARALLELISM,
    DEFAULT_SINGLE_CORE_SPEED,
    WorkflowTemplate,
    find_cycle,
    operations,
)

MIB = 1024 * 1024
Amount = Annotated[float, Field(ge=0, le=MAX_VALUE, allow_inf_nan=False)]


class _Entry(BaseModel):
    id: str


Entry = TypeVar("Entry", bound=_Entry)


class _File(_Entry):
    sizeInBytes: Amount


class _Task(_Entry):
    parents: list[str] = []
    children: list[str] = []
    inputFiles: list[str] = []
    outputFiles: list[str] = []


class _Run(_Entry):
    runtimeInSeconds: Amount
    coreCount: Annotated[float, Field(gt=0, le=MAX_VALUE, allow_inf_nan=False)] | None = None
    memoryInBytes: Amount | None = None


class _Specification(BaseModel):
    tasks: Annotated[list[_Task], Field(min_length=1)]
    files: list[_File] = []


class _Execution(BaseModel):
    tasks: list[_Run]


class _Workflow(BaseModel):
    specification: _Specification
    execution: _Execution


class _Instance(BaseModel):
    name: str = ""
    schemaVersion: Literal["1.5"]
    workflow: _Workflow


def read_wfcommons(path: Path, single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED) -> WorkflowTemplate:
    """Read the workflow of an instance; functions are numbered in the order of its tasks.

    Threads are the core count of the run and MiB its memory, rounded up; 1 and 128 if they are missing.
    An edge carries the files the parent writes and the child reads. Raises `WorkflowError`.
    """
    try:
        instance = _Instance.model_validate_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValidationError as error:
        raise WorkflowError(f"not a WfCommons 1.5 workflow: {first_error(error)}", path=path) from error
    tasks = instance.workflow.specification.tasks
    number = {task: fn_id for fn_id, task in enumerate(_by_id(path, "task", tasks))}
    runs = _by_id(path, "execution of the task", instance.workflow.execution.tasks)
    for task in tasks:
        if task.id not in runs:
            raise WorkflowError(
                f"the task {task.id!r} has no execution, so its runtime is unknown", path=path
            )
    edges = _edges(path, instance.workflow.specification, number)
    if cycle := [tasks[fn_id].id for fn_id in find_cycle(edges)]:
        raise WorkflowError(f"the tasks form a cycle: {' -> '.join(cycle)}", path=path)
    ordered = [runs[task.id] for task in tasks]
    parallelisms = [math.ceil(run.coreCount or DEFAULT_PARALLELISM) for run in ordered]
    return WorkflowTemplate(
        operations((run.runtimeInSeconds for run in ordered), single_core_speed, parallelisms),
        tuple(math.ceil((run.memoryInBytes or DEFAULT_MEMORY_MIB * MIB) / MIB) for run in ordered),
        tuple(parallelisms),
        tuple(edges),
        instance.name or path.stem,
    )


def _by_id(path: Path, what: str, entries: Sequence[Entry]) -> dict[str, Entry]:
    """Return the entries by id; raise `WorkflowError` for one that is given twice."""
    found: dict[str, Entry] = {}
    for entry in entries:
        if entry.id in found:
            raise WorkflowError(f"the {what} {entry.id!r} is given twice", path=path)
        found[entry.id] = entry
    return found


def _edges(path: Path, specification: _Specification, number: dict[str, int]) -> list[tuple[int, int, int]]:
    size = {name: int(file.sizeInBytes) for name, file in _by_id(path, "file", specification.files).items()}
    pairs: set[tuple[int, int]] = set()
    for task in specification.tasks:
        for other in (*task.parents, *task.children):
            if other not in number:
                raise WorkflowError(f"the task {task.id!r} names {other!r}, which is not a task", path=path)
        pairs |= {(number[parent], number[task.id]) for parent in task.parents}
        pairs |= {(number[task.id], number[child]) for child in task.children}
    tasks = specification.tasks
    edges = []
    for parent, child in sorted(pairs):
        shared = set(tasks[parent].outputFiles) & set(tasks[child].inputFiles)
        unknown = sorted(shared - size.keys())
        if unknown:
            raise WorkflowError(f"the file {unknown[0]!r} has no size", path=path)
        edges.append((parent, child, sum(size[file] for file in shared)))
    return edges
