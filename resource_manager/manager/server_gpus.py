"""GPUs of a server in the inventory replaced by a new list, with what is known of them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from resource_manager.core.changes import Change, GpuClosed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.inventory import inventory_changed
from resource_manager.core.models import Gpu, Node
from resource_manager.core.names import name_of
from resource_manager.core.node_state import NodeState
from resource_manager.core.search import newcomer
from resource_manager.errors import InvalidRequestError, ServerInUseError, UnknownNodeError
from resource_manager.manager.wording import bounded, gpus_in_words


def adoption(cluster: ClusterState, name: str, gpus: Sequence[Gpu], now: float) -> list[Change]:
    """Return the changes that replace a server's GPUs by these.

    Raises `UnknownNodeError` for a server that left the inventory, `ServerInUseError` while it has leases,
    and `InvalidRequestError` for a number or UUID that is there twice, also on another server.
    """
    state = cluster.node(name)
    if state.retired:
        raise UnknownNodeError(name, cluster.by_name)
    if state.leases:
        raise ServerInUseError(name, list(map(name_of, state.leases.values())))
    others = {
        gpu.uuid for other in cluster.nodes if other is not state for gpu in other.node.gpus if gpu.uuid
    }
    uuids = [gpu.uuid for gpu in gpus if gpu.uuid]
    for noun, values in (("GPU number", [gpu.gpu_id for gpu in gpus]), ("UUID", uuids)):
        if repeated := [value for value, count in Counter(values).items() if count > 1]:
            raise InvalidRequestError("{gpus}: {} {} is there twice", noun, repeated[0])
    if taken := others.intersection(uuids):
        raise InvalidRequestError("{gpus}: {} belongs to another server of the inventory", min(taken))
    nodes = (
        replace(node, gpus=tuple(gpus), islands=_islands(state, gpus)) if node is state.node else node
        for node in cluster.inventory
    )
    line = f"~ server {name}, {gpus_in_words(gpus)} adopted"
    return replacement(cluster, tuple(nodes), now, [line], adopted=name)


def _islands(state: NodeState, gpus: Sequence[Gpu]) -> tuple[tuple[int, ...], ...]:
    """Return the server's islands by the numbers that their GPUs have now, without those that are gone."""
    now_at = {gpu.uuid: gpu.gpu_id for gpu in gpus}
    places = {gpu.gpu_id: gpu.gpu_id for gpu in gpus}
    if state.gpu_uuids:
        places = {gpu_id: now_at[uuid] for gpu_id, uuid in state.gpu_uuids.items() if uuid in now_at}
    islands = (sorted(places[each] for each in island if each in places) for island in state.node.islands)
    return tuple(tuple(island) for island in islands if island)


def replacement(
    cluster: ClusterState, nodes: tuple[Node, ...], now: float, lines: Sequence[str], *, adopted: str = ""
) -> list[Change]:
    """Return the change of the inventory, closures of new servers that must be searched first, and of GPUs.

    The closures of GPUs follow them to another server, number or UUID. `lines` describe the difference.
    """
    changed = inventory_changed(cluster.inventory, nodes, now)
    return [
        replace(changed, adopted=adopted, lines=bounded(lines)),
        *(
            closure
            for node in nodes
            if node.name not in cluster.by_name
            and (closure := newcomer(node.name, now, cluster.absent_drained)) is not None
        ),
        *_closures(cluster, nodes, now),
    ]


def _closures(cluster: ClusterState, nodes: Sequence[Node], now: float) -> Iterator[GpuClosed]:
    """Yield the closures of GPUs whose server, number or UUID changes, at their new place.

    A GPU is recognised by its UUID, or by its place where it had or has none.
    """
    inventory = [state for state in cluster.nodes if not state.retired]
    present_uuids = {uuid for state in inventory for uuid in state.gpu_uuids.values()}
    retired = (state for state in cluster.nodes if state.retired)
    of_absent = (*cluster.absent_closed_gpus.values(), *_closed_on(retired))
    # a GPU that is in the inventory has a state of its own
    closures = [closed for closed in of_absent if closed.uuid not in present_uuids]
    closures += _closed_on(inventory)
    after = {gpu.uuid for node in nodes for gpu in node.gpus if gpu.uuid}
    by_uuid = {closed.uuid: closed for closed in closures if closed.uuid}
    by_place = {(closed.node, closed.gpu_id): closed for closed in closures if closed.uuid not in after}
    for node in nodes:
        for gpu in node.gpus:
            closed = by_uuid.get(gpu.uuid) or by_place.get((node.name, gpu.gpu_id))
            if closed is None or (closed.uuid and gpu.uuid and closed.uuid != gpu.uuid):
                continue
            if (closed.node, closed.gpu_id, closed.uuid) != (node.name, gpu.gpu_id, gpu.uuid):
                yield replace(closed, node=node.name, gpu_id=gpu.gpu_id, uuid=gpu.uuid, at=now)


def _closed_on(states: Iterable[NodeState]) -> list[GpuClosed]:
    return [closed for state in states for closed in state.closed_gpus.values()]
