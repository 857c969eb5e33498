"""The cluster: servers of several types, the memory leases on them, and the order of their events."""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from resource_manager.cluster import ClusterState
from resource_manager.models import Node
from simulator.serverless.config import ClusterConfig
from simulator.serverless.container import Container
from simulator.serverless.errors import ActionError
from simulator.serverless.numa_node import NumaNode
from simulator.serverless.server import Server


class Location(NamedTuple):
    """A NUMA node by name: server type, server of that type, node of that server."""

    server_name: str
    server_id: int
    numa_node_id: int


Happened = tuple[float, Container | None, list[Container], float]
"""One event of the cluster: seconds, who ended, who started, and the rent it cost in dollars."""


class Cluster:
    """NUMA nodes by `Location`, in the order of the configuration, over one `ClusterState`.

    Events happen in order of time; at one time ends come before starts, and nodes in their order.
    """

    def __init__(self, config: ClusterConfig) -> None:
        self.config = config
        self.memory_bandwidth = config.memory_bandwidth
        self.numa_bandwidth = config.numa_bandwidth
        self.network_bandwidth = config.network_bandwidth
        self.single_core_speed = config.single_core_speed
        self.locations: list[Location] = []
        for server in config.servers:
            for server_id in range(server.count):
                for numa_node_id in range(server.numa_nodes.count):
                    self.locations.append(Location(server.name, server_id, numa_node_id))
        self.positions = {location: position for position, location in enumerate(self.locations)}
        self.state = ClusterState(self.inventory())
        self.servers: list[Server] = []
        self._servers: dict[str, tuple[Server, ...]] = {}
        self.nodes: list[NumaNode] = []
        for server in config.servers:
            start = len(self.servers)
            for server_id in range(server.count):
                nodes = [
                    NumaNode(
                        numa_node_id,
                        server.numa_nodes.cpu,
                        server.numa_nodes.memory,
                        config.single_core_speed,
                        state=self.state,
                        name=node_name(Location(server.name, server_id, numa_node_id)),
                        position=len(self.nodes) + numa_node_id,
                        server_position=len(self.servers),
                    )
                    for numa_node_id in range(server.numa_nodes.count)
                ]
                self.nodes += nodes
                self.servers.append(
                    Server(server.name, server_id, server.hourly_rate, server.cold_start_latency, nodes)
                )
            self._servers[server.name] = tuple(self.servers[start:])
        self._events: list[tuple[float, bool, int, int]] = []
        self.touched: set[int] = set()
        """Positions of the nodes on which something happened; who follows them clears it."""

    def inventory(self) -> list[Node]:
        """The NUMA nodes as nodes of the resource manager, labelled with their server."""
        shapes = {server.name: server.numa_nodes for server in self.config.servers}
        return [
            Node(
                node_name(location),
                position,
                {
                    "cpus": shapes[location.server_name].cpu,
                    "memory_mib": shapes[location.server_name].memory,
                },
                labels={"server": f"{location.server_name}/{location.server_id}"},
            )
            for position, location in enumerate(self.locations)
        ]

    def reset(self) -> None:
        """Empties every node and ends every rent."""
        self.state = ClusterState(self.inventory())
        for node in self.nodes:
            node.reset(self.state)
        for server in self.servers:
            server.reset()
        self._events = []

    def __len__(self) -> int:
        return len(self._servers)

    def __contains__(self, server_name: str) -> bool:
        return server_name in self._servers

    def __getitem__(self, server_name: str) -> tuple[Server, ...]:
        return self._servers[server_name]

    def __iter__(self) -> Iterator[Server]:
        return iter(self.servers)

    def position(self, server_name: str, server_id: int, numa_node_id: int) -> int:
        """The place of a NUMA node in `nodes`; raises `ActionError` that says which part is wrong."""
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

    def nodes_of(self, server_position: int) -> slice:
        """The positions of a server's NUMA nodes."""
        first = self.servers[server_position][0].position
        return slice(first, first + len(self.servers[server_position]))

    def data_transfer_time(self, inputs: Iterable[tuple[int, int]], target: int) -> float:
        """Seconds to bring what lies at each (position, bytes) to a NUMA node, one after the other."""
        nodes = self.nodes
        server = nodes[target].server_position
        seconds = 0.0
        for source, size in inputs:
            if source == target:
                seconds += size / self.memory_bandwidth
            elif nodes[source].server_position == server:
                seconds += size / self.numa_bandwidth
            else:
                seconds += size / self.network_bandwidth
        return seconds

    def start_server(self, position: int, time: float) -> float:
        """Seconds of cold start of the node's server, which is started where its rent is over."""
        return self.servers[self.nodes[position].server_position].startup_at(time)

    def on_container_creation(self, position: int, container: Container) -> tuple[float, Container | None]:
        """Sends a container to a node; returns the rent and the container where it starts at once."""
        node = self.nodes[position]
        time = container.submission_time
        node.on_container_creation(container)
        # Everything before has happened: a container that needs no wait can start without a further event.
        started = node.start_next() if container.creation_time <= time else None
        following, is_start = node.next_event()
        heapq.heappush(self._events, (following, is_start, position, node.version))
        return self._rent(time, node), started

    def advance(self, until: float = math.inf) -> Happened | None:
        """Lets the next event up to and including `until` happen; None where there is no such event."""
        events = self._events
        while events:
            time, is_start, position, version = events[0]
            node = self.nodes[position]
            if node.version != version:  # something else has happened on the node since
                heapq.heappop(events)
                continue
            if time > until or time == math.inf:
                return None
            ended: Container | None = None
            if is_start:
                begun = node.start_next()
                started = [begun] if begun is not None else []
            else:
                ended, started = node.on_container_completion()
            rent = self._rent(time, node)
            following, is_start = node.next_event()
            if following == math.inf:
                heapq.heappop(events)
            else:  # nothing has come before the event meanwhile, so it is still the first
                heapq.heapreplace(events, (following, is_start, position, node.version))
            return time, ended, started, rent
        return None

    @property
    def earliest_finished_time(self) -> float:
        """When the first running container of the cluster ends; infinite where none runs."""
        return min(server.earliest_finished_time for server in self.servers)

    @property
    def latest_finished_time(self) -> float:
        """When the last running or scheduled container is predicted to end; -inf where there is none."""
        return max(server.latest_finished_time for server in self.servers)

    def _rent(self, time: float, node: NumaNode) -> float:
        """Dollars for the hours that what changed on the node at `time` needs, mostly none."""
        self.touched.add(node.position)
        server = self.servers[node.server_position]
        return 0.0 if node.ends_by(server.expiration_time) else server.renew_lease_at(time, node)


def node_name(location: Location) -> str:
    """The NUMA node's name in the resource manager."""
    return f"{location.server_name}/{location.server_id}/{location.numa_node_id}"
