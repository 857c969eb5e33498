"""Cluster state with free and allocated capacity, built by applying changes to an inventory."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Cancelled,
    Change,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Restored,
    TeamsChanged,
)
from resource_manager.core.expiry_heap import ExpiryHeap
from resource_manager.core.gpu_state import GpuChange, begin_cleaning, carry_over, change_gpus, recount
from resource_manager.core.models import Lease, Node, PendingRequest
from resource_manager.core.node_index import NodeIndex
from resource_manager.core.node_state import Cleaning, NodeState, allocate, deallocate
from resource_manager.core.team_ledger import TeamLedger
from resource_manager.core.teams import Teams
from resource_manager.errors import CapacityError, CorruptStateError, LeaseNotFoundError, UnknownNodeError

__all__ = ["ClusterState", "NodeState", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole state as plain values, which a store keeps and a replica starts from."""

    version: int
    last_fencing_token: int
    sequence: int
    nodes: tuple[Node, ...]
    leases: tuple[Lease, ...] = ()
    pending: tuple[PendingRequest, ...] = ()
    drained: tuple[Drained, ...] = ()
    retired: tuple[str, ...] = ()
    last_node: str | None = None
    teams: Teams = field(default_factory=Teams)
    watched: tuple[str, ...] = ()
    closed_gpus: tuple[GpuClosed, ...] = ()
    opened_gpus: tuple[GpuOpened, ...] = ()
    cleaning: tuple[Cleaning, ...] = ()


class ClusterState(NodeIndex):
    """Inventory, leases and queue of the cluster, modified only by `apply(change)`.

    `version` counts the changes applied, `last_fencing_token` is the last one issued, `sequence` the number
    of the last request that was queued. Nodes keep the order of the inventory. Integer amounts stay exact;
    once a node has no lease left, its float amounts are reset to its totals exactly.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.version = 0
        self.last_fencing_token = 0
        self.sequence = 0
        self.last_node: str | None = None
        self.leases: dict[str, Lease] = {}
        self.pending: dict[str, PendingRequest] = {}
        self.ledger: TeamLedger | None = None
        """What each team holds; None without rules of teams, so that it then costs nothing."""
        self._expiry_heap = ExpiryHeap(self.leases)
        self._undo: list[Callable[[], None]] | None = None
        self.policy_cache: dict[object, Any] = {}
        """Cache of each policy's derived values; `changed_since` returns the nodes to recompute."""
        super().__init__(NodeState(node, i) for i, node in enumerate(nodes))

    @property
    def teams(self) -> Teams:
        """The rules of the teams; empty if there are none."""
        return Teams() if self.ledger is None else self.ledger.rules

    def expired(self, now: float) -> list[Lease]:
        """Return the leases whose TTL has passed and that are not quarantined, the earliest end first."""
        return self._expiry_heap.due(now)

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

    def snapshot(self) -> Snapshot:
        """Return the whole state as plain values."""
        return Snapshot(
            version=self.version,
            last_fencing_token=self.last_fencing_token,
            sequence=self.sequence,
            nodes=tuple(state.node for state in self.nodes),
            leases=tuple(self.leases.values()),
            pending=tuple(self.pending.values()),
            drained=tuple(state.drained for state in self.nodes if state.drained is not None),
            retired=tuple(state.name for state in self.nodes if state.retired),
            last_node=self.last_node,
            teams=self.teams,
            watched=tuple(state.name for state in self.nodes if state.watched),
            closed_gpus=tuple(each for state in self.nodes for _, each in sorted(state.closed_gpus.items())),
            opened_gpus=tuple(each for state in self.nodes for _, each in sorted(state.opened_gpus.items())),
            cleaning=tuple(each for state in self.nodes for _, each in sorted(state.cleaning.items())),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ClusterState:
        """Return a state equal to the one the snapshot was taken of.

        Raises `CorruptStateError` if the snapshot refers to a server that is not among its nodes.
        """
        cluster = cls(snapshot.nodes)
        named = {lease.placement.node for lease in snapshot.leases}
        named.update(snapshot.retired, snapshot.watched, (drained.node for drained in snapshot.drained))
        named.update(each.node for each in snapshot.closed_gpus)
        named.update(each.node for each in snapshot.opened_gpus)
        named.update(each.node for each in snapshot.cleaning)
        if unknown := sorted(named - cluster.by_name.keys()):
            raise CorruptStateError(f"the state refers to server {unknown[0]!r}, which its inventory lacks")
        for drained in snapshot.drained:
            cluster.by_name[drained.node].drained = drained
        for name in snapshot.retired:
            cluster.by_name[name].retired = True
        cluster._set_teams(snapshot.teams)
        for lease in snapshot.leases:
            cluster._restore_lease(lease)
        cluster._restore_gpus(snapshot)
        cluster.pending = {pending.lease_id: pending for pending in snapshot.pending}
        cluster.version = snapshot.version
        cluster.last_fencing_token = snapshot.last_fencing_token
        cluster.sequence = snapshot.sequence
        cluster.last_node = snapshot.last_node
        cluster._index(cluster.nodes)
        return cluster

    # ---- the only mutation ----

    def apply(self, change: Change) -> None:
        """Apply one change; on `CapacityError` or a lookup error the state is unchanged."""
        _APPLY[type(change)](self, change)
        self.version += 1

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Roll back on exit all changes applied inside, to evaluate several steps without committing.

        An inventory change cannot be tried. Inside, `expired` sees only leases granted or renewed in the
        trial: it has an expiry heap of its own, dropped at its end, so that trials do not fill the outer one.
        """
        before = (self.version, self.last_fencing_token, self.sequence, self.last_node)
        expiry_heap, self._expiry_heap = self._expiry_heap, ExpiryHeap(self.leases)
        outer = self._undo
        undo: list[Callable[[], None]] = []
        self._undo = undo
        try:
            yield
        finally:
            self._undo = outer
            for step in reversed(undo):
                step()
            self._expiry_heap = expiry_heap
            self.version, self.last_fencing_token, self.sequence, self.last_node = before

    # ---- one method for each kind of change ----

    def _granted(self, change: Granted) -> None:
        lease = change.lease
        placement = lease.placement
        lease_id = lease.request.lease_id
        if lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} already holds a lease")
        state = self.by_name.get(placement.node)
        if state is None:
            raise UnknownNodeError(placement.node, len(self.nodes))
        whole_before, milli_before = state.whole_free, state.free_milli
        allocate(state, lease)
        self._reindex(state, whole_before, milli_before)
        state.leases[lease_id] = self.leases[lease_id] = lease
        if self.ledger is not None:
            self.ledger.add(lease, self.by_name)
        if lease.expires_at != math.inf:
            self._expiry_heap.push(lease)
        if lease.fencing_token > self.last_fencing_token:
            self.last_fencing_token = lease.fencing_token
        self.last_node = placement.node
        pending = self.pending.pop(lease_id, None) if self.pending else None
        if self._undo is not None:
            self._undo.append(partial(self._undo_grant, lease, pending))

    def _undo_grant(self, lease: Lease, pending: PendingRequest | None) -> None:
        self._deallocate(lease)
        if pending is not None:
            self.pending[pending.lease_id] = pending

    def _ended(self, change: Released | Expired) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._deallocate(lease)
        if self._undo is not None:
            self._undo.append(partial(self._restore_lease, lease))
        for name in {member.node for member in lease.members}:
            state = self.by_name.get(name)  # a retired node has left with its last lease
            if state is not None and state.watched:
                self._change_gpus(state, partial(begin_cleaning, state, lease, change.at))

    def _renewed(self, change: Renewed) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, expires_at=change.expires_at, quarantined=False))

    def _quarantined(self, change: Quarantined) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, quarantined=True))

    def _replace_lease(self, old: Lease, new: Lease) -> None:
        self._put_back(new)
        if self._undo is not None:
            self._undo.append(partial(self._put_back, old))

    def _put_back(self, lease: Lease) -> None:
        self.leases[lease.lease_id] = lease
        self.by_name[lease.placement.node].leases[lease.lease_id] = lease
        self._expiry_heap.push(lease)

    def _queued(self, change: Queued) -> None:
        lease_id = change.request.lease_id
        if lease_id in self.pending or lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} is already pending or holds a lease")
        self.sequence = max(self.sequence, change.sequence)
        self.pending[lease_id] = PendingRequest(change.request, change.queued_at, change.sequence)
        if self._undo is not None:
            self._undo.append(lambda: self.pending.__delitem__(lease_id))

    def _cancelled(self, change: Cancelled) -> None:
        pending = self.pending.pop(change.lease_id, None)
        if pending is None:
            raise LeaseNotFoundError(change.lease_id)
        if self._undo is not None:
            self._undo.append(lambda: self.pending.__setitem__(pending.lease_id, pending))

    def _drained(self, change: Drained) -> None:
        self._change_drained(self.node(change.node), change)

    def _restored(self, change: Restored) -> None:
        self._change_drained(self.node(change.node), None)

    def _change_drained(self, state: NodeState, drained: Drained | None) -> None:
        if self._undo is not None:
            self._undo.append(partial(self._set_drained, state, state.drained))
        self._set_drained(state, drained)

    def _set_drained(self, state: NodeState, drained: Drained | None) -> None:
        state.drained = drained
        self._set_open(state)

    def _teams_changed(self, change: TeamsChanged) -> None:
        before = self.ledger
        self._set_teams(change.teams)
        if self._undo is not None:
            self._undo.append(partial(setattr, self, "ledger", before))

    def _set_teams(self, teams: Teams) -> None:
        ledger = TeamLedger(teams) if teams else None
        self.ledger = None if ledger is None else ledger.recount(self.leases.values(), self.by_name)

    def _gpus_changed(self, change: GpuChange) -> None:
        state = self.node(change.node)
        self._change_gpus(state, partial(change_gpus, state, change))

    def _change_gpus(self, state: NodeState, step: Callable[[], Callable[[], None]]) -> None:
        """Call a step that changes the node's GPUs and returns its undo function; update the index."""
        whole_before, milli_before = state.whole_free, state.free_milli
        undo = step()
        self._reindex(state, whole_before, milli_before)
        if self._undo is not None:
            self._undo.append(partial(self._undo_gpus, state, undo))

    def _undo_gpus(self, state: NodeState, undo: Callable[[], None]) -> None:
        whole_before, milli_before = state.whole_free, state.free_milli
        undo()
        self._reindex(state, whole_before, milli_before)

    def _restore_gpus(self, snapshot: Snapshot) -> None:
        """Set what a snapshot knows of agents and GPUs; the index is built afterwards."""
        for name in snapshot.watched:
            self.by_name[name].watched = True
        for closed in snapshot.closed_gpus:
            self.by_name[closed.node].closed_gpus[closed.gpu_id] = closed
        for opened in snapshot.opened_gpus:
            self.by_name[opened.node].opened_gpus[opened.gpu_id] = opened
        for entry in snapshot.cleaning:
            self.by_name[entry.node].cleaning[entry.gpu_id, entry.fencing_token] = entry
        for state in self.nodes:
            if state.closed_gpus or state.cleaning:
                recount(state, state.gpu_free)

    def _inventory_changed(self, change: InventoryChanged) -> None:
        if self._undo is not None:
            raise CapacityError("an inventory change cannot be tried: apply it outside of a trial")
        self._replace_nodes(change.nodes)
        self._set_teams(self.teams)  # types of GPUs may have changed

    def _replace_nodes(self, nodes: tuple[Node, ...]) -> None:
        old = self.by_name
        if self._resized_only(nodes):
            return
        states = [NodeState(node, 0) for node in nodes]
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
                    allocate(state, lease, force=True)
                    state.leases[lease.lease_id] = lease
                carry_over(old[state.name], state)
        self._index(states)

    def _resized_only(self, nodes: tuple[Node, ...]) -> bool:
        """Replace changed nodes in place; return False if a node or GPU was added, removed or moved."""
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
        resized: list[NodeState] = []
        for node, before in places:
            if node is not before.node:
                state = NodeState(node, before.index)
                state.drained = before.drained
                for lease in before.leases.values():
                    allocate(state, lease, force=True)
                    state.leases[lease.lease_id] = lease
                carry_over(before, state)
                resized.append(state)
        self._swap(resized)
        return True

    def _require_lease(self, lease_id: str, fencing_token: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None or lease.fencing_token != fencing_token:
            raise LeaseNotFoundError(lease_id, fencing_token)
        return lease

    def _restore_lease(self, lease: Lease) -> None:
        """Allocate a lease that existed before, even if its node no longer has the capacity."""
        state = self.by_name[lease.placement.node]
        whole_before, milli_before = state.whole_free, state.free_milli
        allocate(state, lease, force=True)
        self._reindex(state, whole_before, milli_before)
        state.leases[lease.lease_id] = lease
        self.leases[lease.lease_id] = lease
        if self.ledger is not None:
            self.ledger.add(lease, self.by_name)
        self._expiry_heap.push(lease)

    def _deallocate(self, lease: Lease) -> None:
        lease_id = lease.request.lease_id
        state = self.by_name[lease.placement.node]
        whole_before, milli_before = state.whole_free, state.free_milli
        del self.leases[lease_id]
        if self.ledger is not None:
            self.ledger.remove(lease, self.by_name)
        del state.leases[lease_id]
        deallocate(state, lease)
        self._reindex(state, whole_before, milli_before)
        if state.retired and not state.leases and self._undo is None:
            self._index([other for other in self.nodes if other is not state])


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
    TeamsChanged: ClusterState._teams_changed,
    AgentSeen: ClusterState._gpus_changed,
    AgentLost: ClusterState._gpus_changed,
    GpuClosed: ClusterState._gpus_changed,
    GpuOpened: ClusterState._gpus_changed,
    GpuCleaned: ClusterState._gpus_changed,
    InventoryChanged: ClusterState._inventory_changed,
}
