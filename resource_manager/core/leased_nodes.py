"""Leases on the nodes of a cluster: what each holds and when it ends, with trials that are rolled back."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import ParamSpec

from resource_manager.core.changes import AgentLost, Drained
from resource_manager.core.expiry_heap import ExpiryHeap
from resource_manager.core.gpu_state import Undo, begin_cleaning
from resource_manager.core.models import KEY_SEPARATOR, Lease, Node
from resource_manager.core.node_index import NodeIndex
from resource_manager.core.node_state import NodeState, allocate
from resource_manager.core.team_ledger import TeamLedger, Use
from resource_manager.core.teams import Teams
from resource_manager.errors import CapacityError, LeaseNotFoundError

P = ParamSpec("P")


class LeasedNodes(NodeIndex):
    """Nodes with the leases on them; `ClusterState` says which change does what to them.

    `version` counts the changes applied, `last_fencing_token` is the last one issued, `sequence` the number
    of the last request that arrived, `last_node` the node of the last grant. `remainders` are the leases
    whose other members were released, by `Lease.key`.
    """

    def __init__(self, nodes: Iterable[Node]) -> None:
        self.version = 0
        self.last_fencing_token = 0
        self.sequence = 0
        self.last_node: str | None = None
        self.leases: dict[str, Lease] = {}
        self.remainders: dict[str, Lease] = {}
        self.preempting: set[str] = set()
        """Ids of the leases that are being preempted."""
        self.ledger: TeamLedger | None = None
        """Ledger of what each team holds; None without rules of teams, so that it then costs nothing."""
        self._expiry_heap = ExpiryHeap(self.leases)
        self._undo: list[Undo] | None = None
        super().__init__(NodeState(node, i) for i, node in enumerate(nodes))

    def expired(self, now: float) -> list[Lease]:
        """Return the leases that end with their TTL, which has passed, the earliest end first."""
        return self._expiry_heap.due(now)

    def holding(self, lease_id: str, fencing_token: int) -> Lease | None:
        """Return the lease of that id and fencing token, or the remainder of one, or None."""
        lease = self.leases.get(lease_id)
        if lease is not None and lease.fencing_token == fencing_token:
            return lease
        return self.remainders.get(f"{lease_id}{KEY_SEPARATOR}{fencing_token}")

    @property
    def teams(self) -> Teams:
        """The rules of the teams; empty if there are none."""
        return Teams() if self.ledger is None else self.ledger.rules

    def _set_teams(self, teams: Teams, use: Mapping[str, Use]) -> None:
        ledger = None
        if teams:
            held = (*self.leases.values(), *self.remainders.values())
            ledger = TeamLedger(teams, held, self.by_name)
            ledger.take_over(use)
        self.ledger = ledger

    # ---- trials ----

    @contextmanager
    def trial(self) -> Iterator[None]:
        """Roll back on exit all changes applied inside, to evaluate several steps without committing.

        An inventory change cannot be tried. Inside, `expired` sees only leases granted or renewed in the
        trial: it has an expiry heap of its own, dropped at its end, so that trials do not fill the outer one.
        """
        before = (self.version, self.last_fencing_token, self.sequence, self.last_node)
        expiry_heap, self._expiry_heap = self._expiry_heap, ExpiryHeap(self.leases)
        outer = self._undo
        undo: list[Undo] = []
        self._undo = undo
        try:
            yield
        finally:
            self._undo = outer
            for step in reversed(undo):
                step()
            self._expiry_heap = expiry_heap
            self.version, self.last_fencing_token, self.sequence, self.last_node = before

    @contextmanager
    def reserved(self, leases: Iterable[Lease]) -> Iterator[None]:
        """Allocate, inside, leases that do not exist: capacity that is kept for somebody."""
        held = list(leases)
        for lease in held:
            self._restore_lease(lease)
        try:
            yield
        finally:
            for lease in held:
                self._deallocate(lease)

    def suppose_ended(self, lease: Lease) -> None:
        """End a lease in a trial as if nothing was left of it: its GPUs are free at once."""
        assert self._undo is not None, "only a trial can suppose something"
        self._deallocate(lease)
        self._undone_by(self._restore_lease, lease)

    def suppose_closed(self, why: Drained) -> None:
        """Close an open node in a trial, to one request; else do nothing."""
        state = self.by_name.get(why.node)
        if state is not None and state.is_open:
            assert self._undo is not None, "only a trial can suppose something"
            self._change_drained(state, why)

    def _undone_by(self, step: Callable[P, object], *args: P.args, **kwargs: P.kwargs) -> None:
        """Have a trial, if this is one, call at its end what undoes the change just made."""
        if self._undo is not None:
            self._undo.append(partial(step, *args, **kwargs))

    def _set(self, name: str, value: object) -> None:
        """Set an attribute to a new object; a trial sets it back."""
        before = getattr(self, name)
        if value is not before:
            self._undone_by(setattr, self, name, before)
            setattr(self, name, value)

    # ---- leases that begin, change and end ----

    def _grant(self, lease: Lease) -> None:
        request, placement = lease.request, lease.members[-1]
        lease_id = request.lease_id
        if lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} already holds a lease")
        if request.nodes != 1 or len(lease.members) != 1:
            self._allocate_members(lease)
            if port := lease.members[0].port:
                state = self.by_name[lease.members[0].node]
                self._undone_by(setattr, state, "last_port", state.last_port)
                state.last_port = port
        else:  # what `_allocate_members` does, for the most frequent of all steps
            state = self.node(placement.node)
            whole_before, milli_before = state.whole_free, state.free_milli
            allocate(state, request, placement)
            self._reindex(state, whole_before, milli_before)
            state.leases[lease_id] = lease
        self.leases[lease_id] = lease
        if self.ledger is not None:
            self.ledger.add(lease, self.by_name)
        if lease.expires_at != math.inf:
            self._expiry_heap.push(lease)
        if lease.fencing_token > self.last_fencing_token:
            self.last_fencing_token = lease.fencing_token
        if lease.sequence > self.sequence:
            self.sequence = lease.sequence
        self.last_node = placement.node
        self._undone_by(self._deallocate, lease)

    def _require_lease(self, lease_id: str, fencing_token: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None or lease.fencing_token != fencing_token:
            raise LeaseNotFoundError(lease_id, fencing_token)
        return lease

    def _replace_lease(self, old: Lease, new: Lease) -> None:
        self._put_back(new)
        self._undone_by(self._put_back, old)

    def _put_back(self, lease: Lease) -> None:
        is_other = _preemptible_as(self.leases[lease.lease_id]) != _preemptible_as(lease)
        self.leases[lease.lease_id] = lease
        for member in lease.members:
            state = self.by_name[member.node]
            state.leases[lease.lease_id] = lease
            if is_other:
                self.note_changed(state.index)
        self._expiry_heap.push(lease)
        self._mark_preempting(lease)

    def _mark_preempting(self, lease: Lease) -> None:
        if lease.preempted_by:
            self.preempting.add(lease.lease_id)
        elif not lease.ranks:  # the id of a remainder may be that of another lease
            self.preempting.discard(lease.lease_id)

    def _end(self, lease: Lease, at: float) -> None:
        self._spend(lease, at)
        is_last = self._deallocate(lease)
        self._undone_by(self._restore_lease, lease)
        if is_last:
            self._drop_retired(lease)
        if lease.request.gpus:
            self._clean_after(lease, at)

    def _end_members(self, lease: Lease, ranks: set[int], at: float) -> None:
        rest = lease.without(ranks)
        ended = replace(lease, members=tuple(member for rank, member in lease.ranked if rank in ranks))
        self._spend(ended, at)
        self._exchange(lease, rest)
        self._undone_by(self._exchange, rest, lease)
        self._drop_retired(lease)
        self._clean_after(ended, at)

    def _spend(self, ended: Lease, at: float) -> None:
        """Add what an ended lease, or its ended members, held to the use of its team."""
        if self.ledger is not None:
            account = self.ledger.of(ended.request)
            self._undone_by(setattr, account, "use", account.use)
            account.use = self.ledger.use_after(account.use, ended, at, self.by_name)

    def _drop_retired(self, ended: Lease) -> None:
        """Drop the retired nodes that have no lease after this one."""
        for member in ended.members:
            state = self.by_name.get(member.node)
            if state is not None and state.retired and not state.leases:
                before = self.nodes
                self._index([other for other in before if other is not state])
                self._undone_by(self._index, before)
                if self._undo is None:  # no trial brings a node back
                    self._leave(state)

    def _clean_after(self, lease: Lease, at: float) -> None:
        """Begin to clean the GPUs that the lease's members held on watched nodes."""
        for member in lease.members:
            state = self.by_name.get(member.node)  # a retired node has left with its last lease
            if state is not None and state.watched:
                self._change_gpus(state, partial(begin_cleaning, state, lease, member, at))

    def _exchange(self, old: Lease | None, new: Lease | None) -> None:
        """Replace a lease by one with fewer of its members, or with more as before; None has none."""
        before, after = (Counter(lease.members if lease else ()) for lease in (old, new))
        if old is not None and old.preempted_by:
            self.preempting.discard(old.lease_id)
        if self.ledger is not None and old is not None:
            self.ledger.remove(old, self.by_name)
        if self.ledger is not None and new is not None:
            self.ledger.add(new, self.by_name)
        if old is not None:
            del (self.remainders if old.ranks else self.leases)[old.key]
            for name in {member.node for member in old.members}:
                del self.by_name[name].leases[old.key]
        if new is not None:
            (self.remainders if new.ranks else self.leases)[new.key] = new
            for name in {member.node for member in new.members}:
                self.by_name[name].leases[new.key] = new
            for member in (after - before).elements():
                self._allocate_member(new, member, force=True)
            self._expiry_heap.push(new)
            self._mark_preempting(new)
        if old is not None:
            self._deallocate_members(old.request, (before - after).elements(), "")

    def _restore_lease(self, lease: Lease) -> None:
        """Allocate a lease that existed before, even if its nodes no longer have the capacity."""
        for member in lease.members:
            self._allocate_member(lease, member, force=True)
        (self.remainders if lease.ranks else self.leases)[lease.key] = lease
        if self.ledger is not None:
            self.ledger.add(lease, self.by_name)
        self._expiry_heap.push(lease)
        self._mark_preempting(lease)

    def _deallocate(self, lease: Lease) -> bool:
        """End a lease; return True if it was the last one of a retired node."""
        lease_id = lease.request.lease_id
        del self.leases[lease_id]
        if lease.preempted_by:
            self.preempting.discard(lease_id)
        if self.ledger is not None:
            self.ledger.remove(lease, self.by_name)
        return self._deallocate_members(lease.request, lease.members, lease_id)

    # ---- nodes that close, and their GPUs ----

    def _change_drained(self, state: NodeState, drained: Drained | None) -> None:
        self._undone_by(self._set_drained, state, state.drained)
        self._set_drained(state, drained)

    def _change_agent(self, state: NodeState, *, watched: bool, silent: AgentLost | None) -> None:
        self._undone_by(self._set_agent, state, state.watched, state.silent)
        self._set_agent(state, watched, silent)

    def _change_gpus(self, state: NodeState, step: Callable[[], Undo]) -> None:
        """Call a step that changes the node's GPUs and returns its undo function; update the index."""
        self._undone_by(self._with_index, state, self._with_index(state, step))


def _preemptible_as(lease: Lease) -> tuple[object, ...]:
    """Return what decides, of all that changes in a lease's life, whether and in which turn it is taken."""
    return lease.quarantined, lease.preempted_by, lease.checkpoint_at
