"""Index of a cluster's nodes by name, number and free capacity, which avoids a scan of all nodes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import cached_property
from itertools import chain
from typing import Any, TypeVar

from resource_manager.core.changes import AgentLost, Drained, GpuClosed
from resource_manager.core.gpu_state import carry_over, recount
from resource_manager.core.models import MILLI_PER_GPU, Amount, Lease, Node, Placement, Request, Spread
from resource_manager.core.node_state import NodeState, allocate, deallocate, resize
from resource_manager.errors import CapacityError, UnknownNodeError

T = TypeVar("T")

MIN_JOURNAL_LENGTH = 4096


class NodeIndex:
    """Nodes in the order of the inventory, with bitmaps of free capacity and a journal of changed nodes.

    Bit i of `whole_free_masks[k]` is set if node i has exactly k free GPUs, of `any_milli_mask` if it has
    any GPU milli free, of `open_mask` if it takes new leases.
    """

    nodes: list[NodeState]
    by_name: dict[str, NodeState]
    by_server_id: dict[int, NodeState]
    whole_free_masks: list[int]
    open_mask: int
    any_milli_mask: int

    def __init__(self, nodes: Iterable[NodeState] = ()) -> None:
        self.journal: list[int] = []
        self.journal_start = 0
        self.policy_cache: dict[object, Any] = {}
        """Cache of each policy's derived values; `changed_since` returns the nodes to recompute."""
        self.absent_drained: dict[str, Drained] = {}
        self.absent_closed_gpus: dict[tuple[str, int], GpuClosed] = {}
        """Closures of servers that left the inventory: they come back with their server."""
        self._index(list(nodes))

    @property
    def inventory(self) -> tuple[Node, ...]:
        """The nodes without the retired ones."""
        return tuple(state.node for state in self.nodes if not state.retired)

    def node(self, name: str) -> NodeState:
        """Return the node of that name; raises `UnknownNodeError`."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownNodeError(name, self.by_name) from None

    def candidates(self, request: Request, start: int = 0) -> Iterator[NodeState]:
        """Return the nodes the request fits now, in inventory order from position `start`, wrapping."""
        mask = self.candidate_mask(request)
        low = mask & ((1 << start) - 1)
        high = self.scan(mask ^ low, request)
        return chain(high, self.scan(low, request)) if low else high

    def identified(self, members: tuple[Placement, ...]) -> tuple[Placement, ...]:
        """Return the placements, each with the UUIDs of its GPUs if all of them are known."""
        if not self._has_uuids:
            return members
        by_name = self.by_name
        return tuple(
            by_name[member.node].identified(member) if member.node in by_name else member
            for member in members
        )

    def gpu_failure(self, lease: Lease) -> GpuClosed | None:
        """Return the closure that marks the lease as failed: of a GPU that its job cannot go on with."""
        for member in lease.members:
            state = self.by_name.get(member.node)
            if state is None or not state.closed_gpus:
                continue
            for gpu_id in state.gpu_ids_of(member):
                closed = state.closed_gpus.get(gpu_id)
                if closed is not None and closed.stop:
                    return closed
        return None

    def candidate_mask(self, request: Request) -> int:
        """Return a mask (bit i: node i) of the open nodes with enough free GPUs, or the required node alone.

        The other constraints, and all those of a required node, are left to `fits`.
        """
        if request.required_node is not None:
            state = self.by_name.get(request.required_node)
            return 0 if state is None else 1 << state.index
        need = request.gpus
        if not need:
            return self.open_mask
        by_whole = self.whole_free_masks
        if request.gpu_milli != MILLI_PER_GPU:
            return self.open_mask & self.any_milli_mask
        mask = 0
        for level in range(need, len(by_whole)):
            mask |= by_whole[level]
        return mask & self.open_mask

    def scan(self, mask: int, request: Request) -> Iterator[NodeState]:
        """Yield the nodes of the mask that the request fits now, in inventory order."""
        nodes = self.nodes
        while mask:
            low = mask & -mask
            node = nodes[low.bit_length() - 1]
            if node.fits(request):
                yield node
            mask ^= low

    @cached_property  # it takes a pass over all nodes, and an inventory may change each second
    def largest(self) -> dict[str, Amount]:
        """The maximum that any node has in total of each resource: a request for more can never fit.

        Each inventory gives a new object, so its identity tells whether the inventory changed.
        """
        most: dict[str, Amount] = {}
        for state in self.nodes:
            for name, total in state.node.resources.items():
                if total > most.get(name, 0):
                    most[name] = total
        return most

    @property
    def mark(self) -> int:
        """Return the current position in the journal, for a later `changed_since`."""
        return self.journal_start + len(self.journal)

    def changed_since(self, mark: int) -> list[int] | None:
        """Return positions of the nodes changed since `mark`, with repeats; None: any may have changed."""
        if mark < self.journal_start:
            return None
        return self.journal[mark - self.journal_start :]

    def note_changed(self, position: int) -> None:
        """Have the readers of the journal look at a node again, as something about its leases changed."""
        state = self.nodes[position]
        self._reindex(state, state.whole_free, state.free_milli)

    # ---- members of leases ----

    def _allocate_members(self, lease: Lease) -> None:
        """Allocate all members of a gang, or raise `CapacityError` and allocate none."""
        request, members = lease.request, lease.members
        if len(members) != request.nodes or (
            request.spread is Spread.SERVERS and len({member.node for member in members}) != len(members)
        ):
            nodes = ", ".join(member.node for member in members)
            raise CapacityError(
                f"placement of {lease.lease_id!r} on {nodes} is not one of {request.nodes} nodes"
            )
        meets = self.node(members[0].node)
        if (port := members[0].port) and any(
            member.port == port for other in meets.leases.values() for member in other.on(meets.name)
        ):
            raise CapacityError(f"port {port} of {meets.name!r} is of another gang")
        done: list[Placement] = []
        try:
            for member in members:
                self._allocate_member(lease, member)
                done.append(member)
        except (CapacityError, UnknownNodeError):
            self._deallocate_members(request, done, lease.key)
            raise

    def _allocate_member(self, lease: Lease, member: Placement, *, force: bool = False) -> None:
        state = self.node(member.node)
        whole_before, milli_before = state.whole_free, state.free_milli
        allocate(state, lease.request, member, force=force)
        self._reindex(state, whole_before, milli_before)
        state.leases[lease.key] = lease

    def _deallocate_members(self, request: Request, members: Iterable[Placement], key: str) -> bool:
        """Deallocate members of a lease, which their nodes forget; `key` is that of the lease.

        Returns True if a retired node has no lease left.
        """
        is_last = False
        for member in members:
            state = self.by_name[member.node]
            state.leases.pop(key, None)
            whole_before, milli_before = state.whole_free, state.free_milli
            deallocate(state, request, member)
            self._reindex(state, whole_before, milli_before)
            if state.retired and not state.leases:
                is_last = True
        return is_last

    # ---- another inventory ----

    def _replace_nodes(self, nodes: tuple[Node, ...]) -> None:
        old = self.by_name
        if self._resized_only(nodes):
            return
        states = [NodeState(node, 0) for node in nodes]
        kept = {state.name for state in states}
        numbers = {node.server_id for node in nodes}
        for previous in self.nodes:
            if previous.name not in kept and previous.leases:
                number = previous.node.server_id
                if number in numbers:  # it is given to a server of the new inventory, which is called by it
                    number = max((*numbers, *self.by_server_id)) + 1
                numbers.add(number)
                retired = NodeState(replace(previous.node, server_id=number), 0)
                retired.retired = True
                states.append(retired)
        for state in states:
            if state.name in old:
                _take_over(state, old[state.name])
            else:
                self._come_back(state)
        names = {state.name for state in states}
        for previous in self.nodes:
            if previous.name not in names:
                self._leave(previous)
        # A closure goes with its device: of what has another place now, the old place tells nothing any more.
        present = {gpu.uuid for node in nodes for gpu in node.gpus if gpu.uuid}
        self.absent_closed_gpus = {
            key: closed for key, closed in self.absent_closed_gpus.items() if closed.uuid not in present
        }
        self._index(states)

    def _leave(self, state: NodeState) -> None:
        """Keep the closures of a node that leaves for the day it comes back."""
        if state.drained is not None:
            self.absent_drained[state.name] = state.drained
        for gpu_id, closed in sorted(state.closed_gpus.items()):
            self.absent_closed_gpus[state.name, gpu_id] = closed

    def _come_back(self, state: NodeState) -> None:
        """Close a new node, and those of its GPUs that have the same number and UUID, as when it left."""
        state.drained = self.absent_drained.pop(state.name, None)
        identities = {gpu.gpu_id: gpu.uuid for gpu in state.node.gpus}
        for name, gpu_id in [key for key in self.absent_closed_gpus if key[0] == state.name]:
            closed = self.absent_closed_gpus.pop((name, gpu_id))
            if identities.get(gpu_id) == closed.uuid:
                state.closed_gpus[gpu_id] = closed
        recount(state, state.closed_gpus)

    # ---- updates ----

    def _index(self, states: list[NodeState]) -> None:
        """Replace all nodes by these and rebuild the index."""
        for index, state in enumerate(states):
            state.index = index
        self.nodes = states
        self.by_name = {state.name: state for state in states}
        # Older versions left a retired node, which is behind all others, the number that another one has now.
        self.by_server_id = {state.node.server_id: state for state in reversed(states)}
        vars(self).pop("largest", None)
        self._has_uuids = any(state.gpu_uuids for state in states)
        width = max((len(state.gpu_free) for state in states), default=0)
        masks = [bytearray((len(states) + 7) // 8) for _ in range(width + 1)]
        open_bits = bytearray((len(states) + 7) // 8)
        any_bits = bytearray((len(states) + 7) // 8)
        for index, state in enumerate(states):
            byte, bit = index >> 3, 1 << (index & 7)
            masks[state.whole_free][byte] |= bit
            if state.is_open:
                open_bits[byte] |= bit
            if state.free_milli > 0:
                any_bits[byte] |= bit
        self.whole_free_masks = [int.from_bytes(mask, "little") for mask in masks]
        self.open_mask = int.from_bytes(open_bits, "little")
        self.any_milli_mask = int.from_bytes(any_bits, "little")
        # Positions may have moved, so readers of the journal must take all nodes as changed.
        self.journal_start = self.mark + 1
        self.journal = []
        self._journal_length = max(MIN_JOURNAL_LENGTH, 8 * len(states))

    def _resized_only(self, nodes: tuple[Node, ...]) -> bool:
        """Resize changed nodes in place; return False if a node or GPU was added, removed or moved."""
        changed = [
            (node, state)
            for node, state in zip(nodes, self.nodes, strict=False)
            if node is not state.node or state.retired
        ]
        if len(nodes) != len(self.nodes) or any(
            (node.name, node.server_id, node.gpus) != (state.name, state.node.server_id, state.node.gpus)
            or state.retired
            for node, state in changed
        ):
            return False
        for node, state in changed:
            resize(state, node)
            self._reindex(state, state.whole_free, state.free_milli)
        vars(self).pop("largest", None)
        return True

    def _set_open(self, state: NodeState) -> None:
        bit = 1 << state.index
        self.open_mask = self.open_mask | bit if state.is_open else self.open_mask & ~bit
        self._reindex(state, state.whole_free, state.free_milli)

    def _set_drained(self, state: NodeState, drained: Drained | None) -> None:
        state.drained = drained
        self._set_open(state)

    def _set_agent(self, state: NodeState, watched: bool, silent: AgentLost | None) -> None:
        state.watched, state.silent = watched, silent
        self._set_open(state)

    def _with_index(self, state: NodeState, step: Callable[[], T]) -> T:
        """Return the answer of a step that changes the node's GPUs; update the index."""
        whole_before, milli_before = state.whole_free, state.free_milli
        answer = step()
        self._reindex(state, whole_before, milli_before)
        return answer

    def _reindex(self, state: NodeState, whole_before: int, milli_before: int) -> None:
        """Update the bitmaps of free GPUs and the journal after the node changed."""
        index = state.index
        whole_now, milli_now = state.whole_free, state.free_milli
        if whole_now != whole_before:
            bit = 1 << index
            masks = self.whole_free_masks
            masks[whole_before] ^= bit
            masks[whole_now] ^= bit
        if (milli_now > 0) != (milli_before > 0):  # it is below 0 where leases hold more than there is
            self.any_milli_mask ^= 1 << index
        journal = self.journal
        journal.append(index)
        if len(journal) > self._journal_length:
            cut = len(journal) // 2
            del journal[:cut]
            self.journal_start += cut


def _take_over(state: NodeState, before: NodeState) -> None:
    """Give a node of a new inventory what the node of the same name had."""
    state.drained, state.last_port = before.drained, before.last_port
    for key, lease in before.leases.items():
        for member in lease.on(state.name):
            allocate(state, lease.request, member, force=True)
        state.leases[key] = lease
    carry_over(before, state)
