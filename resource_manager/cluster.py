"""What is free and what is held: a fold of changes over an inventory, with indexes for fast placement."""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from resource_manager.errors import CapacityError, CorruptStateError, LeaseNotFoundError, UnknownNodeError
from resource_manager.models import (
    MILLI_PER_GPU,
    Amount,
    Cancelled,
    Change,
    Drained,
    Expired,
    Granted,
    InventoryChanged,
    Lease,
    Node,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Request,
    Restored,
    Waiting,
)
from resource_manager.node_state import (
    NodeState,
    accepted_gpu_ids,
    accepts_node,
    book,
    could_ever_fit,
    unbook,
)

__all__ = ["ClusterState", "NodeState", "Snapshot", "accepted_gpu_ids", "accepts_node", "could_ever_fit"]

JOURNAL_MIN_LENGTH = 4096
DEADLINES_MIN_LENGTH = 1024


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole state as plain values: what a store keeps and a replica starts from."""

    version: int
    fencing: int
    sequence: int
    nodes: tuple[Node, ...]
    leases: tuple[Lease, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    drained: tuple[Drained, ...] = ()
    retired: tuple[str, ...] = ()
    last_node: str | None = None


class ClusterState:
    """The state: inventory, leases, queue. `apply(change)` is its only mutation.

    `version` counts the changes applied, `fencing` is the last fencing number given out. Nodes keep the
    order of the inventory. Amounts that are integers stay exact; where a node's float amounts are all
    given back, its totals are restored exactly.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.version = 0
        self.fencing = 0
        self.sequence = 0
        self.last_node: str | None = None
        self.leases: dict[str, Lease] = {}
        self.waiting: dict[str, Waiting] = {}
        self._deadlines: list[tuple[float, int, str]] = []
        self._undo: list[Callable[[], None]] | None = None
        self.nodes: list[NodeState] = []
        self.by_name: dict[str, NodeState] = {}
        self.journal: list[int] = []
        self.journal_start = 0
        self.derived: dict[object, Any] = {}
        """What policies worked out from this state, by owner; they keep it true by `changed_since`."""
        self._index_nodes([NodeState(node, i) for i, node in enumerate(nodes)])

    # ---- reading ----

    def node(self, name: str) -> NodeState:
        """The node of that name; raises `UnknownNodeError`."""
        try:
            return self.by_name[name]
        except KeyError:
            raise UnknownNodeError(name, len(self.nodes)) from None

    def candidates(self, request: Request, start: int = 0) -> Iterator[NodeState]:
        """Nodes the request fits now, in inventory order, beginning at position `start` and wrapping."""
        mask = self.candidate_mask(request)
        if start:
            low = mask & ((1 << start) - 1)
            yield from self.scan(mask ^ low, request)
            mask = low
        yield from self.scan(mask, request)

    def candidate_mask(self, request: Request) -> int:
        """Bit i is set if node i may fit: open, with enough GPUs; types and amounts are left to `fits`."""
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
        """Nodes of the bit set that the request fits now, in inventory order."""
        nodes = self.nodes
        while mask:
            low = mask & -mask
            node = nodes[low.bit_length() - 1]
            if node.fits(request):
                yield node
            mask ^= low

    def expired(self, now: float) -> list[Lease]:
        """Leases past their end and not in quarantine, the earliest end first."""
        due: list[tuple[float, int, str]] = []
        deadlines = self._deadlines
        while deadlines and deadlines[0][0] <= now:
            entry = heapq.heappop(deadlines)
            lease = self.leases.get(entry[2])
            if (
                lease is not None
                and lease.fencing_token == entry[1]
                and lease.expires_at == entry[0]
                and not lease.quarantined
                and (not due or due[-1] != entry)
            ):
                due.append(entry)
        for entry in due:
            heapq.heappush(deadlines, entry)
        return [self.leases[task_id] for _, _, task_id in due]

    @property
    def mark(self) -> int:
        """A place in the journal; pass it to `changed_since` later."""
        return self.journal_start + len(self.journal)

    def changed_since(self, mark: int) -> list[int] | None:
        """Positions of nodes that changed since `mark`, repeats included; None: take all as changed."""
        if mark < self.journal_start:
            return None
        return self.journal[mark - self.journal_start :]

    def snapshot(self) -> Snapshot:
        """The whole state as plain values."""
        return Snapshot(
            version=self.version,
            fencing=self.fencing,
            sequence=self.sequence,
            nodes=tuple(state.node for state in self.nodes),
            leases=tuple(self.leases.values()),
            waiting=tuple(self.waiting.values()),
            drained=tuple(state.drained for state in self.nodes if state.drained is not None),
            retired=tuple(state.name for state in self.nodes if state.retired),
            last_node=self.last_node,
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ClusterState:
        """A state equal to the one the snapshot was taken of.

        Raises `CorruptStateError` where the snapshot names a server that it does not have.
        """
        cluster = cls(snapshot.nodes)
        named = {lease.placement.node for lease in snapshot.leases}
        named.update(snapshot.retired, (drained.node for drained in snapshot.drained))
        if unknown := sorted(named - cluster.by_name.keys()):
            raise CorruptStateError(f"the state speaks of {unknown[0]!r}, which is none of its servers")
        for drained in snapshot.drained:
            cluster.by_name[drained.node].drained = drained
        for name in snapshot.retired:
            cluster.by_name[name].retired = True
        for lease in snapshot.leases:
            cluster._restore_lease(lease)
        cluster.waiting = {waiting.task_id: waiting for waiting in snapshot.waiting}
        cluster.version = snapshot.version
        cluster.fencing = snapshot.fencing
        cluster.sequence = snapshot.sequence
        cluster.last_node = snapshot.last_node
        cluster._index_nodes(cluster.nodes)
        return cluster

    # ---- the only mutation ----

    def apply(self, change: Change) -> None:
        """Moves the state on by one change; raises `CapacityError` or a lookup error and changes nothing."""
        _APPLY[type(change)](self, change)
        self.version += 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Everything applied inside is undone at the end: for deciding several steps without committing.

        An inventory cannot be tried, and `expired` knows nothing inside of what was there before: what a
        trial adds to the deadlines is dropped with it, so that trying often does not fill them.
        """
        before = (self.version, self.fencing, self.sequence, self.last_node)
        deadlines, self._deadlines = self._deadlines, []
        outer = self._undo
        undo: list[Callable[[], None]] = []
        self._undo = undo
        try:
            yield
        finally:
            self._undo = outer
            for step in reversed(undo):
                step()
            self._deadlines = deadlines
            self.version, self.fencing, self.sequence, self.last_node = before

    # ---- how each change moves the state ----

    def _granted(self, change: Granted) -> None:
        lease = change.lease
        placement = lease.placement
        task_id = lease.request.task_id
        if task_id in self.leases:
            raise CapacityError(f"task {task_id!r} already holds a lease")
        state = self.by_name.get(placement.node)
        if state is None:
            raise UnknownNodeError(placement.node, len(self.nodes))
        whole_before, milli_before = state.whole_free, state.free_milli
        book(state, lease)
        self._reindex(state, whole_before, milli_before)
        state.leases[task_id] = self.leases[task_id] = lease
        if lease.expires_at != math.inf:
            self._push_deadline(lease)
        if lease.fencing_token > self.fencing:
            self.fencing = lease.fencing_token
        self.last_node = placement.node
        waiting = self.waiting.pop(task_id, None) if self.waiting else None
        if self._undo is not None:
            self._undo.append(partial(self._undo_grant, lease, waiting))

    def _undo_grant(self, lease: Lease, waiting: Waiting | None) -> None:
        self._let_go(lease)
        if waiting is not None:
            self.waiting[waiting.task_id] = waiting

    def _ended(self, change: Released | Expired) -> None:
        lease = self._live(change.task_id, change.fencing_token)
        self._let_go(lease)
        if self._undo is not None:
            self._undo.append(partial(self._restore_lease, lease))

    def _renewed(self, change: Renewed) -> None:
        lease = self._live(change.task_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, expires_at=change.expires_at, quarantined=False))

    def _quarantined(self, change: Quarantined) -> None:
        lease = self._live(change.task_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, quarantined=True))

    def _replace_lease(self, old: Lease, new: Lease) -> None:
        self.leases[new.task_id] = new
        self.by_name[new.placement.node].leases[new.task_id] = new
        self._push_deadline(new)
        if self._undo is not None:
            self._undo.append(lambda: self._replace_lease_back(old))

    def _replace_lease_back(self, old: Lease) -> None:
        self.leases[old.task_id] = old
        self.by_name[old.placement.node].leases[old.task_id] = old
        self._push_deadline(old)

    def _queued(self, change: Queued) -> None:
        task_id = change.request.task_id
        if task_id in self.waiting or task_id in self.leases:
            raise CapacityError(f"task {task_id!r} already waits or holds a lease")
        self.sequence += 1
        self.waiting[task_id] = Waiting(change.request, change.at, self.sequence)
        if self._undo is not None:
            self._undo.append(lambda: self.waiting.__delitem__(task_id))

    def _cancelled(self, change: Cancelled) -> None:
        waiting = self.waiting.pop(change.task_id, None)
        if waiting is None:
            raise LeaseNotFoundError(change.task_id)
        if self._undo is not None:
            self._undo.append(lambda: self.waiting.__setitem__(waiting.task_id, waiting))

    def _drained(self, change: Drained) -> None:
        self._close(self.node(change.node), change)

    def _restored(self, change: Restored) -> None:
        self._close(self.node(change.node), None)

    def _close(self, state: NodeState, drained: Drained | None) -> None:
        before = state.drained
        state.drained = drained
        self._set_open(state)
        if self._undo is not None:
            self._undo.append(lambda: self._reopen(state, before))

    def _reopen(self, state: NodeState, drained: Drained | None) -> None:
        state.drained = drained
        self._set_open(state)

    def _inventory_changed(self, change: InventoryChanged) -> None:
        if self._undo is not None:
            raise CapacityError("an inventory cannot be tried, only applied")
        old = self.by_name
        if self._resized_only(change.nodes):
            return
        states = [NodeState(node, 0) for node in change.nodes]
        kept = {state.name for state in states}
        for previous in self.nodes:
            if previous.name not in kept and previous.leases:
                retired = NodeState(previous.node, 0)
                retired.retired = True
                states.append(retired)
        for state in states:
            if state.name in old:
                state.drained = old[state.name].drained
                for lease in old[state.name].leases.values():
                    book(state, lease, force=True)
                    state.leases[lease.task_id] = lease
        self._index_nodes(states)

    def _resized_only(self, nodes: tuple[Node, ...]) -> bool:
        """Takes the change in place, at the cost of what differs, if no node or GPU came, left or moved."""
        places = list(zip(nodes, self.nodes, strict=False))
        if len(nodes) != len(self.nodes) or any(
            node is not state.node
            and (
                (node.name, node.server_id, node.gpus) != (state.name, state.node.server_id, state.node.gpus)
                or state.retired
            )
            for node, state in places
        ):
            return False
        for node, state in places:
            if node is not state.node:
                resized = NodeState(node, state.index)
                resized.drained = state.drained
                for lease in state.leases.values():
                    book(resized, lease, force=True)
                    resized.leases[lease.task_id] = lease
                self.nodes[state.index] = self.by_name[node.name] = resized
                self.by_server_id[node.server_id] = resized
                self._touch(state.index)
        self.largest = _most_of_each(self.nodes)
        return True

    # ---- indexes ----

    def _index_nodes(self, states: list[NodeState]) -> None:
        for index, state in enumerate(states):
            state.index = index
        self.nodes = states
        self.by_name = {state.name: state for state in states}
        self.by_server_id = {state.node.server_id: state for state in states}
        self.largest = _most_of_each(states)
        """The most that any one node has of each resource: more than this can never fit."""
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
        # Bit sets over node positions: bit i of whole_free_masks[k] says node i has exactly k free GPUs.
        self.whole_free_masks = [int.from_bytes(mask, "little") for mask in masks]
        self.open_mask = int.from_bytes(open_bits, "little")
        self.any_milli_mask = int.from_bytes(any_bits, "little")
        # Positions may have moved: whoever follows the journal must look at everything again.
        self.journal_start = self.mark + 1
        self.journal = []

    def _touch(self, index: int) -> None:
        self.journal.append(index)
        self._cut_journal()

    def _cut_journal(self) -> None:
        journal = self.journal
        if len(journal) > JOURNAL_MIN_LENGTH and len(journal) > 8 * len(self.nodes):
            cut = len(journal) // 2
            del journal[:cut]
            self.journal_start += cut

    def _set_open(self, state: NodeState) -> None:
        bit = 1 << state.index
        self.open_mask = self.open_mask | bit if state.is_open else self.open_mask & ~bit
        self._touch(state.index)

    def _live(self, task_id: str, fencing_token: int) -> Lease:
        lease = self.leases.get(task_id)
        if lease is None or lease.fencing_token != fencing_token:
            raise LeaseNotFoundError(task_id, fencing_token)
        return lease

    def _push_deadline(self, lease: Lease) -> None:
        if lease.expires_at == math.inf:
            return
        deadlines = self._deadlines
        heapq.heappush(deadlines, (lease.expires_at, lease.fencing_token, lease.task_id))
        # Ends of leases that were released or renewed stay behind: with long lives they would pile up.
        if len(deadlines) > DEADLINES_MIN_LENGTH and len(deadlines) > 4 * len(self.leases):
            deadlines[:] = [
                (live.expires_at, live.fencing_token, live.task_id)
                for live in self.leases.values()
                if live.expires_at != math.inf
            ]
            heapq.heapify(deadlines)

    def _restore_lease(self, lease: Lease) -> None:
        """Holds a lease that was held before, even where the inventory has shrunk beneath it since."""
        state = self.by_name[lease.placement.node]
        whole_before, milli_before = state.whole_free, state.free_milli
        book(state, lease, force=True)
        self._reindex(state, whole_before, milli_before)
        state.leases[lease.task_id] = lease
        self.leases[lease.task_id] = lease
        self._push_deadline(lease)

    def _let_go(self, lease: Lease) -> None:
        task_id = lease.request.task_id
        state = self.by_name[lease.placement.node]
        whole_before, milli_before = state.whole_free, state.free_milli
        del self.leases[task_id]
        del state.leases[task_id]
        unbook(state, lease)
        self._reindex(state, whole_before, milli_before)
        if state.retired and not state.leases and self._undo is None:
            self._index_nodes([other for other in self.nodes if other is not state])

    def _reindex(self, state: NodeState, whole_before: int, milli_before: int) -> None:
        index = state.index
        whole_now, milli_now = state.whole_free, state.free_milli
        if whole_now != whole_before:
            bit = 1 << index
            masks = self.whole_free_masks
            masks[whole_before] ^= bit
            masks[whole_now] ^= bit
        if milli_now != milli_before and (milli_now == 0 or milli_before == 0):
            self.any_milli_mask ^= 1 << index
        self.journal.append(index)
        if len(self.journal) > JOURNAL_MIN_LENGTH:
            self._cut_journal()


def _most_of_each(states: Iterable[NodeState]) -> dict[str, Amount]:
    most: dict[str, Amount] = {}
    for state in states:
        for name, total in state.node.resources.items():
            if total > most.get(name, 0):
                most[name] = total
    return most


_APPLY: dict[type, Callable[[ClusterState, Any], None]] = {
    Granted: ClusterState._granted,
    Released: ClusterState._ended,
    Expired: ClusterState._ended,
    Renewed: ClusterState._renewed,
    Quarantined: ClusterState._quarantined,
    Queued: ClusterState._queued,
    Cancelled: ClusterState._cancelled,
    Drained: ClusterState._drained,
    Restored: ClusterState._restored,
    InventoryChanged: ClusterState._inventory_changed,
}
