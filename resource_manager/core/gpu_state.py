"""State of a node's GPUs beyond their leases: closed, and being cleaned after a lease."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator
from functools import partial
from itertools import repeat

from resource_manager.core.changes import GpuCleaned, GpuClosed, GpuOpened
from resource_manager.core.models import MILLI_PER_GPU, Lease, Placement
from resource_manager.core.node_state import Cleaning, NodeState
from resource_manager.core.server_facts import WithheldGpu, WithheldGpus

DRAINED = "drained"
"""The condition of a GPU that an operator closed."""

GpuChange = GpuClosed | GpuOpened | GpuCleaned
"""The changes that are about one node's GPUs."""

Undo = Callable[[], object]


def change_gpus(state: NodeState, change: GpuChange) -> Undo:
    """Apply the change to the node and return the function that undoes it.

    Opening an open GPU, or cleaning one of which nothing is being cleaned, changes nothing.
    """
    closed, opened, cleaning = dict(state.closed_gpus), dict(state.opened_gpus), dict(state.cleaning)
    gpu_ids: tuple[int, ...] = (change.gpu_id,)
    match change:
        case GpuClosed():
            closed[change.gpu_id] = change
            opened.pop(change.gpu_id, None)
        case GpuOpened():
            closed.pop(change.gpu_id, None)
            opened[change.gpu_id] = change
        case GpuCleaned():
            cleaning.pop((change.gpu_id, change.fencing_token), None)
            gpu_ids = tuple(state.gpu_free)  # the device may have another id now
    return _set_gpus(state, closed, opened, cleaning, gpu_ids)


def _set_gpus(
    state: NodeState,
    closed: dict[int, GpuClosed],
    opened: dict[int, GpuOpened],
    cleaning: dict[tuple[int, int], Cleaning],
    gpu_ids: tuple[int, ...],
) -> Undo:
    undo = partial(_set_gpus, state, state.closed_gpus, state.opened_gpus, state.cleaning, gpu_ids)
    state.closed_gpus, state.opened_gpus, state.cleaning = closed, opened, cleaning
    recount(state, gpu_ids)
    return undo


def begin_cleaning(state: NodeState, lease: Lease, member: Placement, at: float) -> Undo:
    """Take what an ended lease's member held on the node's GPUs out of the free capacity; return its undo."""
    cleaning = dict(state.cleaning)
    gpu_ids = state.gpu_ids_of(member)
    for gpu_id, uuid in zip(member.gpu_ids, member.gpu_uuids or repeat(""), strict=False):
        key = (gpu_id, lease.fencing_token)
        other = cleaning.get(key)  # another member's part of the same GPU
        milli = lease.request.gpu_milli + (other.milli if other else 0)
        labels, sequence = lease.request.labels, lease.sequence
        cleaning[key] = Cleaning(
            state.name, gpu_id, uuid, lease.fencing_token, milli, lease.lease_id, at, labels, sequence
        )
    return _set_gpus(state, state.closed_gpus, state.opened_gpus, cleaning, gpu_ids)


def carry_over(old: NodeState, new: NodeState) -> None:
    """Give the node's state under a new inventory what is known of its agent and of the GPUs that stayed.

    A closure stays if both inventories have the GPU's number with the same UUID; what is being cleaned
    follows its UUID, as leases do. `new` must have its leases already.
    """
    new.watched, new.silent = old.watched, old.silent
    identities = {gpu.gpu_id: gpu.uuid for gpu in new.node.gpus}
    stayed = {gpu.gpu_id for gpu in old.node.gpus if identities.get(gpu.gpu_id) == gpu.uuid}
    new.closed_gpus = {gpu_id: change for gpu_id, change in old.closed_gpus.items() if gpu_id in stayed}
    new.opened_gpus = {gpu_id: change for gpu_id, change in old.opened_gpus.items() if gpu_id in stayed}
    new.cleaning = dict(old.cleaning)
    recount(new, new.gpu_free)


def recount(state: NodeState, gpu_ids: Iterable[int]) -> None:
    """Derive the free milli of these GPUs again; the caller updates the index."""
    for gpu_id in tuple(gpu_ids):
        before = state.gpu_free.get(gpu_id)
        if before is None:
            continue
        after = 0
        if gpu_id not in state.closed_gpus:
            after = MILLI_PER_GPU - leased_milli(state, gpu_id) - cleaning_milli(state, gpu_id)
        state.gpu_free[gpu_id] = after
        state.free_milli += after - before
        state.whole_free += (after == MILLI_PER_GPU) - (before == MILLI_PER_GPU)


def leased_milli(state: NodeState, gpu_id: int) -> int:
    """Return the thousandths of a GPU that leases hold."""
    return sum(
        lease.request.gpu_milli
        for lease in state.leases.values()
        for member in lease.on(state.name)
        if gpu_id in state.gpu_ids_of(member)
    )


def cleaning_milli(state: NodeState, gpu_id: int) -> int:
    """Return the thousandths of a GPU that are being cleaned."""
    return sum(entry.milli for entry in cleaning_on(state, gpu_id))


def cleaning_on(state: NodeState, gpu_id: int) -> list[Cleaning]:
    """Return what is being cleaned on the GPU that has this id now."""
    return [entry for entry in state.cleaning.values() if present_id(state, entry) == gpu_id]


def present_id(state: NodeState, entry: Cleaning) -> int | None:
    """Return the id that the device has now, None if it left the inventory."""
    placed = Placement(entry.node, (entry.gpu_id,), (entry.uuid,) if entry.uuid else ())
    return next(iter(state.gpu_ids_of(placed)), None)


def leases_on(state: NodeState, gpu_id: int) -> Iterator[Lease]:
    """Yield the leases that hold the GPU or a part of it."""
    for lease in state.leases.values():
        if any(gpu_id in state.gpu_ids_of(member) for member in lease.on(state.name)):
            yield lease


def shared_gpus(state: NodeState) -> list[str]:
    """Return the UUIDs of the GPUs of which a lease holds a fraction, or held one that is being cleaned."""
    found: dict[str, None] = {}
    for lease in state.leases.values():
        if lease.request.gpu_milli < MILLI_PER_GPU:
            ids = (gpu_id for member in lease.on(state.name) for gpu_id in state.gpu_ids_of(member))
            found |= dict.fromkeys(state.gpu_uuids.get(gpu_id, "") for gpu_id in ids)
    found |= dict.fromkeys(entry.uuid for entry in state.cleaning.values() if entry.milli < MILLI_PER_GPU)
    return [uuid for uuid in found if uuid in state.gpu_uuids.values()]


def condition_of(change: GpuClosed) -> str:
    """Return the name of the condition that closed a GPU, without its details."""
    return change.reason.partition("; ")[0]


def withheld_milli(state: NodeState) -> dict[int, int]:
    """Return by GPU id the thousandths that are neither leased nor free: closed, or being cleaned."""
    if not state.closed_gpus and not state.cleaning:
        return {}
    gpu_ids = state.closed_gpus.keys() | {present_id(state, entry) for entry in state.cleaning.values()}
    return {
        gpu_id: MILLI_PER_GPU - leased_milli(state, gpu_id) - state.gpu_free[gpu_id]
        for gpu_id in sorted(state.gpu_free.keys() & gpu_ids)
    }


def withheld(state: NodeState, gpu_ids: Collection[int]) -> WithheldGpus | None:
    """Return those of these GPUs of which nothing is granted, or not all: the closed ones first; or None."""
    found = [
        WithheldGpu(gpu_id, state.closed_gpus[gpu_id].reason)
        for gpu_id in sorted(gpu_ids)
        if gpu_id in state.closed_gpus
    ]
    found += [
        WithheldGpu(gpu_id)
        for gpu_id in sorted(gpu_ids)
        if gpu_id not in state.closed_gpus and cleaning_on(state, gpu_id)
    ]
    return WithheldGpus(tuple(found), state.name) if found else None
