"""Placement policy `data_local`: the server, and on it the NUMA node, with most of the input data."""

from __future__ import annotations

from math import inf

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.policies import Policy
from resource_manager.scheduling.policies.least_loaded import least_loaded
from simulator.serverless.raw_env import RawEnv


def data_local(env: RawEnv) -> Policy:
    """Return the policy for the functions of `env`; it reads there where the current one's inputs are.

    Of the nodes that fit it chooses most input on the server, then most on the node, then fewest leases.
    The server comes first because the network is far slower than the bus of a server.
    """

    def policy(cluster: ClusterState, request: Request) -> Placement | None:
        server_of, nodes_of = env.cluster.server_of, env.cluster.nodes_of
        on_node: dict[int, int] = {}
        on_server: dict[int, int] = {}
        for position, size in env.data_distribution:
            if size:
                on_node[position] = on_node.get(position, 0) + size
        for position, size in on_node.items():
            server = server_of[position]
            on_server[server] = on_server.get(server, 0) + size
        leases = least_loaded.measures(cluster, request)
        for most in sorted(set(on_server.values()), reverse=True):
            servers = [server for server, size in on_server.items() if size == most]
            holding = [
                (-size, leases[position], position)
                for position, size in on_node.items()
                if leases[position] != inf and server_of[position] in servers
            ]
            if holding:
                return Placement(cluster.nodes[min(holding)[-1]].name)
            positions = [position for server in sorted(servers) for position in nodes_of[server]]
            fewest = min(positions, key=leases.__getitem__)
            if leases[fewest] != inf:
                return Placement(cluster.nodes[fewest].name)
        return least_loaded(cluster, request)

    return policy
