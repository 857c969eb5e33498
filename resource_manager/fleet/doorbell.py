"""Marks of servers, by which held questions of agents learn that other jobs may have to be there.

Thousands of agents ask at once: at each look all of them share one read of the state and one of the store.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.manager.agent_jobs import leases_on
from resource_manager.manager.manager import GPUResourceManager


class Doorbell:
    """Marks of the servers whose agents ask; thread-safe."""

    def __init__(self, manager: GPUResourceManager) -> None:
        self._manager = manager
        self._lock = threading.Lock()
        self._is_followed = False
        self._leases: dict[str, tuple[Lease, ...]] = {}
        self._marks: dict[str, object] = {}
        self._rings: dict[str, str] = {}
        self._bell = ""
        self._looked_at: ClusterState | None = None
        self._version = -1

    def follow(self, on_look: Callable[[Callable[[], None]], None]) -> None:
        """Look whenever this calls what it is given; `mark` then returns what was seen at the last look."""
        self._is_followed = True
        on_look(self.read)

    def mark(self, server: str) -> object:
        """Return what changes when other jobs should be on a server, or somebody rings for its agent."""
        if server not in self._marks:
            with self._lock:
                self._marks[server] = None
                self._rings |= self._manager.stored_jobs.rings([server])
                self._manager.read(lambda cluster, now: self._see(cluster, [server]))
        elif not self._is_followed:
            self.read()
        return self._marks.get(server), self._rings.get(server, "")

    def read(self) -> None:
        """Read the state and the store once for all servers of which somebody asked."""
        jobs = self._manager.stored_jobs
        with self._lock:
            if not self._marks:
                return
            self._manager.read(self._see_all)
            if (bell := jobs.bell) != self._bell:
                self._bell, self._rings = bell, jobs.rings(self._marks)

    def _see_all(self, cluster: ClusterState, now: float) -> None:
        if self._looked_at is not cluster or self._version != cluster.version:
            for server in self._marks.keys() - cluster.by_name.keys():  # names of an autoscaler never end
                del self._marks[server]
                self._leases.pop(server, None)
                self._rings.pop(server, None)
            self._see(cluster, self._marks)
            self._looked_at, self._version = cluster, cluster.version

    def _see(self, cluster: ClusterState, servers: Iterable[str]) -> None:
        has_failures = any(state.closed_gpus for state in cluster.nodes)
        for server in servers:
            leases = tuple(leases_on(cluster, server))
            if has_failures or self._leases.get(server) != leases:  # which compares by identity first
                self._leases[server] = leases
                self._marks[server] = tuple(_mark(cluster, lease) for lease in leases)


def _mark(cluster: ClusterState, lease: Lease) -> object:
    failed = cluster.gpu_failure(lease) is not None
    return lease.fencing_token, bool(lease.places), lease.preempted_by, lease.quarantined, failed
