"""Leases of a round-based replay: jobs are granted, preempted and moved on the manager's own state."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import NamedTuple

from resource_manager.core.changes import Change, InventoryChanged, new_released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request
from resource_manager.core.team_ledger import TeamLedger
from resource_manager.scheduling.allocator import allocate, blocks_queue, grant
from resource_manager.scheduling.placement.gang_slots import Prospects, could_start
from resource_manager.scheduling.placement.node_masks import positions
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.queue.quotas import StopKind, stop_of
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.openings import first_opening
from simulator.rounds.job import Job

Admits = Callable[[Job], bool]
"""(job) -> whether it may run beside those that were admitted before it."""


def uniform_nodes(servers: int, gpus: int) -> list[Node]:
    """Return that many servers with that many GPUs each."""
    return [
        # Gangs need an address to meet at.
        Node(f"server-{index}", index, {}, tuple(Gpu(gpu_id) for gpu_id in range(gpus)), f"server-{index}")
        for index in range(servers)
    ]


class Size(NamedTuple):
    """The inventory from a time on, in seconds: thousandths of GPUs, and servers."""

    at: float
    gpu_milli: int
    servers: int


class Leases(ABC):
    """The leases of running jobs.

    `gpus` are those of the servers that take new leases, `nodes` all servers that ever existed, a changed one
    again, and `sizes` the inventory over time.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self.cluster = cluster
        self.gpus = open_gpus(cluster)
        self.nodes = [state.node for state in cluster.nodes]
        self.sizes = [_size_of(cluster, -math.inf)]

    @abstractmethod
    def could_fit(self, job: Job) -> bool:
        """Return True if the job would fit, were nothing else there."""

    @abstractmethod
    def grant(self, job: Job, gpus: float, now: float) -> bool:
        """Grant so many GPUs, or grant nothing and return False if they are not there."""

    @abstractmethod
    def release(self, job: Job, now: float) -> None:
        """Release all that the job holds."""

    def admission(self, now: float) -> Admits:
        """Return what says, of one job of the next round after the other, whether rules let it run."""
        return lambda job: True

    def opens_at(self, jobs: Iterable[Job], now: float) -> float:
        """Return when maintenance windows first let one of the jobs start, none of which runs, else now."""
        return now

    def apply(self, change: Change, now: float) -> None:
        """Apply a change of the servers, unless it is of one that is not there."""
        node = getattr(change, "node", None)
        if node is not None and node not in self.cluster.by_name:
            return
        self.cluster.apply(change)
        if isinstance(change, InventoryChanged):
            self.nodes += change.nodes
            self.sizes.append(_size_of(self.cluster, now))
        self.gpus = open_gpus(self.cluster)


class SpreadLeases(Leases):
    """Jobs may spread over servers: a lease for each server, named after job and server."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        super().__init__(ClusterState(nodes))
        self._parts: dict[Job, list[str]] = {}

    def could_fit(self, job: Job) -> bool:
        return job.gpus <= self.gpus

    def grant(self, job: Job, gpus: float, now: float) -> bool:
        """Grant all that are needed of the server with the most free GPUs, then of the next.

        The first server in order goes first among equals.
        """
        cluster, servers = self.cluster, list[str]()
        parts = self._parts[job] = list[str]()
        while len(servers) < gpus:
            state = max(cluster.nodes, key=lambda state: state.whole_free)
            if not state.whole_free:
                self.release(job, now)
                return False
            request = Request(f"{job.name}/{state.name}", min(state.whole_free, int(gpus) - len(servers)))
            cluster.apply(grant(cluster, request, (state.place(request),), now))
            parts.append(request.lease_id)
            servers += [state.name] * request.gpus
        job.servers, job.allocated = tuple(servers), gpus
        return True

    def release(self, job: Job, now: float) -> None:
        for lease_id in self._parts.pop(job):
            release(self.cluster, lease_id, now)
        job.servers, job.allocated = (), 0


class RequestLeases(Leases):
    """Jobs are requests as the manager knows them: leases on servers chosen by a placement policy."""

    def __init__(self, cluster: ClusterState, policy: Policy, requests: Iterable[Request]) -> None:
        super().__init__(cluster)
        self._policy = policy
        self._requests = {request.lease_id: request for request in requests}
        self._fits: dict[object, bool] = {}

    def could_fit(self, job: Job) -> bool:
        request = self._requests[job.name]
        if request.shape not in self._fits:
            self._fits[request.shape] = could_start(self.cluster, request)
        return self._fits[request.shape]

    def admission(self, now: float) -> Admits:
        """Return what says whether quotas and maintenance windows let a job run, as in the manager.

        A limit holds in every round; a limit of runtimes and a window keep a job only from starting.
        """
        cluster, current = self.cluster, SchedulingPass(self._policy, fifo, now)
        ledger = cluster.ledger and TeamLedger(cluster.ledger.rules, (), cluster.by_name)

        def admits(job: Job) -> bool:
            request = self._requests[job.name]
            if not job.servers and not blocks_queue(cluster, request, current):
                return False
            if ledger is None:
                return True
            stop = stop_of(ledger, request)
            if stop is not None and not (job.servers and stop.kind is StopKind.RUNTIME):
                return False
            ledger.add(cluster.leases.get(job.name) or _likely(cluster, request, now), cluster.by_name)
            return True

        return admits

    def opens_at(self, jobs: Iterable[Job], now: float) -> float:
        cluster = self.cluster
        if not cluster.windows:
            return now
        ledger = cluster.ledger and TeamLedger(cluster.ledger.rules, (), cluster.by_name)
        requests = (self._requests[job.name] for job in jobs)
        able = (request for request in requests if ledger is None or stop_of(ledger, request) is None)
        at = first_opening(cluster, able, now)
        return at if at < math.inf else now

    def grant(self, job: Job, gpus: float, now: float) -> bool:
        request = self._requests[job.name]
        for change in (changes := allocate(self.cluster, request, SchedulingPass(self._policy, fifo, now))):
            self.cluster.apply(change)
        if changes:
            nodes = [member.node for member in self.cluster.leases[job.name].members]
            job.servers = tuple(node for node in nodes for _ in range(max(request.gpus, 1)))
            job.allocated = gpus
        return bool(changes)

    def release(self, job: Job, now: float) -> None:
        release(self.cluster, job.name, now)
        job.servers, job.allocated = (), 0
        if len(self.cluster.nodes) != self.sizes[-1].servers:  # it was the last of a server that is gone
            self.sizes.append(_size_of(self.cluster, now))

    def apply(self, change: Change, now: float) -> None:
        super().apply(change, now)
        self._fits.clear()


def _size_of(cluster: ClusterState, at: float) -> Size:
    states = cluster.nodes
    return Size(at, MILLI_PER_GPU * sum(len(state.gpu_free) for state in states), len(states))


def _likely(cluster: ClusterState, request: Request, now: float) -> Lease:
    """Return a lease as the request may get it, on the first server that takes it when it is empty."""
    first = cluster.nodes[next(positions(Prospects.of(cluster).usable(request)))]
    return Lease(request, (Placement(first.name, tuple(range(request.gpus))),) * request.nodes, 0, now)


def gpus_of(request: Request) -> float:
    """Return the GPUs of all members of a request, a fraction of one for a GPU fraction."""
    whole = request.gpu_milli == MILLI_PER_GPU
    return request.nodes * (request.gpus if whole else request.gpu_milli / MILLI_PER_GPU)


def open_gpus(cluster: ClusterState) -> int:
    """Return the GPUs of the servers that take new leases."""
    return sum(len(state.gpu_free) - len(state.closed_gpus) for state in cluster.nodes if state.is_open)


def release(cluster: ClusterState, lease_id: str, now: float) -> None:
    """Release a lease."""
    cluster.apply(new_released(lease_id, cluster.leases[lease_id].fencing_token, now))
