"""Reader of workflow files and folders; the suffix of a file selects the format."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from simulator.serverless.dax import read_dax
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import DEFAULT_SINGLE_CORE_SPEED, WorkflowTemplate
from simulator.serverless.wfcommons import read_wfcommons

NOT_WORKFLOWS = (".dag.json", ".memory.json", ".parallelism.json")
"""Suffixes of companion files of a DAX in the original's data sets; they are not workflows."""


def read_workflows(
    paths: Iterable[Path], single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED
) -> list[WorkflowTemplate]:
    """Read templates from files and folders (sorted by name); raise `InputError` if there are none."""
    files: list[Path] = []
    for path in paths:
        if path.is_dir():
            found = sorted(
                entry
                for entry in path.iterdir()
                if entry.suffix in {".dax", ".xml", ".json"} and not entry.name.endswith(NOT_WORKFLOWS)
            )
            if not found:
                raise WorkflowError("no .dax, .xml or .json workflow in this folder", path=path)
            files += found
        else:
            files.append(path)
    return [read_workflow(path, single_core_speed) for path in files]


def read_workflow(path: Path, single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED) -> WorkflowTemplate:
    """Read a Pegasus DAX (`.dax`, `.xml`) or a WfCommons file (`.json`); raise `InputError`."""
    if not path.exists():
        raise WorkflowError("no such file or folder", path=path)
    if path.suffix in {".dax", ".xml"}:
        return read_dax(path, single_core_speed)
    if path.suffix == ".json":
        return read_wfcommons(path, single_core_speed)
    raise WorkflowError("not a workflow: expected .dax, .xml or .json", path=path)
