"""Static structure of a workflow: its functions, and the bytes on its edges."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from graphlib import CycleError, TopologicalSorter

from simulator.serverless.errors import WorkflowError

Edge = tuple[int, int, int]
"""(parent, child, bytes): indexes of two functions, and the size of the data from parent to child."""

DEFAULT_SINGLE_CORE_SPEED = 1_000_000_000
DEFAULT_MEMORY_MIB = 128
DEFAULT_PARALLELISM = 1


@dataclass(frozen=True, slots=True)
class WorkflowTemplate:
    """Structure of a workflow: operations, required MiB and threads by function, and the edges.

    Raises `WorkflowError` for lists of different length, numbers out of range, an edge to an unknown
    function, a repeated edge or a cycle.
    """

    computations: tuple[int, ...]
    memory_reqs: tuple[int, ...]
    parallelisms: tuple[int, ...]
    edges: tuple[Edge, ...] = ()
    name: str = "workflow"
    predecessors: tuple[tuple[tuple[int, int], ...], ...] = field(init=False, repr=False, compare=False)
    """By function: (parent, bytes) of each parent, in the order of the edges."""
    successors: tuple[tuple[int, ...], ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        count = len(self.computations)
        if not count:
            raise WorkflowError(f"workflow {self.name!r} has no functions")
        if len(self.memory_reqs) != count or len(self.parallelisms) != count:
            raise WorkflowError(
                f"workflow {self.name!r} has {count} computations, {len(self.memory_reqs)} memory "
                f"requirements and {len(self.parallelisms)} parallelisms"
            )
        for what, values, least in (
            ("computation", self.computations, 0),
            ("memory requirement", self.memory_reqs, 1),
            ("parallelism", self.parallelisms, 1),
        ):
            for fn_id, value in enumerate(values):
                if not least <= value < math.inf:
                    raise WorkflowError(
                        f"workflow {self.name!r}: {what} of function {fn_id} is {value}, "
                        f"not a number from {least}"
                    )
        parents: list[list[tuple[int, int]]] = [[] for _ in range(count)]
        children: list[list[int]] = [[] for _ in range(count)]
        for parent, child, size in self.edges:
            self._check_edge(parent, child, size, count)
            parents[child].append((parent, size))
            children[parent].append(child)
        for fn_id, found in enumerate(children):
            if len(set(found)) != len(found):
                twice = next(child for child in found if found.count(child) > 1)
                raise WorkflowError(f"workflow {self.name!r}: the edge {fn_id} -> {twice} is given twice")
        object.__setattr__(self, "predecessors", tuple(map(tuple, parents)))
        object.__setattr__(self, "successors", tuple(map(tuple, children)))
        cycle = find_cycle(self.edges)
        if cycle:
            raise WorkflowError(f"workflow {self.name!r} has a cycle: {' -> '.join(map(str, cycle))}")

    def _check_edge(self, parent: int, child: int, size: int, count: int) -> None:
        for end in (parent, child):
            if not 0 <= end < count:
                raise WorkflowError(
                    f"workflow {self.name!r}: the edge {parent} -> {child} names function {end}, "
                    f"but there are only 0 to {count - 1}"
                )
        if not 0 <= size < math.inf:
            raise WorkflowError(f"workflow {self.name!r}: the edge {parent} -> {child} carries {size} bytes")

    def __len__(self) -> int:
        return len(self.computations)


def operations(runtimes_s: Iterable[float], core_speed: int, parallelisms: Iterable[int]) -> tuple[int, ...]:
    """Return the operations of each function, runtime x speed of a core x threads, rounded."""
    return tuple(
        round(runtime_s * core_speed * parallelism)
        for runtime_s, parallelism in zip(runtimes_s, parallelisms, strict=True)
    )


def find_cycle(edges: Iterable[Edge]) -> list[int]:
    """Return the functions of one cycle, the first repeated at the end; an empty list if there is none."""
    order: TopologicalSorter[int] = TopologicalSorter()
    for parent, child, _ in edges:
        order.add(child, parent)
    try:
        order.prepare()
    except CycleError as error:
        cycle: list[int] = error.args[1]
        return cycle
    return []
