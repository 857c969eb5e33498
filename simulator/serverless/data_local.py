"""Placement policy `data_local`: the server, and on it the NUMA node, with most of the input data."""

from __future__ import annotations

from itertools import chain
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
        leases = least_loaded.measures(cluster, request) if on_server else []
        while on_server:
            most = max(on_server.values())
            servers = [server for server, size in on_server.items() if size == most]
            holding = [
                (-size, leases[position], position)
                for position, size in on_node.items()
                if leases[position] != inf and server_of[position] in servers
            ]
            if holding:
                return cluster.nodes[min(holding)[-1]].place(request)
            positions = map(nodes_of.__getitem__, sorted(servers))
            fewest = min(chain.from_iterable(positions), key=leases.__getitem__)
            if leases[fewest] != inf:
                return cluster.nodes[fewest].place(request)
            for server in servers:
                del on_server[server]
        return least_loaded(cluster, request)

    return policy
