"""Placement policy `data_local`: the server, and on it the NUMA node, with most of the input data."""

from __future__ import annotations

from math import inf

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Placement, Request
from resource_manager.scheduling.placement.policies import Policy
from resource_manager.scheduling.placement.policies.least_loaded import least_loaded
from simulator.serverless.raw_env import RawEnv


def data_local(env: RawEnv) -> Policy:
    """Return the policy for the functions of `env`; it reads there where the current one's inputs are.

    Of the nodes that fit it chooses most input on the server, then most on the node, then fewest leases.
    The server comes first because the network is far slower than the bus of a server.
    """

    server_of = env.cluster.server_of
    spans = [slice(each.start, each.stop) for each in env.cluster.nodes_of]

    def policy(cluster: ClusterState, request: Request) -> Placement | None:
        nodes = cluster.nodes
        on_node: dict[int, int] = {}
        on_server: dict[int, int] = {}
        for position, size in env.data_distribution:
            if size:
                server = server_of[position]
                on_node[position] = on_node.get(position, 0) + size
                on_server[server] = on_server.get(server, 0) + size
        while on_server:
            most = max(on_server.values())
            servers = [server for server, size in on_server.items() if size == most]
            holding = [
                (-size, len(nodes[position].leases), position)
                for position, size in on_node.items()
                if server_of[position] in servers and nodes[position].fits(request)
            ]
            if holding:
                return nodes[min(holding)[-1]].place(request)
            leases = least_loaded.measures(cluster, request)
            fewest, first = min((min(leases[spans[each]]), spans[each].start) for each in servers)
            if fewest != inf:
                return nodes[leases.index(fewest, first)].place(request)
            for server in servers:
                del on_server[server]
        return least_loaded(cluster, request)

    return policy
