"""Free capacity of one node: which requests fit it, and its allocation and deallocation by leases."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from operator import eq as _is_same

from resource_manager.core.changes import AgentLost, Drained, GpuClosed, GpuOpened
from resource_manager.core.fit import (
    FreeCapacity,
    accepted_gpu_ids,
    accepts_node,
    could_ever_fit,
    fits,
    has_labels,
    is_short,
    pick_gpus,
    total_capacity,
    usable_gpus,
)
from resource_manager.core.models import MILLI_PER_GPU, Amount, Lease, Node, Placement, Request
from resource_manager.core.names import full_name
from resource_manager.core.server_facts import InWindow, StartFailed
from resource_manager.errors import CapacityError


@dataclass(frozen=True, slots=True)
class Cleaning:
    """Part of a GPU that an ended lease held; it is free once no process of that lease is seen there.

    `gpu_id` and `uuid` are those at the grant.
    """

    node: str
    gpu_id: int
    uuid: str
    fencing_token: int
    milli: int
    lease_id: str
    since: float
    labels: Mapping[str, str]
    sequence: int

    @property
    def name(self) -> str:
        """Name of the lease for people."""
        return full_name(self.lease_id, self.labels, self.sequence)


@dataclass(frozen=True, slots=True)
class ClosedToRequest(Drained):
    """A node is closed, in a trial, to one request: by a maintenance window, or where its start failed."""

    why: InWindow | StartFailed = field(kw_only=True)


class NodeState:
    """Free capacity of one node, derived from its leases; read it, never write it.

    `free` is by resource name, `gpu_free` is the free milli by GPU id in ascending order, `whole_free`
    counts entirely free GPUs. `gpu_types` has one entry if all GPUs are of one type, else one for each GPU.
    `gpu_uuids` are the known UUIDs by GPU id; `has_mig` is True if a GPU is a MIG device, `uniform` if a
    request that accepts one GPU accepts all. `drained` is the change that closed the node, if any.
    `watched` is True if an agent reports its GPUs; then `cleaning` has, by GPU id at the grant and fencing
    token, what ended leases held. `silent` is the loss of that agent, until it reports again; the node is
    closed meanwhile. A GPU in `closed_gpus` has nothing free; `opened_gpus` has the last change that opened
    one.
    `last_port` is the last port given to a gang, or 0.
    """

    __slots__ = (
        "cleaning",
        "closed_gpus",
        "drained",
        "free",
        "free_milli",
        "gpu_free",
        "gpu_types",
        "gpu_uuids",
        "has_mig",
        "index",
        "last_port",
        "leases",
        "name",
        "node",
        "opened_gpus",
        "placement_without_gpus",
        "retired",
        "silent",
        "uniform",
        "watched",
        "whole_free",
    )

    def __init__(self, node: Node, index: int) -> None:
        self.node = node
        self.name = node.name
        self.index = index
        self.free: dict[str, Amount] = dict(node.resources)
        gpus = sorted(node.gpus, key=lambda gpu: gpu.gpu_id)
        self.gpu_free: dict[int, int] = {gpu.gpu_id: MILLI_PER_GPU for gpu in gpus}
        types = tuple(gpu.gpu_type for gpu in gpus)
        self.gpu_types = types[:1] if len(set(types)) == 1 else types
        self.whole_free = len(self.gpu_free)
        self.free_milli = MILLI_PER_GPU * len(self.gpu_free)
        self.gpu_uuids: dict[int, str] = {gpu.gpu_id: gpu.uuid for gpu in gpus if gpu.uuid}
        self.has_mig = any(gpu.is_mig for gpu in gpus)
        self.uniform = (
            not self.has_mig and len({(gpu.gpu_type, gpu.vendor, gpu.memory_mib) for gpu in gpus}) <= 1
        )
        self.leases: dict[str, Lease] = {}
        self.drained: Drained | None = None
        self.retired = False
        self.watched = False
        self.silent: AgentLost | None = None
        self.closed_gpus: dict[int, GpuClosed] = {}
        self.opened_gpus: dict[int, GpuOpened] = {}
        self.cleaning: dict[tuple[int, int], Cleaning] = {}
        self.last_port = 0
        self.placement_without_gpus = Placement(node.name)

    def copy(self) -> NodeState:
        """Return an independent copy, for trials among some of the nodes."""
        copy = NodeState.__new__(NodeState)
        for name in NodeState.__slots__:
            setattr(copy, name, getattr(self, name))
        copy.free, copy.gpu_free, copy.leases = dict(self.free), dict(self.gpu_free), dict(self.leases)
        return copy

    @property
    def is_open(self) -> bool:
        """Return True if the node takes new leases."""
        return self.drained is None and self.silent is None and not self.retired

    def fits(self, request: Request) -> bool:
        """Return True if the node is open and the request fits what is free: `fit.fits`, made fast."""
        gpus = request.gpus
        if gpus and gpus * request.gpu_milli > self.free_milli:  # the check that full nodes fail
            return False
        free = self.free
        for name, amount in request.resources.items():
            if free.get(name, 0) < amount and is_short(free.get(name, 0), amount):
                return False
        if self.drained is not None or self.silent is not None or self.retired:
            return False
        if request.required_node is not None and request.required_node != self.name:
            return False
        if request.labels_required and not has_labels(self.node, request):
            return False
        particular = request.is_particular
        if not gpus:
            return not particular or accepts_node(self.node, request)
        if (particular and request.is_linked) or (
            not self.uniform and (particular or (self.has_mig and gpus > 1))
        ):
            return len(self.eligible_gpus(request)) >= gpus
        if request.gpu_milli == MILLI_PER_GPU:
            enough = self.whole_free >= gpus
        else:
            enough = self.whole_free > 0 or max(self.gpu_free.values()) >= request.gpu_milli
        return enough and (not particular or accepts_node(self.node, request))

    def usable(self, request: Request, free: FreeCapacity) -> list[int] | None:
        """Return the GPUs the request could take of what is free at some time; None if it does not fit.

        `fit.fits`, made fast, for a request that the node could take when empty.
        """
        for name, amount in request.resources.items():
            if is_short(free.amounts.get(name, 0), amount):
                return None
        if request.is_linked:
            ids = usable_gpus(self.node, request, free.gpus)
            return ids if len(ids) >= request.gpus else None
        milli = request.gpu_milli
        ids = [gpu_id for gpu_id, left in free.gpus.items() if left >= milli]
        if len(ids) < request.gpus:
            return None
        if not self.uniform and (request.is_particular or self.has_mig):
            accepted = accepted_gpu_ids(self.node, request)
            ids = [gpu_id for gpu_id in ids if gpu_id in accepted]
        return ids if len(ids) >= request.gpus else None

    @property
    def capacity(self) -> FreeCapacity:
        """The free capacity now, as a view of this state."""
        return FreeCapacity(self.gpu_free, self.free)

    @property
    def capacity_without_leases(self) -> FreeCapacity:
        """The capacity that would be free if all leases had ended: all but the closed GPUs."""
        total = total_capacity(self.node)
        if not self.closed_gpus:
            return total
        gpus = {gpu_id: 0 if gpu_id in self.closed_gpus else milli for gpu_id, milli in total.gpus.items()}
        return FreeCapacity(gpus, total.amounts)

    def could_fit(self, request: Request) -> bool:
        """Return True if the request would fit the node once its leases had ended, even if it is closed."""
        if not self.closed_gpus:
            return could_ever_fit(self.node, request)
        return fits(self.node, request, self.capacity_without_leases)

    def eligible_gpus(self, request: Request) -> list[int]:
        """Return the ids of the GPUs of `usable_gpus`, ascending."""
        if self._accepts_any(request):
            milli = request.gpu_milli
            return [gpu_id for gpu_id, free in self.gpu_free.items() if free >= milli]
        return usable_gpus(self.node, request, self.gpu_free)

    def _accepts_any(self, request: Request) -> bool:
        return not (request.is_particular or self.has_mig)

    def free_port(self) -> int:
        """Return the next port after the last one where no gang meets, wrapping; 0 if none is left."""
        first, last = self.node.gang_ports
        used = {member.port for lease in self.leases.values() for member in lease.on(self.name)}
        start = self.last_port + 1 if first <= self.last_port < last else first
        return next((port for port in (*range(start, last + 1), *range(first, start)) if port not in used), 0)

    def pick_gpus(self, request: Request) -> tuple[int, ...]:
        """Return the lowest eligible ids, of few islands where known; for a GPU fraction the tightest."""
        need = request.gpus
        if not need:
            return ()
        islands = self.node.islands
        if not islands and self.whole_free == len(self.gpu_free) and self._accepts_any(request):
            return tuple(islice(self.gpu_free, need))
        return pick_gpus(request, self.eligible_gpus(request), self.gpu_free, islands)

    def place(self, request: Request) -> Placement:
        """Return the placement of a request that fits, on the GPUs of `pick_gpus`."""
        if not request.gpus:
            return self.placement_without_gpus
        return Placement(self.name, self.pick_gpus(request))

    def identified(self, placement: Placement) -> Placement:
        """Return the placement with the UUIDs of its GPUs, or as it is unless all of them have one."""
        known = self.gpu_uuids
        if not known or not placement.gpu_ids or not all(gpu_id in known for gpu_id in placement.gpu_ids):
            return placement
        return replace(placement, gpu_uuids=tuple(known[gpu_id] for gpu_id in placement.gpu_ids))

    def gpu_ids_of(self, placement: Placement) -> tuple[int, ...]:
        """Return the present ids of the placement's devices, which may have other ids than at the grant.

        A device that left the inventory has none. One whose UUID is pinned no more keeps the id of the grant.
        """
        uuids, known = placement.gpu_uuids, self.gpu_uuids
        if not uuids or all(map(_is_same, map(known.get, placement.gpu_ids), uuids)):
            return placement.gpu_ids
        ids = {uuid: gpu_id for gpu_id, uuid in known.items()}
        present = (
            ids.get(uuid, None if gpu_id in known else gpu_id)
            for gpu_id, uuid in zip(placement.gpu_ids, uuids, strict=True)
        )
        return tuple(gpu_id for gpu_id in present if gpu_id is not None)


def allocate(state: NodeState, request: Request, placement: Placement, *, force: bool = False) -> None:
    """Allocate one member's amounts on the node, or raise `CapacityError` and allocate nothing.

    With `force` they are allocated even if the node no longer has the capacity.
    """
    if not force:
        _check_capacity(state, request, placement)
    gpu_ids = placement.gpu_ids
    if gpu_ids:
        if placement.gpu_uuids:
            gpu_ids = state.gpu_ids_of(placement)
        milli = request.gpu_milli
        gpu_free, closed = state.gpu_free, state.closed_gpus
        broken = taken = 0
        for gpu_id in gpu_ids:
            before = gpu_free.get(gpu_id)
            # Else the GPU left the inventory while allocated, or is closed: nothing of it is free.
            if before is not None and gpu_id not in closed:
                if before == MILLI_PER_GPU:
                    broken += 1
                gpu_free[gpu_id] = before - milli
                taken += milli
        state.whole_free -= broken
        state.free_milli -= taken
    free = state.free
    for name, amount in request.resources.items():
        free[name] = free.get(name, 0) - amount


def _check_capacity(state: NodeState, request: Request, placement: Placement) -> None:
    gpu_ids = placement.gpu_ids
    if gpu_ids or request.gpus:
        count = len(gpu_ids)
        if count != request.gpus or (count > 1 and len(set(gpu_ids)) != count):
            raise CapacityError(
                f"placement of {request.lease_id!r} names GPUs {gpu_ids}, "
                f"but the request has gpus={request.gpus}"
            )
        if placement.gpu_uuids and placement.gpu_uuids != state.identified(placement).gpu_uuids:
            raise CapacityError(
                f"placement of {request.lease_id!r} names GPUs {placement.gpu_uuids}, which are not those "
                f"of {state.name!r} with the numbers {gpu_ids}"
            )
        for gpu_id in gpu_ids:
            if state.gpu_free.get(gpu_id, 0) < request.gpu_milli:
                raise CapacityError(
                    f"GPU {gpu_id} of {state.name!r} has less than {request.gpu_milli} milli free"
                )
    free = state.free
    for name, amount in request.resources.items():
        lack = amount - free.get(name, 0)
        if lack > 0 and not is_rounding_error(lack, state.node.resources.get(name, 0)):
            raise CapacityError(f"{state.name!r} has less than {amount} {name} free")


def is_rounding_error(difference: Amount, total: Amount) -> bool:
    """Return True if the difference may come from the order of summing floats that amount to `total`.

    One replica applied every grant and release, another started from the leases that exist: a grant decided
    by one must be applicable by both. Integers are exact.
    """
    return isinstance(difference, float) and abs(difference) <= 1e-9 * max(1.0, abs(total))


def deallocate(state: NodeState, request: Request, placement: Placement) -> None:
    """Deallocate one member's amounts; its lease must have been removed from `state.leases` before."""
    gpu_ids = placement.gpu_ids
    if gpu_ids:
        if placement.gpu_uuids:
            gpu_ids = state.gpu_ids_of(placement)
        milli = request.gpu_milli
        gpu_free, closed = state.gpu_free, state.closed_gpus
        mended = given = 0
        for gpu_id in gpu_ids:
            before = gpu_free.get(gpu_id)
            if before is not None and gpu_id not in closed:
                after = before + milli
                if after == MILLI_PER_GPU:
                    mended += 1
                gpu_free[gpu_id] = after
                given += milli
        state.whole_free += mended
        state.free_milli += given
    if state.leases:
        free = state.free
        for name, amount in request.resources.items():
            free[name] += amount
    else:
        state.free = dict(state.node.resources)


def resize(state: NodeState, node: Node) -> None:
    """Give the node other amounts, labels or ports; its name, number and GPUs stay the same."""
    free: dict[str, Amount] = dict(node.resources)
    for lease in state.leases.values():
        for _ in lease.on(state.name):
            for name, amount in lease.request.resources.items():
                free[name] = free.get(name, 0) - amount
    state.node, state.free = node, free
