"""Data local: the server, and on it the NUMA node, that holds most of the input."""

from __future__ import annotations

from resource_manager.cluster import ClusterState, NodeState
from resource_manager.models import Placement, Request

INPUT_BYTES_LABEL = "input_bytes:"
"""A request's label of this prefix and a node's name says how many bytes of input lie there."""

SERVER_LABEL = "server"
"""A node's label that names the server it is part of."""


def data_local(cluster: ClusterState, request: Request) -> Placement | None:
    """The node with room whose server holds the most input; then most on the node, then fewest leases.

    The server comes first because crossing the network costs far more than crossing a server's bus.
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
