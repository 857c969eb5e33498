"""Placement policy `data_local`: the server, and on it the NUMA node, with most of the input data."""

from __future__ import annotations

from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.models import Placement, Request

INPUT_BYTES_LABEL = "input_bytes:"
"""Prefix of a request's label; the rest is a node's name, the value the input bytes on that node."""

SERVER_LABEL = "server"
"""Label of a node that names its server."""


def data_local(cluster: ClusterState, request: Request) -> Placement | None:
    """Choose a node that fits: most input on its server, then most on the node, then fewest leases.

    The server comes first because the network is far slower than the bus of a server.
    """
    by_node = {
        label.removeprefix(INPUT_BYTES_LABEL): int(value)
        for label, value in request.labels.items()
        if label.startswith(INPUT_BYTES_LABEL)
    }
    by_server: dict[str, int] = {}
    for name, size in by_node.items():
        state = cluster.by_name.get(name)
        server = "" if state is None else state.node.labels.get(SERVER_LABEL, "")
        by_server[server] = by_server.get(server, 0) + size

    def worth(state: NodeState) -> tuple[int, int, int]:
        server = state.node.labels.get(SERVER_LABEL)
        on_server = by_server.get(server, 0) if server else 0
        return on_server, by_node.get(state.name, 0), -len(state.leases)

    best = max(cluster.candidates(request), key=worth, default=None)
    return None if best is None else Placement(best.name, best.pick_gpus(request))
