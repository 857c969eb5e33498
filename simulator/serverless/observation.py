"""Observations: numbers from 0 to 1 about every NUMA node and the function to place."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulator.io.rows import MAX_VALUE
from simulator.serverless.raw_env import RawEnv

NODE_FEATURES = (
    "free_memory",
    "load",
    "waiting",
    "time_to_first_end",
    "time_to_last_end",
    "rent_left",
    "input_on_node",
    "input_on_server",
)
"""Features of a node. Free memory and rent left are fractions (of the node's MiB, of an hour); the inputs
are fractions of the function's input bytes; load is threads per core of running and scheduled containers;
the times are in minutes at the current speeds. Unbounded values are mapped by x / (1 + x)."""

FUNCTION_FEATURES = (
    "memory_required",
    "threads",
    "minutes_on_one_core",
    "predecessors",
    "input_gigabytes",
    "active_workflows",
    "submitted_functions",
    "is_over",
)
"""Features of the function to place, mapped likewise; memory is in units of the largest choice."""

MINUTE_S = 60.0
HOUR_S = 3600.0
GIGABYTE = 1e9

Array = NDArray[np.float32]


def squash(value: float) -> float:
    """Map a value of 0 or more to below 1: x / (1 + x)."""
    return value / (1.0 + value)


class Observer:
    """Observations of an environment; only the rows of NUMA nodes that had an event are recomputed."""

    def __init__(self, env: RawEnv, largest_memory_choice: int) -> None:
        self.env = env
        self.largest_memory_choice = largest_memory_choice
        nodes = env.cluster.nodes
        self.size = len(nodes) * len(NODE_FEATURES) + len(FUNCTION_FEATURES)
        self._server_of = np.array(env.cluster.server_of)
        self._load_features = np.zeros((len(nodes), 3), dtype=np.float32)
        self._ends = np.zeros((len(nodes), 2))
        self._expirations = np.zeros(len(env.cluster.servers))

    def observe(self) -> Array:
        """Return the current observation: the features of each node in order, then those of the function."""
        self._update_changed_rows()
        seen = np.empty(self.size, dtype=np.float32)
        nodes = seen[: -len(FUNCTION_FEATURES)].reshape(len(self._load_features), len(NODE_FEATURES))
        now = self.env.now
        nodes[:, :3] = self._load_features
        # An end is infinite while the share of a thread is rounded down to no operation a second.
        minutes = np.minimum(np.maximum(self._ends - now, 0.0), MAX_VALUE) / MINUTE_S
        nodes[:, 3:5] = minutes / (1.0 + minutes)
        left = np.clip((self._expirations - now) / HOUR_S, 0.0, 1.0)
        nodes[:, 5] = left[self._server_of]
        nodes[:, 6:] = 0.0
        seen[-len(FUNCTION_FEATURES) :] = self._function_features(nodes)
        return seen

    def mark_all_changed(self) -> None:
        """Mark every node as changed."""
        self.env.cluster.changed_nodes.update(self.env.cluster.nodes)

    def _update_changed_rows(self) -> None:
        cluster = self.env.cluster
        for node in cluster.changed_nodes:
            cores, position = node.cores, node.position
            self._load_features[position] = (
                node.free_memory / node.memory,
                squash(node.committed_parallelism / node.cpu),
                squash(len(node.waiting_containers)),
            )
            self._ends[position] = (cores.earliest_end, cores.latest_end) if cores.parallelism else (0.0, 0.0)
            self._expirations[node.server_position] = cluster.servers[node.server_position].expiration_time
        cluster.changed_nodes.clear()

    def _function_features(self, nodes: Array) -> tuple[float, ...]:
        env = self.env
        if env.current_function is None:
            return (0.0,) * (len(FUNCTION_FEATURES) - 1) + (1.0,)
        function = env.function
        inputs = env.data_distribution
        total = sum(size for _, size in inputs)
        if total:
            self._spread_inputs(nodes, inputs, total)
        return (
            squash(function.memory_req / self.largest_memory_choice),
            squash(function.parallelism),
            squash(function.computation / env.cluster.single_core_speed / MINUTE_S),
            squash(len(inputs)),
            squash(total / GIGABYTE),
            squash(env.active_workflow_count),
            squash(env.workload.submitted),
            0.0,
        )

    def _spread_inputs(self, nodes: Array, inputs: list[tuple[int, int]], total: int) -> None:
        by_server: dict[int, float] = {}
        for position, size in inputs:
            nodes[position, 6] += size / total
            server = int(self._server_of[position])
            by_server[server] = by_server.get(server, 0.0) + size / total
        for server, share in by_server.items():
            nodes[self.env.cluster.nodes_of[server], 7] = min(1.0, share)
        # Rounding may raise a sum of fractions above 1, the upper bound of the space.
        np.minimum(nodes[:, 6], 1.0, out=nodes[:, 6])
