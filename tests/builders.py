"""Builders for tests: nodes named by letter, leases, a fake clock, and another cluster for a manager."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, TypeVar

from resource_manager.core.changes import Granted
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Placement, Request
from resource_manager.core.teams import Teams
from resource_manager.manager.cluster_change import ApplyOptions
from resource_manager.manager.cluster_file.sections import ClusterDefinition
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Allocation, QueueEntry, Submission

if TYPE_CHECKING:
    from werkzeug.test import TestResponse

T = TypeVar("T")


class Clock:
    """Fake clock that a test advances by `now`, in seconds; each reading advances it by `step_s`."""

    def __init__(self, step_s: float = 0.0) -> None:
        self.now = 1_000.0
        self.sleeps: list[float] = []
        self._step_s = step_s

    def __call__(self) -> float:
        self.now += self._step_s
        return self.now

    time = monotonic = __call__

    def sleep(self, seconds: float) -> None:
        """Record the pause, and wait for nothing."""
        self.sleeps.append(seconds)
        self.now += seconds


def node(letter: str, gpus: int = 2, cpus: int = 8) -> Node:
    """Return the node of that name; its server id is the position of the letter in the alphabet."""
    return Node(letter, ord(letter) - ord("a"), {"cpus": cpus}, tuple(Gpu(i) for i in range(gpus)))


def nodes(letters: str, gpus: int = 2, cpus: int = 8) -> tuple[Node, ...]:
    return tuple(node(letter, gpus, cpus) for letter in letters)


def hold(
    cluster: ClusterState, request: Request, on: str, *gpu_ids: int, at: float = 0.0, ends: float = math.inf
) -> Lease:
    """Grant the request these GPUs of the node named `on`, and return its lease."""
    lease = Lease(request, (Placement(on, gpu_ids),), cluster.last_fencing_token + 1, at, ends)
    cluster.apply(Granted(lease, at))
    return lease


def present(value: T | None) -> T:
    assert value is not None
    return value


def json_of(response: TestResponse) -> Any:
    return response.json


def granted_lease(status: Submission | None) -> Allocation:
    """Return the lease that was granted at once."""
    assert status is not None
    assert status["state"] != "WAITING", status
    return status


def queue_entry(status: Submission | None) -> QueueEntry:
    """Return the request that waits in the queue."""
    assert status is not None
    assert status["state"] == "WAITING", status
    return status


def redefine(
    manager: GPUResourceManager, *, nodes: Iterable[Node] | None = None, teams: Teams | None = None
) -> None:
    """Give the manager's cluster these servers, whatever leases the others have, or these teams."""
    defined = ClusterDefinition(nodes=None if nodes is None else tuple(nodes), teams=teams)
    retire = tuple(node.name for node in manager.inventory)
    manager.apply(defined, ApplyOptions(retire=retire, force=True))
