"""Reader of workflows in Pegasus DAX files (XML, versions 2 and 3)."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path
from xml.parsers import expat

from simulator.io.rows import MAX_VALUE, read_json
from simulator.serverless.errors import WorkflowError
from simulator.serverless.template import (
    DEFAULT_MEMORY_MIB,
    DEFAULT_PARALLELISM,
    DEFAULT_SINGLE_CORE_SPEED,
    WorkflowTemplate,
    find_cycle,
    operations,
)

SECONDS = {"": 1.0, "s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0}
BYTES = {
    "": 1,
    "b": 1,
    **{f"{letter}b": 1000**power for power, letter in enumerate("kmgt", start=1)},
    **{f"{letter}ib": 1024**power for power, letter in enumerate("kmgt", start=1)},
}
QUANTITY = re.compile(r"([-+]?(?:\d+(?:\.\d*)?|\.\d+)(?:[eE][-+]?\d+)?)\s*([A-Za-zµ/]*)")


@dataclass(slots=True)
class _Job:
    line: int
    runtime_s: float
    inputs: set[str] = field(default_factory=set)
    outputs: dict[str, int] = field(default_factory=dict)


class _Reader:
    """Collector of jobs and dependencies while the XML is parsed; it knows the current line."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.jobs: dict[str, _Job] = {}
        self.dependencies: dict[tuple[str, str], int] = {}
        self.current: _Job | None = None
        self.child = ""
        self.parser = expat.ParserCreate(namespace_separator=" ")
        self.parser.StartElementHandler = self.start
        self.parser.EndElementHandler = self.end

    def fail(self, reason: str, line: int | None = None) -> WorkflowError:
        return WorkflowError(reason, path=self.path, line=line or self.parser.CurrentLineNumber)

    def attribute(self, attributes: dict[str, str], name: str, element: str) -> str:
        if name not in attributes:
            raise self.fail(f"<{element}> has no {name!r}")
        return attributes[name]

    def quantity(self, text: str, units: dict[str, float] | dict[str, int], what: str) -> float:
        match = QUANTITY.fullmatch(text.strip())
        if match is None:
            raise self.fail(f"{what} {text[:80]!r} is not a number")
        if match[2].lower() not in units:
            known = ", ".join(unit for unit in units if unit)
            raise self.fail(f"{what} {text[:80]!r} has an unknown unit; known are {known}")
        value = float(match[1]) * units[match[2].lower()]
        if not 0 <= value <= MAX_VALUE:
            raise self.fail(f"{what} {text[:80]!r} is negative or above {MAX_VALUE:,}")
        return value

    def start(self, tag: str, attributes: dict[str, str]) -> None:
        element = tag.rsplit(" ", 1)[-1]
        if element == "job":
            self.start_job(attributes)
        elif element == "uses" and self.current is not None:
            self.add_file(self.current, attributes)
        elif element == "child":
            self.child = self.attribute(attributes, "ref", element)
        elif element == "parent":
            edge = (self.attribute(attributes, "ref", element), self.child)
            self.dependencies.setdefault(edge, self.parser.CurrentLineNumber)

    def start_job(self, attributes: dict[str, str]) -> None:
        name = self.attribute(attributes, "id", "job")
        if name in self.jobs:
            raise self.fail(f"job {name!r} is defined twice")
        runtime_s = self.quantity(self.attribute(attributes, "runtime", "job"), SECONDS, "runtime")
        self.current = self.jobs[name] = _Job(self.parser.CurrentLineNumber, runtime_s)

    def add_file(self, job: _Job, attributes: dict[str, str]) -> None:
        name = attributes.get("file") or self.attribute(attributes, "name", "uses")
        link = self.attribute(attributes, "link", "uses")
        if link in {"input", "inout"}:
            job.inputs.add(name)
        if link in {"output", "inout"}:
            job.outputs[name] = int(self.quantity(attributes.get("size", "0"), BYTES, "size"))

    def end(self, tag: str) -> None:
        if tag.rsplit(" ", 1)[-1] == "job":
            self.current = None


def read_dax(path: Path, single_core_speed: int = DEFAULT_SINGLE_CORE_SPEED) -> WorkflowTemplate:
    """Read the workflow of a DAX file; functions are numbered in the order of their job ids.

    The operations of a function are runtime x single_core_speed x parallelism. An edge carries the files
    that the parent writes and the child reads, in the size the parent states. DAX has no memory and no
    threads: they are read from `NAME.memory.json` and `NAME.parallelism.json` beside the file if these
    exist, else they are 128 MiB and 1. Raises `WorkflowError` with file and line.
    """
    reader = _Reader(path)
    try:
        reader.parser.Parse(path.read_bytes(), True)
    except expat.ExpatError as error:
        raise WorkflowError(
            f"not well-formed XML: {expat.ErrorString(error.code)}", path=path, line=error.lineno
        ) from error
    except WorkflowError:
        raise
    except (LookupError, ValueError) as error:  # of an encoding that the parser does not know
        raise WorkflowError(f"not readable XML: {error}; save it as UTF-8", path=path) from error
    if not reader.jobs:
        raise WorkflowError("the file has no <job>", path=path)
    names = sorted(reader.jobs)
    number = {name: fn_id for fn_id, name in enumerate(names)}
    edges = []
    for (parent, child), line in reader.dependencies.items():
        for end in (parent, child):
            if end not in number:
                raise reader.fail(f"the edge {parent} -> {child} names {end!r}, which is not a job", line)
        outputs = reader.jobs[parent].outputs
        shared = reader.jobs[child].inputs & outputs.keys()
        edges.append((number[parent], number[child], sum(outputs[file] for file in shared)))
    edges.sort()
    if cycle := [names[fn_id] for fn_id in find_cycle(edges)]:
        first = reader.dependencies[cycle[0], cycle[1]]
        raise reader.fail(f"the jobs form a cycle: {' -> '.join(cycle)}", first)
    memory_reqs = _companion(path, "memory", "memory_reqs", len(names), DEFAULT_MEMORY_MIB)
    parallelisms = _companion(path, "parallelism", "parallelisms", len(names), DEFAULT_PARALLELISM)
    return WorkflowTemplate(
        operations((reader.jobs[name].runtime_s for name in names), single_core_speed, parallelisms),
        memory_reqs,
        parallelisms,
        tuple(edges),
        path.stem,
    )


def _companion(path: Path, suffix: str, key: str, count: int, default: int) -> tuple[int, ...]:
    """Read one number per function from a file beside the DAX, or return the default for all."""
    companion = path.with_suffix(f".{suffix}.json")
    if not companion.exists():
        return (default,) * count
    document = read_json(companion)
    try:
        rows = [(int(row["id"]), int(row["value"])) for row in document[key]]
    except (ValueError, KeyError, TypeError, OverflowError) as error:
        raise WorkflowError(f"expected {{{key!r}: [{{'id': …, 'value': …}}, …]}}", path=companion) from error
    if sorted(fn_id for fn_id, _ in rows) != list(range(count)):
        raise WorkflowError(f"expected the ids 0 to {count - 1} of {path.name}, each once", path=companion)
    values = dict(rows)
    if max(values.values()) > MAX_VALUE:
        raise WorkflowError(f"a value is above {MAX_VALUE:,}", path=companion)
    return tuple(values[fn_id] for fn_id in range(count))
