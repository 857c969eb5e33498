"""How many members of a gang nodes can take, now or ever."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import replace

from resource_manager.core.cluster import ClusterState
from resource_manager.core.fit import (
    FreeCapacity,
    could_ever_fit,
    fits,
    of_islands,
    total_capacity,
    usable_gpus,
)
from resource_manager.core.models import MILLI_PER_GPU, Amount, Node, Request, Spread
from resource_manager.core.node_state import NodeState
from resource_manager.scheduling.placement.node_masks import (
    MAX_KEPT,
    addressed,
    domain_masks,
    mask_of,
    of_inventory,
    positions,
    union,
)

SlotsOf = Callable[[NodeState], int]
"""(node) -> the number of members that it can take."""


def slots(node: Node, request: Request, free: FreeCapacity) -> int:
    """Return how many members of the gang the node takes with that free capacity."""
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


def _times(free: Amount, amount: Amount, most: int) -> int:
    """Return how often the amount can be taken, subtracted one by one as grants do; at most `most`."""
    count = 0
    while count < most and free >= amount:
        free -= amount
        count += 1
    return count


def ever_slots(state: NodeState, request: Request) -> int:
    """Return how many members of the gang the node takes when it is empty; none without an address."""
    if not state.node.address or state.retired or not could_ever_fit(state.node, request):
        return 0
    return slots(state.node, request, total_capacity(state.node))


def takes_ever(cluster: ClusterState, request: Request, mask: int) -> bool:
    """Return True if the nodes of the mask take the whole gang when they are empty."""
    return (
        count_slots(cluster, mask, lambda state: ever_slots(state, request), request.nodes) >= request.nodes
    )


def could_ever_take(cluster: ClusterState, request: Request, without: Collection[str] = ()) -> bool:
    """Return True if the inventory could take the request, or the whole gang, when it is empty.

    `without` are names of nodes that do not count.
    """
    states = [state for state in cluster.nodes if not state.retired and state.name not in without]
    if request.nodes == 1:
        return any(could_ever_fit(state.node, request) for state in states)
    allowed = mask_of([state.index for state in states])
    areas = domain_masks(cluster, request.same).values() if request.same else [allowed]
    return any(takes_ever(cluster, request, area & allowed) for area in areas)


def could_ever_mask(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes that could take the request, or a member of the gang, when empty."""
    mask = union(mask for _, mask in _by_slots(cluster, request)) & with_constraints(cluster, request)
    return mask if request.nodes == 1 else mask & addressed(cluster)


def with_constraints(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes with the labels that the request requires, or of the required node."""
    mask = -1
    if request.required_node is not None:
        state = cluster.by_name.get(request.required_node)
        mask = 0 if state is None else 1 << state.index
    for name, value in request.labels_required.items():
        mask &= domain_masks(cluster, name).get(value, 0)
    return mask


class Prospects:
    """Answers where pending requests could start once all leases had ended, while no server opens or closes.

    Nodes of one kind are counted together, since a pass over the queue asks for every request.
    """

    def __init__(self, cluster: ClusterState) -> None:
        self._cluster = cluster
        self._found: dict[tuple[object, ...], bool] = {}
        self._usable: dict[tuple[object, ...], int] = {}
        self._partly_closed: int | None = None
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
        closed = self._partly_closed or 0
        return len(self._found) <= MAX_KEPT and not any(
            cluster.nodes[position].closed_gpus or closed >> position & 1 for position in changed
        )

    def could_start(self, request: Request) -> bool:
        """Return True if the open nodes could take the request, or the whole gang."""
        found = self._found.get(request.shape)
        if found is None:
            if request.nodes == 1:
                found = any(state.is_open and state.could_fit(request) for state in self._cluster.nodes)
            else:
                found = any(self._takes(request, area) for area in self._areas(request))
            self._found[request.shape] = found
        return found

    def usable(self, request: Request) -> int:
        """Return the mask of the open nodes that could take the request, or members of the whole gang."""
        mask = self._usable.get(request.shape)
        if mask is None:
            areas = [area for area in self._areas(request) if self._takes(request, area)]
            mask = self._usable[request.shape] = union(
                area & slots_mask for area in areas for _, slots_mask in self._slots(request, area)
            )
        return mask

    def _areas(self, request: Request) -> list[int]:
        """Return the masks of open nodes, each of which may take the request or the whole gang."""
        cluster = self._cluster
        allowed = cluster.open_mask & with_constraints(cluster, request)
        if request.nodes != 1:
            allowed &= addressed(cluster)
        if not request.same:
            return [allowed]
        return [area & allowed for area in domain_masks(cluster, request.same).values()]

    def _takes(self, request: Request, area: int) -> bool:
        if request.spread is Spread.SERVERS and area.bit_count() < request.nodes:
            return False
        count = 0
        for slots_of_each, mask in self._slots(request, area):
            count += slots_of_each * mask.bit_count()
            if count >= request.nodes:
                return True
        return False

    def _slots(self, request: Request, area: int) -> Iterator[tuple[int, int]]:
        """Yield how many members nodes of the area take, and which nodes do."""
        if self._partly_closed is None:
            self._partly_closed = mask_of([state.index for state in self._cluster.nodes if state.closed_gpus])
        for count, mask in _by_slots(self._cluster, request):
            if whole := mask & area & ~self._partly_closed:
                yield count, whole
        for position in positions(area & self._partly_closed):
            state = self._cluster.nodes[position]
            if count := slots(state.node, request, state.capacity_without_leases):
                yield count, 1 << position


def could_start(cluster: ClusterState, request: Request) -> bool:
    """Return True if the open nodes could take the request, or the whole gang, once all leases had ended."""
    return Prospects.of(cluster).could_start(request)


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

    return of_inventory(cluster, f"slots {key}", count)


def _kinds(cluster: ClusterState) -> list[tuple[NodeState, int]]:
    """Return one node of each kind with the mask of all of them: equal but for name, address and labels."""

    def group() -> list[tuple[NodeState, int]]:
        found: dict[object, list[int]] = {}
        for state in cluster.nodes:
            node = state.node
            gpus = tuple(
                (gpu.gpu_id, gpu.gpu_type, gpu.vendor, gpu.memory_mib, gpu.is_mig) for gpu in node.gpus
            )
            key = (tuple(sorted(node.resources.items())), gpus, node.vendor)
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
