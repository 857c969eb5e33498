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

    server_of, nodes_of = env.cluster.server_of, env.cluster.nodes_of

    def policy(cluster: ClusterState, request: Request) -> Placement | None:
        on_node: dict[int, int] = {}
        on_server: dict[int, int] = {}
        for position, size in env.data_distribution:
            if size:
                server = server_of[position]
                on_node[position] = on_node.get(position, 0) + size
                on_server[server] = on_server.get(server, 0) + size
        if not on_server:
            return least_loaded(cluster, request)
        leases = least_loaded.measures(cluster, request)
        fitting = [
            (-size, -on_node.get(position, 0), leases[position], position)
            for server, size in on_server.items()
            for position in nodes_of[server]
            if leases[position] != inf
        ]
        return Placement(cluster.nodes[min(fitting)[-1]].name) if fitting else least_loaded(cluster, request)

    return policy
