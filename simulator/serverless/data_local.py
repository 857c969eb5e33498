"""Placement policy `data_local`: the server, and on it the NUMA node, with most of the input data."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState, NodeState
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
        nodes = env.cluster.nodes
        on_node: dict[int, int] = {}
        on_server: dict[int, int] = {}
        for position, size in env.data_distribution:
            server = nodes[position].server_position
            on_node[position] = on_node.get(position, 0) + size
            on_server[server] = on_server.get(server, 0) + size

        def worth(state: NodeState) -> tuple[int, int]:
            return on_node.get(state.index, 0), -len(state.leases)

        for most in sorted(filter(None, set(on_server.values())), reverse=True):
            fitting = [
                state
                for server, size in sorted(on_server.items())
                if size == most
                for state in cluster.nodes[env.cluster.nodes_of(server)]
                if state.fits(request)
            ]
            if fitting:
                return Placement(max(fitting, key=worth).name)
        return least_loaded(cluster, request)

    return policy
