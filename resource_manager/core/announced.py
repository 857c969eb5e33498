"""Announced demands by lease id: under which ids a request is announced, and their order along the DAG."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from graphlib import CycleError, TopologicalSorter

from resource_manager.core.changes import Announced
from resource_manager.core.runtimes import job_id_of

MAX_ANNOUNCED = 500
"""Maximum of announced demands; more are not kept."""

MAX_OF_RUN = 100
"""Maximum of announced demands of a DAG run; mapped tasks count as one."""

MAX_AFTER = 50
"""Maximum of tasks after which an announced one comes."""

MAX_AFTER_BYTES = 16 * 1024
"""Maximum of their ids together."""

ANNOUNCED_FOR_S = 7 * 86_400.0
"""Time after which a demand that is still announced is taken to be forgotten."""


def names_announced(lease_id: str) -> tuple[str, str]:
    """Return the ids under which its request may be announced: that of a mapped task ends before `/3`."""
    name = job_id_of(lease_id)
    return name, name.rpartition("/")[0]


def run_of(lease_id: str) -> str:
    """Return what the lease ids of all tasks of a DAG run begin with."""
    return lease_id.rpartition("/")[0]


def along_the_dag(announced: Mapping[str, Announced]) -> Iterator[Announced]:
    """Yield what is announced, each after the announced demands that it comes after; nothing of a cycle."""
    sorter = TopologicalSorter(
        {each.lease_id: [name for name in each.after if name in announced] for each in announced.values()}
    )
    with suppress(CycleError):  # it then gives what no cycle comes before
        sorter.prepare()
    while ready := sorter.get_ready():
        yield from (announced[lease_id] for lease_id in ready)
        sorter.done(*ready)
