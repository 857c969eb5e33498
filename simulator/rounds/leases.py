"""Leases of a round-based replay: jobs are granted, preempted and moved on the manager's own state."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from resource_manager.core.changes import Change, new_released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Node, Request
from resource_manager.scheduling.allocator import allocate, grant
from resource_manager.scheduling.placement.gang_slots import could_start
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.rounds.job import Job


def uniform_nodes(servers: int, gpus: int) -> list[Node]:
    """Return that many servers with that many GPUs each."""
    return [
        # Gangs need an address to meet at.
        Node(f"server-{index}", index, {}, tuple(Gpu(gpu_id) for gpu_id in range(gpus)), f"server-{index}")
        for index in range(servers)
    ]


class Leases(Protocol):
    """The leases of running jobs."""

    cluster: ClusterState
    gpus: int
    """GPUs of the servers that take new leases."""

    def could_fit(self, job: Job) -> bool:
        """Return True if the job would fit, were nothing else there."""

    def grant(self, job: Job, gpus: float, now: float) -> bool:
        """Grant so many GPUs, or grant nothing and return False if they are not there."""

    def release(self, job: Job, now: float) -> None:
        """Release all that the job holds."""

    def apply(self, change: Change) -> None:
        """Apply a change of the servers."""


class SpreadLeases:
    """Jobs may spread over servers: a lease for each server, named after job and server."""

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.cluster = ClusterState(nodes)
        self.gpus = open_gpus(self.cluster)
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

    def apply(self, change: Change) -> None:
        self.cluster.apply(change)
        self.gpus = open_gpus(self.cluster)


class RequestLeases:
    """Jobs are requests as the manager knows them: leases on servers chosen by a placement policy."""

    def __init__(self, cluster: ClusterState, policy: Policy, requests: Iterable[Request]) -> None:
        self.cluster = cluster
        self.gpus = open_gpus(cluster)
        self._policy = policy
        self._requests = {request.lease_id: request for request in requests}
        self._fits: dict[object, bool] = {}

    def could_fit(self, job: Job) -> bool:
        request = self._requests[job.name]
        if request.shape not in self._fits:
            self._fits[request.shape] = could_start(self.cluster, request)
        return self._fits[request.shape]

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

    def apply(self, change: Change) -> None:
        self.cluster.apply(change)
        self.gpus = open_gpus(self.cluster)
        self._fits.clear()


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
