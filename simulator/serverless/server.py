"""Server: NUMA nodes with a common cold start, rented by the hour."""

from __future__ import annotations

import math
from collections.abc import Sequence

from simulator.serverless.numa_node import NumaNode

HOUR_S = 3600.0
ROUNDING_S = 1e-6
ROUNDING = 1e-9
"""If a bound is this close to a time, in seconds or relative to it, the exact prediction decides."""


class Server:
    """Server with `hourly_rate` in $, `cold_start_latency` in seconds; rented until `expiration_time`."""

    def __init__(
        self,
        name: str,
        server_id: int,
        hourly_rate: float,
        cold_start_latency: float,
        numa_nodes: Sequence[NumaNode],
    ) -> None:
        self.name = name
        self.server_id = server_id
        self.hourly_rate = hourly_rate
        self.cold_start_latency = cold_start_latency
        self._numa_nodes = tuple(numa_nodes)
        self._rent_until(0.0)

    def __len__(self) -> int:
        return len(self._numa_nodes)

    def __getitem__(self, numa_node_id: int) -> NumaNode:
        return self._numa_nodes[numa_node_id]

    def reset(self) -> None:
        """End the rental and empty the nodes."""
        self._rent_until(0.0)
        for node in self._numa_nodes:
            node.reset()

    def startup_at(self, time: float) -> float:
        """Return the seconds of cold start that a decision at `time` causes: 0 while the server is rented."""
        if time < self.expiration_time:
            return 0.0
        for node in self._numa_nodes:
            node.on_server_startup(time, self.cold_start_latency)
        return self.cold_start_latency

    def renew_lease_at(self, time: float, node: NumaNode) -> float:
        """Extend the rental to the predicted end of the node that changed at `time`; return the dollars.

        Not needed while the node's bound is at most its `covered_until`. The other nodes were covered at
        their own last change, and a rental is never shortened.
        """
        node.tighten_bound()
        bound = node.latest_end_bound
        if bound.latest <= node.covered_until:
            return 0.0
        latest = node.predicted_end()
        bound.replace(latest)
        expiration = self.expiration_time
        if latest <= expiration:
            return 0.0
        start = max(time, expiration)
        hours = math.ceil((latest - start) / HOUR_S)
        self._rent_until(start + hours * HOUR_S)
        return hours * self.hourly_rate

    def _rent_until(self, time: float) -> None:
        self.expiration_time = time
        for node in self._numa_nodes:
            node.covered_until = time - ROUNDING_S - ROUNDING * time

    @property
    def container_count(self) -> int:
        """Count of containers placed on this server that have not ended."""
        return sum(node.container_count for node in self._numa_nodes)

    @property
    def earliest_finished_time(self) -> float:
        """End (s) of the first running container of the server; infinite if none runs."""
        return min(node.cores.earliest_end for node in self._numa_nodes)

    @property
    def earliest_finished_nn_id(self) -> int | None:
        """Id of the NUMA node of the first running container to end; None if none runs."""
        earliest = self.earliest_finished_time
        if earliest == math.inf:
            return None
        return next(node.node_id for node in self._numa_nodes if node.cores.earliest_end == earliest)

    @property
    def latest_finished_time(self) -> float:
        """Predicted end (s) of the last running or scheduled container; -inf if there is none."""
        return max(node.predicted_end() for node in self._numa_nodes)

    @property
    def latest_finished_nn_id(self) -> int | None:
        """Id of the NUMA node of the last container predicted to end; None if there is none."""
        ends = [node.predicted_end() for node in self._numa_nodes]
        return None if max(ends) == -math.inf else self._numa_nodes[ends.index(max(ends))].node_id
