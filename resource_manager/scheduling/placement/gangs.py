"""Gangs: several members of one lease, placed all at once or not at all."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import replace
from typing import NamedTuple, TypeVar

from resource_manager.core.changes import Drained, Granted
from resource_manager.core.cluster import ClusterState, NodeState
from resource_manager.core.fit import (
    FreeCapacity,
    could_ever_fit,
    fits,
    of_islands,
    total_capacity,
    usable_gpus,
)
from resource_manager.core.models import (
    KEY_SEPARATOR,
    MILLI_PER_GPU,
    Amount,
    Lease,
    Node,
    Placement,
    Request,
    Spread,
    TypeChoice,
)
from resource_manager.scheduling.placement.policies import Policy, select_placement
from resource_manager.scheduling.placement.policies.first_fit import first_fit

T = TypeVar("T")

Members = tuple[Placement, ...]
"""Placements of a lease in the order of their ranks; one unless several nodes were asked for."""

SlotsOf = Callable[[NodeState], int]
"""(node) -> the number of members that it can take."""


MAX_KEPT = 1024
"""The most values kept for one inventory."""


class Part(NamedTuple):
    """Nodes as a mask (bit i: node i) and how many members go there."""

    mask: int
    members: int


class Domain(NamedTuple):
    """Nodes of one value of a label that can take members, and how many; the fullest sorts first."""

    is_other: bool
    """False for the domain of the preferred node."""
    slots: int
    mask: int


def select_members(cluster: ClusterState, request: Request, policy: Policy) -> Members | None:
    """Return the placements of all members, in order of rank; None unless all fit now.

    Of types in order of preference all members get the first that fits, or else what fits of all of them.
    """
    if request.types is TypeChoice.FIRST and len(request.gpu_types) > 1:
        for gpu_type in request.gpu_types:
            members = select_members(cluster, replace(request, gpu_types=(gpu_type,)), policy)
            if members is not None:
                return members
    if request.nodes == 1:
        placement = select_placement(cluster, request, policy)
        return None if placement is None else (placement,)
    without_port = 0
    while parts := plan(cluster, request, ~without_port):
        members = _place(cluster, request, policy, parts)
        if members is None:
            return None
        if in_order := ranked(cluster, request, members):
            return in_order
        without_port |= 1 << min(cluster.by_name[member.node].index for member in members)
    return None


def ranked(cluster: ClusterState, request: Request, members: Iterable[Placement]) -> Members | None:
    """Return the members of a gang by domain and inventory order, the first with a port where they meet.

    None if that server has no port left.
    """
    label = request.prefer_same or request.same
    firsts: dict[str, int] = {}
    if label:
        firsts = {value: _first(mask) for value, mask in domain_masks(cluster, label).items()}

    def place(member: Placement) -> tuple[int, int, tuple[int, ...]]:
        state = cluster.by_name[member.node]
        return firsts.get(state.node.labels.get(label, ""), len(cluster.nodes)), state.index, member.gpu_ids

    first, *others = sorted(members, key=place)
    port = cluster.by_name[first.node].free_port()
    return (replace(first, port=port), *others) if port else None


def member_of(request: Request) -> Request:
    """Return the request of one member."""
    return replace(request, nodes=1)


def fitting_node(cluster: ClusterState, request: Request) -> NodeState | None:
    """Return a node that the request, or a member of the gang, would get now; None if it does not fit."""
    if request.nodes == 1:
        return next(cluster.candidates(request), None)
    members = select_members(cluster, request, first_fit)
    return None if members is None else cluster.by_name[members[0].node]


def plan(
    cluster: ClusterState, request: Request, allowed: int = -1, slots_of: SlotsOf | None = None
) -> list[Part]:
    """Return nodes that can take all members now, as parts that each take a number of them; else nothing.

    `allowed` is a mask of nodes. `slots_of` replaces what the nodes have free now.
    """
    allowed &= addressed(cluster)
    if slots_of is not None:
        allowed &= cluster.open_mask
    else:
        allowed &= cluster.candidate_mask(request)
        if request.spread is Spread.SERVERS:
            if allowed.bit_count() < request.nodes:
                return []

            def slots_of(state: NodeState) -> int:
                return state.fits(request)
        else:

            def slots_of(state: NodeState) -> int:
                return slots(state.node, request, state.capacity) if state.fits(request) else 0

    if not request.same:
        return _near(cluster, request, allowed, slots_of)
    best: list[Part] = []
    for mask in _whole_domains(cluster, request, request.same, allowed, slots_of):
        parts = _near(cluster, request, mask, slots_of)
        if not best or len(parts) < len(best):
            best = parts
        if len(best) == 1:
            break
    return best


def _near(cluster: ClusterState, request: Request, allowed: int, slots_of: SlotsOf) -> list[Part]:
    """Return the fullest domain of `prefer_same` that takes all members, else as few domains as possible.

    Nodes without that label, or all nodes if it is empty, come last.
    """
    nodes = request.nodes
    for mask in _whole_domains(cluster, request, request.prefer_same, allowed, slots_of):
        return [Part(mask, nodes)]
    domains = _domains(cluster, request, request.prefer_same, allowed, slots_of)
    parts: list[Part] = []
    while domains and nodes:
        enough = [domain for domain in domains if domain.slots >= nodes]
        domain = enough[0] if enough else max(domains, key=lambda domain: domain.slots)
        domains.remove(domain)
        parts.append(Part(domain.mask, min(domain.slots, nodes)))
        nodes -= parts[-1].members
    if nodes:
        unlabelled = allowed & ~_union(domain_masks(cluster, request.prefer_same).values())
        if _count(cluster, unlabelled, slots_of, nodes) < nodes:
            return []
        parts.append(Part(unlabelled, nodes))
    return parts


def _whole_domains(
    cluster: ClusterState, request: Request, label: str, allowed: int, slots_of: SlotsOf
) -> Iterator[int]:
    """Yield the nodes of each domain that takes all members, the fullest first.

    With one member a node, of which each needs GPUs, it is the one with the fewest nodes that have the GPUs
    free; only then the other amounts are looked at, node by node.
    """
    nodes = request.nodes
    if request.spread is Spread.PACK or not request.gpus:
        for domain in _domains(cluster, request, label, allowed, slots_of):
            if domain.slots >= nodes:
                yield domain.mask
        return
    preferred = _preferred(cluster, request, slots_of)
    found = [
        Domain(not mask & preferred, mask.bit_count(), mask)
        for mask in (mask & allowed for mask in domain_masks(cluster, label).values())
        if mask.bit_count() >= nodes
    ]
    for domain in sorted(found, key=_by_fullness):
        if _count(cluster, domain.mask, slots_of, nodes) >= nodes:
            yield domain.mask


def _preferred(cluster: ClusterState, request: Request, slots_of: SlotsOf) -> int:
    """Return the mask of the preferred node if it takes a member."""
    state = cluster.by_name.get(request.preferred_node or "")
    return 1 << state.index if state is not None and slots_of(state) else 0


def _by_fullness(domain: Domain) -> tuple[bool, int, int]:
    return domain.is_other, domain.slots, _first(domain.mask)


def _domains(
    cluster: ClusterState, request: Request, label: str, allowed: int, slots_of: SlotsOf
) -> list[Domain]:
    """Return the domains of the label that can take any members, the fullest first."""
    preferred = _preferred(cluster, request, slots_of)
    found: list[Domain] = []
    for mask in domain_masks(cluster, label).values():
        if not (mask := mask & allowed):
            continue
        if count := _count(cluster, mask, slots_of):
            found.append(Domain(not mask & preferred, count, mask))
    return sorted(found, key=_by_fullness)


def _count(cluster: ClusterState, mask: int, slots_of: SlotsOf, enough: int | None = None) -> int:
    """Return how many members the nodes of the mask take; it stops at `enough`."""
    count, nodes = 0, cluster.nodes
    for position in positions(mask):
        count += slots_of(nodes[position])
        if enough is not None and count >= enough:
            break
    return count


def _place(cluster: ClusterState, request: Request, policy: Policy, parts: list[Part]) -> Members | None:
    """Ask the policy member by member inside a trial, part by part."""
    member = member_of(request)
    found: list[Placement] = []
    for mask, count in parts:
        # A policy reads the whole state it is given: to keep it to some nodes, it gets a state of these.
        is_free = mask == cluster.candidate_mask(member)
        arena = cluster if is_free else cluster.part(positions(mask))
        with arena.trial():
            for rank in range(count):
                placement = select_placement(arena, member, policy)
                if placement is None:
                    return None
                found.append(placement)
                task = member.for_task(f"{KEY_SEPARATOR}{rank}")  # the id of no lease
                lease = Lease(task, (placement,), arena.last_fencing_token + 1, 0.0)
                arena.apply(Granted(lease, 0.0))
                if request.spread is Spread.SERVERS:
                    arena.apply(Drained(placement.node, 0.0))
    return tuple(found)


# ---- how many members nodes can take ----


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
    return _count(cluster, mask, lambda state: ever_slots(state, request), request.nodes) >= request.nodes


def could_ever_take(cluster: ClusterState, request: Request, without: Collection[str] = ()) -> bool:
    """Return True if the inventory could take the request, or the whole gang, when it is empty.

    `without` are names of nodes that do not count.
    """
    states = [state for state in cluster.nodes if not state.retired and state.name not in without]
    if request.nodes == 1:
        return any(could_ever_fit(state.node, request) for state in states)
    allowed = _mask([state.index for state in states])
    areas = domain_masks(cluster, request.same).values() if request.same else [allowed]
    return any(takes_ever(cluster, request, area & allowed) for area in areas)


def could_ever_mask(cluster: ClusterState, request: Request) -> int:
    """Return the mask of the nodes that could take the request, or a member of the gang, when empty."""
    mask = _union(mask for _, mask in _by_slots(cluster, request)) & with_constraints(cluster, request)
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
            mask = self._usable[request.shape] = _union(
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
            self._partly_closed = _mask([state.index for state in self._cluster.nodes if state.closed_gpus])
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

    return _of_inventory(cluster, f"slots {key}", count)


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
        return [(cluster.nodes[indexes[0]], _mask(indexes)) for indexes in found.values()]

    return _of_inventory(cluster, "kinds", group)


# ---- nodes as masks ----


def domain_masks(cluster: ClusterState, label: str) -> dict[str, int]:
    """Return the nodes of each value of the label, as masks."""

    def masks() -> dict[str, int]:
        found: dict[str, list[int]] = {}
        for state in cluster.nodes:
            if (value := state.node.labels.get(label)) is not None:
                found.setdefault(value, []).append(state.index)
        return {value: _mask(indexes) for value, indexes in found.items()}

    return _of_inventory(cluster, f"label {label}", masks)


def addressed(cluster: ClusterState) -> int:
    """Return the mask of the nodes with an address, which the members of a gang need to meet."""
    return _of_inventory(
        cluster, "address", lambda: _mask([state.index for state in cluster.nodes if state.node.address])
    )


def uniform(cluster: ClusterState) -> int:
    """Return the mask of the nodes of which a request accepts all GPUs or none."""
    return _of_inventory(
        cluster, "uniform", lambda: _mask([state.index for state in cluster.nodes if state.uniform])
    )


def _of_inventory(cluster: ClusterState, name: str, compute: Callable[[], T]) -> T:
    """Return a value that depends on the inventory alone, each of which brings a new `largest`."""
    known = cluster.policy_cache.get(_of_inventory)
    if known is None or known[0] is not cluster.largest or len(known[1]) > MAX_KEPT:
        known = cluster.policy_cache[_of_inventory] = (cluster.largest, {})
    values: dict[str, T] = known[1]
    if name not in values:
        values[name] = compute()
    return values[name]


def _mask(indexes: list[int]) -> int:
    bits = bytearray(max(indexes, default=0) // 8 + 1)
    for index in indexes:
        bits[index >> 3] |= 1 << (index & 7)
    return int.from_bytes(bits, "little")


def _union(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _first(mask: int) -> int:
    return (mask & -mask).bit_length() - 1


def positions(mask: int) -> Iterator[int]:
    """Yield the positions of the mask's bits, ascending."""
    offset = 0
    for byte in mask.to_bytes((mask.bit_length() + 7) // 8, "little"):
        while byte:
            low = byte & -byte
            yield offset + low.bit_length() - 1
            byte ^= low
        offset += 8
