"""How many members of a gang nodes can take, now or ever."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import FreeCapacity, fits, is_short, of_islands, total_capacity, usable_gpus
from resource_manager.core.models import MILLI_PER_GPU, Amount, Node, Request, Spread
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.node_masks import (
    MAX_KEPT,
    allowed_for,
    areas_of,
    mask_of,
    of_inventory,
    positions,
    union,
)

SlotsOf = Callable[[NodeState], int]
"""(node) -> the number of members that it can take."""


def slots(node: Node, request: Request, free: FreeCapacity) -> int:
    """Return how many members of the request the node takes with that free capacity."""
    if not fits(node, request, free):
        return 0
    if request.spread is Spread.SERVERS:
        return 1
    most = request.nodes
    if request.gpus:
        usable, milli = usable_gpus(node, request, free.gpus), request.gpu_milli
        if request.is_linked:
            found = sum(len(group) // request.gpus for group in of_islands(usable, node.islands))
        elif milli == MILLI_PER_GPU:
            found = len(usable) // request.gpus
        else:
            found = sum(free.gpus[gpu_id] // milli for gpu_id in usable)
        most = min(most, found)
    for name, amount in request.resources.items():
        most = _times(free.amounts.get(name, 0), amount, most)
    return most


def slots_now(state: NodeState, request: Request) -> int:
    """Return how many members of the request the node takes now."""
    one = state.fits(request)
    return slots(state.node, request, state.capacity) if one and request.spread is Spread.PACK else one


def _times(free: Amount, amount: Amount, most: int) -> int:
    """Return how often the amount can be taken, subtracted one by one as grants do; at most `most`."""
    count = 0
    while count < most and not is_short(free, amount):
        free -= amount
        count += 1
    return count


def could_ever_take(cluster: ClusterState, request: Request, without: Collection[str] = ()) -> bool:
    """Return True if the inventory could take all members of the request when it is empty.

    `without` are names of nodes that do not count.
    """

    def takes() -> bool:
        gone = mask_of([cluster.by_name[name].index for name in without if name in cluster.by_name])
        return any(takes_ever(cluster, request, area & ~gone) for area in areas_of(cluster, request).values())

    return of_inventory(cluster, ("ever", request.shape, *without), takes)


def takes_ever(cluster: ClusterState, request: Request, area: int) -> bool:
    """Return True if the nodes of the mask take all members when they are empty."""
    return ever_slots(cluster, request, area, request.nodes) >= request.nodes


def ever_slots(cluster: ClusterState, request: Request, area: int, enough: int | None = None) -> int:
    """Return how many members the nodes of the mask take when they are empty; it stops at `enough`."""

    def slots_of(state: NodeState) -> int:
        return slots(state.node, request, total_capacity(state.node))

    return count_slots(cluster, area & allowed_for(cluster, request), slots_of, enough)


def could_ever_mask(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes that could take a member when they are empty."""
    return union(mask for _, mask in _by_slots(cluster, request)) & allowed_for(cluster, request)


class Prospects:
    """Answers where pending requests could start once all leases had ended, while no server opens or closes.

    Nodes of one kind are counted together, since a pass over the queue asks for every request.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._usable: dict[tuple[object, ...], int] = {}
        self._partly_closed = mask_of([state.index for state in cluster.nodes if state.closed_gpus])
        self._known = (cluster.mark, cluster.open_mask, cluster.largest)
        """Mark, open nodes and inventory that the answers are of."""

    @classmethod
    def of(cls, cluster: ClusterState) -> Prospects:
        """Return those of the cluster, which are kept until its inventory or what is closed of it changes."""
        found: Prospects | None = cluster.policy_cache.get(cls)
        if found is None or not found._is_current():
            found = cluster.policy_cache[cls] = cls(cluster)
        return found

    def _is_current(self) -> bool:
        cluster, (mark, open_mask, inventory) = self._cluster, self._known
        changed = cluster.changed_since(mark)
        if changed is None or open_mask != cluster.open_mask or inventory is not cluster.largest:
            return False
        self._known = cluster.mark, open_mask, inventory
        return len(self._usable) <= MAX_KEPT and not any(
            cluster.nodes[position].closed_gpus or self._partly_closed >> position & 1 for position in changed
        )

    def usable(self, request: Request) -> int:
        """Return the mask of the open nodes that could take members of the request, if they take all."""
        mask = self._usable.get(request.shape)
        if mask is None:
            mask = self._usable[request.shape] = self.usable_of(request, -1)
        return mask

    def usable_of(self, request: Request, nodes: int) -> int:
        """Return the mask of those of these nodes that are open and could take members, if they take all."""
        found = [(count, each & nodes) for count, each in self.slots(request)]
        return union(
            each & area
            for area in areas_of(self._cluster, request).values()
            if members_on(area, found) >= request.nodes
            for _, each in found
        )

    def slots(self, request: Request) -> Iterator[tuple[int, int]]:
        """Yield how many members open nodes take without leases, and which nodes do."""
        allowed = self._cluster.open_mask & allowed_for(self._cluster, request)
        for count, mask in _by_slots(self._cluster, request):
            yield count, mask & allowed & ~self._partly_closed
        for position in positions(allowed & self._partly_closed):
            state = self._cluster.nodes[position]
            if count := slots(state.node, request, state.capacity_without_leases):
                yield count, 1 << position


def members_on(nodes: int, slots: Iterable[tuple[int, int]]) -> int:
    """Return how many members these nodes take, of nodes by how many each takes."""
    return sum(count * (each & nodes).bit_count() for count, each in slots)


def could_start(cluster: ClusterState, request: Request) -> bool:
    """Return True if the open nodes could take all members of the request once all leases had ended."""
    return bool(Prospects.of(cluster).usable(request))


def _by_slots(cluster: ClusterState, request: Request) -> list[tuple[int, int]]:
    """Return how many members nodes take when they are empty and accept the labels, and which nodes do."""
    demand = request.shape[:7]  # all but the server and the labels
    key = (*demand, request.spread, request.nodes if request.spread is Spread.PACK else 0)

    def count() -> list[tuple[int, int]]:
        member = replace(request, labels_required={}, required_node=None)
        found: dict[int, int] = {}
        for state, mask in _kinds(cluster):
            if number := slots(state.node, member, total_capacity(state.node)):
                found[number] = found.get(number, 0) | mask
        return list(found.items())

    return of_inventory(cluster, ("slots", key), count)


def _kinds(cluster: ClusterState) -> list[tuple[NodeState, int]]:
    """Return one node of each kind with the mask of all of them: equal but for name, address and labels."""

    def group() -> list[tuple[NodeState, int]]:
        found: dict[object, list[int]] = {}
        for state in cluster.nodes:
            node = state.node
            gpus = tuple(
                (gpu.gpu_id, gpu.gpu_type, gpu.vendor, gpu.memory_mib, gpu.is_mig) for gpu in node.gpus
            )
            key = (tuple(sorted(node.resources.items())), gpus, node.islands, node.vendor)
            found.setdefault(key, []).append(state.index)
        return [(cluster.nodes[indexes[0]], mask_of(indexes)) for indexes in found.values()]

    return of_inventory(cluster, "kinds", group)


def count_slots(cluster: ClusterState, mask: int, slots_of: SlotsOf, enough: int | None = None) -> int:
    """Return how many members the nodes of the mask take; it stops at `enough`."""
    count, nodes = 0, cluster.nodes
    for position in positions(mask):
        count += slots_of(nodes[position])
        if enough is not None and count >= enough:
            break
    return count
