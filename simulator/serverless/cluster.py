"""The cluster: servers of several types, and the order of their events."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from resource_manager.core.models import Node
from simulator.engine import EventQueue
from simulator.serverless.config import ClusterConfig
from simulator.serverless.container import Container
from simulator.serverless.errors import ActionError
from simulator.serverless.numa_node import NumaNode
from simulator.serverless.server import Server
from simulator.serverless.workflow import Function


class Location(NamedTuple):
    """A NUMA node by name: server type, server of that type, node of that server."""

    server_name: str
    server_id: int
    numa_node_id: int


NodeEvent = Container | NumaNode
"""The container is created, or the first of the node ends; the latter no longer holds if that end moved."""

Events = EventQueue[NodeEvent | Function]
"""Events to come of an episode: those of the nodes, and the submissions of functions."""

Outcome = tuple[Container | None, float]
"""What an event did: the container that ended, if any, and the rent in dollars."""


class Cluster:
    """NUMA nodes by `Location`, in the order of the configuration.

    At equal times ends come before starts, and nodes in their order: with n nodes, these have the priorities
    from 0 and from n on.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.memory_bandwidth = config.memory_bandwidth
        self.numa_bandwidth = config.numa_bandwidth
        self.network_bandwidth = config.network_bandwidth
        self.single_core_speed = config.single_core_speed
        self.locations: list[Location] = []
        self.servers: list[Server] = []
        self._servers: dict[str, tuple[Server, ...]] = {}
        self.nodes: list[NumaNode] = []
        for server in config.servers:
            start = len(self.servers)
            for server_id in range(server.count):
                locations = [Location(server.name, server_id, i) for i in range(server.numa_nodes.count)]
                nodes = [
                    NumaNode(
                        location.numa_node_id,
                        server.numa_nodes.cpu,
                        server.numa_nodes.memory,
                        config.single_core_speed,
                        name=node_name(location),
                        position=len(self.nodes) + location.numa_node_id,
                        server_position=len(self.servers),
                    )
                    for location in locations
                ]
                self.locations += locations
                self.nodes += nodes
                self.servers.append(
                    Server(server.name, server_id, server.hourly_rate, server.cold_start_latency, nodes)
                )
            self._servers[server.name] = tuple(self.servers[start:])
        self.positions = {location: position for position, location in enumerate(self.locations)}
        self.server_of = [node.server_position for node in self.nodes]
        """Positions of the servers, by position of the NUMA node."""
        self.nodes_of = [range(nodes[0].position, nodes[-1].position + 1) for nodes in self.servers]
        """Positions of the NUMA nodes, by position of the server."""
        self.reset(EventQueue())
        self.changed_nodes: set[NumaNode] = set()
        """The nodes that had an event; the reader clears the set."""

    def inventory(self) -> list[Node]:
        """Return the NUMA nodes as nodes of the resource manager."""
        return [
            Node(node.name, node.position, {"cpus": node.cpu, "memory_mib": node.memory})
            for node in self.nodes
        ]

    def reset(self, events: Events) -> None:
        """Empty every node and end every rental; later events go to that queue."""
        for server in self.servers:
            server.reset()
        self._events = events

    def __getitem__(self, server_name: str) -> tuple[Server, ...]:
        return self._servers[server_name]

    def position(self, server_name: str, server_id: int, numa_node_id: int) -> int:
        """Return the index of a NUMA node in `nodes`; raise `ActionError` that names the wrong part."""
        found = self.positions.get(Location(server_name, server_id, numa_node_id))
        if found is not None:
            return found
        if server_name not in self._servers:
            raise ActionError(f"no server type {server_name!r}; known are {', '.join(self._servers)}")
        servers = self._servers[server_name]
        if not 0 <= server_id < len(servers):
            raise ActionError(f"no server {server_id} of type {server_name}: there are {len(servers)}")
        raise ActionError(
            f"no NUMA node {numa_node_id} on {server_name}/{server_id}: there are {len(servers[server_id])}"
        )

    def data_transfer_time(self, inputs: Iterable[tuple[int, int]], target: int) -> float:
        """Return the seconds to transfer the inputs (position, bytes), one after another, to a NUMA node."""
        server_of = self.server_of
        server = server_of[target]
        seconds = 0.0
        for source, size in inputs:
            if source == target:
                seconds += size / self.memory_bandwidth
            elif server_of[source] == server:
                seconds += size / self.numa_bandwidth
            else:
                seconds += size / self.network_bandwidth
        return seconds

    def on_container_creation(self, position: int, container: Container) -> float:
        """Send a container to a node; return the rent ($)."""
        node = self.nodes[position]
        time = container.function.submission_time
        node.on_container_creation(container)
        # All earlier events are processed: a container that need not wait starts without a further event.
        if container.creation_time <= time:
            return self._start(node, container, time)
        self._events.schedule(container.creation_time, container, len(self.nodes) + position)
        return self._rent(node, time)

    def process(self, event: NodeEvent) -> Outcome | None:
        """Process an event of the queue at its time; None if it no longer holds."""
        time = self._events.now
        if isinstance(event, Container):
            return None, self._start(self.nodes[event.function.position], event, time)
        if event.cores.earliest_end != time:
            return None
        ended = event.on_container_completion()
        self._events.schedule(event.cores.earliest_end, event, event.position)
        return ended, self._rent(event, time)

    def _start(self, node: NumaNode, container: Container, time: float) -> float:
        before = node.cores.earliest_end
        node.start(container)
        end = node.cores.earliest_end
        if end != before:
            self._events.schedule(end, node, node.position)
        return self._rent(node, time)

    @property
    def earliest_finished_time(self) -> float:
        """End (s) of the first running container of the cluster; infinite if none runs."""
        return min(server.earliest_finished_time for server in self.servers)

    @property
    def latest_finished_time(self) -> float:
        """Predicted end (s) of the last running or scheduled container; -inf if there is none."""
        return max(server.latest_finished_time for server in self.servers)

    def _rent(self, node: NumaNode, time: float) -> float:
        """Return the dollars for the hours to add after the change of the node at `time`, mostly 0."""
        self.changed_nodes.add(node)
        if node.latest_end_bound.latest <= node.covered_until:
            return 0.0
        return self.servers[node.server_position].renew_lease_at(time, node)


def node_name(location: Location) -> str:
    """Return the name of the NUMA node in the resource manager."""
    return f"{location.server_name}/{location.server_id}/{location.numa_node_id}"
