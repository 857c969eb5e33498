"""Cluster state with free and allocated capacity, built by applying changes to an inventory."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from types import MappingProxyType
from typing import Any

from resource_manager.core.announced import names_announced
from resource_manager.core.attained_service import Attained, with_service, without_job
from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Cancelled,
    Change,
    ClusterSettingsChanged,
    DeadlineRisk,
    Drained,
    Expired,
    GpuCleaned,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    JobPlaced,
    MaintenanceChanged,
    MembersReleased,
    Outcome,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
    TeamsChanged,
    Withdrawn,
)
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.expiry_heap import ExpiryHeap
from resource_manager.core.failed_starts import FailedStarts, by_lease, in_order, remembered
from resource_manager.core.gpu_state import GpuChange, begin_cleaning, carry_over, change_gpus, recount
from resource_manager.core.maintenance import Window
from resource_manager.core.models import KEY_SEPARATOR, Gpu, Lease, Node
from resource_manager.core.node_index import NodeIndex
from resource_manager.core.node_state import Cleaning, NodeState, allocate
from resource_manager.core.pending import PendingRequest, PendingRequests
from resource_manager.core.runtimes import LearntRuntimes, class_of, run_s
from resource_manager.core.team_ledger import TeamLedger, Use, at_time
from resource_manager.core.teams import Teams
from resource_manager.errors import CapacityError, CorruptStateError, LeaseNotFoundError, UnknownNodeError

__all__ = ["ClusterState", "NodeState", "Snapshot"]


@dataclass(frozen=True, slots=True)
class Adoption:
    """GPUs that a server's own report gave it in place of those in the inventory; no file takes them back."""

    node: str
    gpus: tuple[Gpu, ...]
    at: float
    by: str = ""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A whole state as plain values, which a store keeps and a replica starts from.

    `drained` and `closed_gpus` are also those of servers that left the inventory, and may come back.
    """

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
    use: Mapping[str, Use] = field(default_factory=dict)
    watched: tuple[str, ...] = ()
    silent: tuple[AgentLost, ...] = ()
    closed_gpus: tuple[GpuClosed, ...] = ()
    opened_gpus: tuple[GpuOpened, ...] = ()
    cleaning: tuple[Cleaning, ...] = ()
    remainders: tuple[Lease, ...] = ()
    last_ports: Mapping[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    settings: ClusterSettings = field(default_factory=ClusterSettings)
    adoptions: tuple[Adoption, ...] = ()
    failed_starts: tuple[Released, ...] = ()
    runtimes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    attained: Mapping[str, int] = field(default_factory=dict)
    at_risk: Mapping[str, float] = field(default_factory=dict)
    announced: tuple[Announced, ...] = ()


class ClusterState(NodeIndex):
    """Inventory, leases and queue of the cluster, modified only by `apply(change)`.

    `version` counts the changes applied, `last_fencing_token` is the last one issued, `sequence` the number
    of the last request that arrived. `remainders` are the leases whose other members were released, by
    `Lease.key`. Nodes keep the order of the inventory. Integer amounts stay exact;
    once a node has no lease left, its float amounts are reset to its totals exactly.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        self.version = 0
        self.last_fencing_token = 0
        self.sequence = 0
        self.last_node: str | None = None
        self.leases: dict[str, Lease] = {}
        self.remainders: dict[str, Lease] = {}
        self.pending = PendingRequests()
        self.ledger: TeamLedger | None = None
        """Ledger of what each team holds; None without rules of teams, so that it then costs nothing."""
        self.windows: tuple[Window, ...] = ()
        """The maintenance windows; none on most clusters, so that they then cost nothing."""
        self.settings = ClusterSettings()
        """The settings of the cluster; each change gives a new object."""
        self.adoptions: dict[str, Adoption] = {}
        """Adoptions by server, also of servers that left the inventory."""
        self.absent_drained: dict[str, Drained] = {}
        self.absent_closed_gpus: dict[tuple[str, int], GpuClosed] = {}
        """Closures of servers that left the inventory: they come back with their server."""
        self.failed_starts: FailedStarts = {}
        """The releases of leases whose jobs did not start, by lease id; the next try avoids those nodes."""
        self.runtimes = LearntRuntimes()
        """How long tasks of each class ran, by the leases that were released as a success."""
        self.attained: Attained = {}
        """The service of unfinished jobs; each change gives a new object."""
        self.at_risk: Mapping[str, float] = {}
        """When what may miss its deadline should end, by lease id; each change gives a new object."""
        self.announced: Mapping[str, Announced] = {}
        """What tasks of running DAGs will ask for, by lease id; each change gives a new object."""
        self._expiry_heap = ExpiryHeap(self.leases)
        self._undo: list[Callable[[], None]] | None = None
        self.preempting: set[str] = set()
        """Ids of the leases that are being preempted."""
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
            drained=(
                *(state.drained for state in self.nodes if state.drained is not None),
                *(each for _, each in sorted(self.absent_drained.items())),
            ),
            retired=tuple(state.name for state in self.nodes if state.retired),
            last_node=self.last_node,
            teams=self.teams,
            use={} if self.ledger is None else self.ledger.uses,
            watched=tuple(state.name for state in self.nodes if state.watched),
            silent=tuple(state.silent for state in self.nodes if state.silent is not None),
            closed_gpus=(
                *(each for state in self.nodes for _, each in sorted(state.closed_gpus.items())),
                *(each for _, each in sorted(self.absent_closed_gpus.items())),
            ),
            opened_gpus=tuple(each for state in self.nodes for _, each in sorted(state.opened_gpus.items())),
            cleaning=tuple(each for state in self.nodes for _, each in sorted(state.cleaning.items())),
            remainders=tuple(self.remainders.values()),
            last_ports={state.name: state.last_port for state in self.nodes if state.last_port},
            windows=self.windows,
            settings=self.settings,
            adoptions=tuple(each for _, each in sorted(self.adoptions.items())),
            failed_starts=in_order(self.failed_starts),
            runtimes=self.runtimes.runs,
            attained=dict(self.attained),
            at_risk=self.at_risk,
            announced=tuple(each for _, each in sorted(self.announced.items())),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ClusterState:
        """Return a state equal to the one the snapshot was taken of.

        Raises `CorruptStateError` if the snapshot refers to a server that is not among its nodes.
        """
        cluster = cls(snapshot.nodes)
        held = (*snapshot.leases, *snapshot.remainders)
        named = {member.node for lease in held for member in lease.members}
        named.update(snapshot.retired, snapshot.last_ports, snapshot.watched)
        named.update(lost.node for lost in snapshot.silent)
        named.update(each.node for each in snapshot.opened_gpus)
        named.update(each.node for each in snapshot.cleaning)
        if unknown := sorted(named - cluster.by_name.keys()):
            raise CorruptStateError(f"the state refers to server {unknown[0]!r}, which its inventory lacks")
        for drained in snapshot.drained:
            if (state := cluster.by_name.get(drained.node)) is None:
                cluster.absent_drained[drained.node] = drained
            else:
                state.drained = drained
        for name in snapshot.retired:
            cluster.by_name[name].retired = True
        cluster._set_teams(snapshot.teams, snapshot.use)
        cluster.windows = snapshot.windows
        cluster.settings = snapshot.settings
        cluster.adoptions = {adoption.node: adoption for adoption in snapshot.adoptions}
        cluster.failed_starts = by_lease(snapshot.failed_starts)
        cluster.runtimes = LearntRuntimes(snapshot.runtimes)
        cluster.attained = dict(snapshot.attained)
        cluster.at_risk = snapshot.at_risk
        cluster.announced = {each.lease_id: each for each in snapshot.announced}
        for name, port in snapshot.last_ports.items():
            cluster.by_name[name].last_port = port
        for lease in held:
            cluster._restore_lease(lease)
        cluster._restore_gpus(snapshot)
        cluster.pending = PendingRequests(snapshot.pending)
        cluster.version = snapshot.version
        cluster.last_fencing_token = snapshot.last_fencing_token
        cluster.sequence = snapshot.sequence
        cluster.last_node = snapshot.last_node
        cluster._index(cluster.nodes)
        return cluster

    def part(self, positions: Iterable[int]) -> ClusterState:
        """Return an independent state of some of the nodes, without the leases and requests of the whole."""
        part = ClusterState()
        part._index([self.nodes[position].copy() for position in positions])
        part.last_fencing_token, part.last_node = self.last_fencing_token, self.last_node
        return part

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
        self._deallocate(lease)
        assert self._undo is not None, "only a trial can suppose something"
        self._undo.append(partial(self._restore_lease, lease))

    def suppose_closed(self, why: Drained) -> None:
        """Close an open node in a trial, to one request; else do nothing."""
        state = self.by_name.get(why.node)
        if state is not None and state.is_open:
            assert self._undo is not None, "only a trial can suppose something"
            self._change_drained(state, why)

    def _set(self, name: str, value: object) -> None:
        """Set an attribute to a new object; a trial sets it back."""
        before = getattr(self, name)
        if value is not before:
            if self._undo is not None:
                self._undo.append(partial(setattr, self, name, before))
            setattr(self, name, value)

    # ---- one method for each kind of change ----

    def _granted(self, change: Granted) -> None:
        lease = change.lease
        request, placement = lease.request, lease.members[-1]
        lease_id = request.lease_id
        if lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} already holds a lease")
        if request.nodes != 1 or len(lease.members) != 1:
            self._allocate_gang(lease)
        else:
            state = self.by_name.get(placement.node)
            if state is None:
                raise UnknownNodeError(placement.node, self.by_name)
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
        self._made(lease_id)
        pending = self.pending.pop(lease_id, None) if self.pending else None
        if self._undo is not None:
            self._undo.append(partial(self._undo_grant, lease, pending))

    def _allocate_gang(self, lease: Lease) -> None:
        first = lease.members[0]
        self._allocate_members(lease)
        if first.port:
            state = self.by_name[first.node]
            if self._undo is not None:
                self._undo.append(partial(setattr, state, "last_port", state.last_port))
            state.last_port = first.port

    def _undo_grant(self, lease: Lease, pending: PendingRequest | None) -> None:
        self._deallocate(lease)
        if pending is not None:
            self.pending[pending.lease_id] = pending

    def _ended(self, change: Released | Expired) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        if self.ledger is not None:
            self._spend(self.ledger, lease, change.at)
        is_last = self._deallocate(lease)
        if self._undo is not None:
            self._undo.append(partial(self._restore_lease, lease))
        if is_last:
            self._drop_retired(lease)
        if lease.request.gpus:
            self._clean_after(lease, change.at)
        if type(change) is Released and change.outcome in ("", Outcome.SUCCESS):
            self._set("attained", without_job(self.attained, lease.lease_id))
        else:
            self._set("attained", with_service(self.attained, lease, change.at))
        if type(change) is Released:
            if change.outcome == Outcome.SUCCESS:
                self._learn(lease, change.at)
            if change.failed_nodes:
                self._set("failed_starts", remembered(self.failed_starts, change))

    def _learn(self, ended: Lease, at: float) -> None:
        """Learn how long the task of an ended lease ran."""
        order = self.runtimes.classes if self._undo is not None else ()
        name = class_of(ended.request)
        before = self.runtimes.learn(name, run_s(ended.granted_at, at))
        if self._undo is not None:
            self._undo.append(partial(self.runtimes.unlearn, name, before, order))

    def _drop_retired(self, ended: Lease) -> None:
        """Drop the retired nodes that have no lease after this one."""
        for member in ended.members:
            state = self.by_name.get(member.node)
            if state is not None and state.retired and not state.leases:
                before = self.nodes
                self._index([other for other in before if other is not state])
                if self._undo is not None:
                    self._undo.append(partial(self._index, before))
                else:  # no trial brings a node back
                    self._leave(state)

    def _spend(self, ledger: TeamLedger, ended: Lease, at: float) -> None:
        """Add what an ended lease, or its ended members, held to the use of its team."""
        account = ledger.of(ended.request)
        if self._undo is not None:
            self._undo.append(partial(setattr, account, "use", account.use))
        account.use = ledger.use_after(account.use, ended, at, self.by_name)

    def _clean_after(self, lease: Lease, at: float) -> None:
        """Begin to clean the GPUs that the lease's members held on watched nodes."""
        for member in lease.members:
            state = self.by_name.get(member.node)  # a retired node has left with its last lease
            if state is not None and state.watched:
                self._change_gpus(state, partial(begin_cleaning, state, lease, member, at))

    def _members_released(self, change: MembersReleased) -> None:
        lease_id, fencing_token, ranks = change.lease_id, change.fencing_token, set(change.ranks)
        lease = self.holding(lease_id, fencing_token)
        if lease is None:
            raise LeaseNotFoundError(lease_id, fencing_token)
        if not ranks or not ranks.issubset(rank for rank, _ in lease.ranked):
            raise CapacityError(f"lease {lease_id!r} has no members {sorted(ranks)}")
        rest = lease.without(ranks)
        ended = tuple(member for rank, member in lease.ranked if rank in ranks)
        if self.ledger is not None:
            self._spend(self.ledger, replace(lease, members=ended), change.at)
        if not lease.ranks:  # what is left of a gang adds nothing to its job
            self._set("attained", with_service(self.attained, lease, change.at))
        self._exchange(lease, rest)
        if self._undo is not None:
            self._undo.append(partial(self._exchange, rest, lease))
        self._drop_retired(lease)
        self._clean_after(replace(lease, members=ended), change.at)

    def holding(self, lease_id: str, fencing_token: int) -> Lease | None:
        """Return the lease of that id and fencing token, or the remainder of one, or None."""
        lease = self.leases.get(lease_id)
        if lease is not None and lease.fencing_token == fencing_token:
            return lease
        return self.remainders.get(f"{lease_id}{KEY_SEPARATOR}{fencing_token}")

    def _exchange(self, old: Lease | None, new: Lease | None) -> None:
        """Replace a lease by one with fewer of its members, or with more as before; None has none."""
        before, after = (Counter(lease.members if lease else ()) for lease in (old, new))
        if old is not None and old.preempted_by:
            self.preempting.discard(old.lease_id)
        if new is not None and not new.ranks:
            self._mark_preempting(new)
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
        if old is not None:
            self._deallocate_members(old.request, (before - after).elements(), "")

    def _renewed(self, change: Renewed) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(
            lease,
            replace(
                lease,
                expires_at=change.expires_at,
                quarantined=bool(lease.preempted_by) and change.at > lease.preempt_until,
                checkpoint_at=change.checkpoint_at,
            ),
        )

    def _preempting(self, change: Preempting) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, preempted_by=change.preemptor, preempt_until=change.until))

    def _quarantined(self, change: Quarantined) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, quarantined=True, revoked=lease.revoked or change.revoked))

    def _job_placed(self, change: JobPlaced) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        if len(change.places) != len(lease.members):
            raise CapacityError(f"lease {change.lease_id!r} has {len(lease.members)} members to place")
        self._replace_lease(lease, replace(lease, places=change.places))

    def _replace_lease(self, old: Lease, new: Lease) -> None:
        self._put_back(new)
        if self._undo is not None:
            self._undo.append(partial(self._put_back, old))

    def _put_back(self, lease: Lease) -> None:
        is_other = _preemptible_as(self.leases[lease.lease_id]) != _preemptible_as(lease)
        self.leases[lease.lease_id] = lease
        for member in lease.members:
            state = self.by_name[member.node]
            state.leases[lease.lease_id] = lease
            if is_other:
                self._reindex(state, state.whole_free, state.free_milli)
        self._expiry_heap.push(lease)
        self._mark_preempting(lease)

    def _mark_preempting(self, lease: Lease) -> None:
        if lease.preempted_by:
            self.preempting.add(lease.lease_id)
        else:
            self.preempting.discard(lease.lease_id)

    def _queued(self, change: Queued) -> None:
        lease_id = change.request.lease_id
        if lease_id in self.pending or lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} is already pending or holds a lease")
        self.sequence = max(self.sequence, change.sequence)
        self.pending[lease_id] = PendingRequest(change.request, change.queued_at, change.sequence)
        self._made(lease_id)
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

    def _resumed(self, change: Resumed) -> None:
        state = self.node(change.node)
        self._change_drained(state, None)
        if state.silent is not None:
            self._change_agent(state, watched=False, silent=None)

    def _change_drained(self, state: NodeState, drained: Drained | None) -> None:
        if self._undo is not None:
            self._undo.append(partial(self._set_drained, state, state.drained))
        self._set_drained(state, drained)

    def _teams_changed(self, change: TeamsChanged) -> None:
        before = self.ledger
        uses = {} if before is None else at_time(before.uses, change.at, before.rules.half_life_s)
        self._set_teams(change.teams, uses)
        if self._undo is not None:
            self._undo.append(partial(setattr, self, "ledger", before))

    def _set_teams(self, teams: Teams, use: Mapping[str, Use] = MappingProxyType({})) -> None:
        ledger = TeamLedger(teams) if teams else None
        held = (*self.leases.values(), *self.remainders.values()) if teams else ()
        if ledger is not None:
            ledger = ledger.recount(held, self.by_name)
            ledger.take_over(use)
        self.ledger = ledger

    def _maintenance_changed(self, change: MaintenanceChanged) -> None:
        self._set("windows", change.windows)

    def _settings_changed(self, change: ClusterSettingsChanged) -> None:
        self._set("settings", change.settings)

    def _deadline_risk(self, change: DeadlineRisk) -> None:
        others = {name: ends_by for name, ends_by in self.at_risk.items() if name != change.lease_id}
        risk = {} if change.ends_by is None else {change.lease_id: change.ends_by}
        self._set("at_risk", others | risk)

    def _announced(self, change: Announced) -> None:
        self._set("announced", {**self.announced, change.lease_id: change})

    def _withdrawn(self, change: Withdrawn) -> None:
        self._no_longer_announced((change.lease_id,))

    def _made(self, lease_id: str) -> None:
        """End the announcement of a request that is made now."""
        if self.announced:
            self._no_longer_announced(names_announced(lease_id))

    def _no_longer_announced(self, lease_ids: Collection[str]) -> None:
        if not self.announced.keys().isdisjoint(lease_ids):
            left = {key: each for key, each in self.announced.items() if key not in lease_ids}
            self._set("announced", left)

    def _agent_changed(self, change: AgentSeen | AgentLost) -> None:
        silent = change if isinstance(change, AgentLost) else None
        self._change_agent(self.node(change.node), watched=True, silent=silent)

    def _change_agent(self, state: NodeState, *, watched: bool, silent: AgentLost | None) -> None:
        if self._undo is not None:
            self._undo.append(partial(self._set_agent, state, state.watched, state.silent))
        self._set_agent(state, watched, silent)

    def _gpus_changed(self, change: GpuChange) -> None:
        state = self.node(change.node)
        self._change_gpus(state, partial(change_gpus, state, change))

    def _change_gpus(self, state: NodeState, step: Callable[[], Callable[[], None]]) -> None:
        """Call a step that changes the node's GPUs and returns its undo function; update the index."""
        undo = self._with_index(state, step)
        if self._undo is not None:
            self._undo.append(partial(self._with_index, state, undo))

    def _restore_gpus(self, snapshot: Snapshot) -> None:
        """Set what a snapshot knows of agents and GPUs; the index is built afterwards."""
        for name in snapshot.watched:
            self.by_name[name].watched = True
        for lost in snapshot.silent:
            self.by_name[lost.node].silent = lost
        for closed in snapshot.closed_gpus:
            if (state := self.by_name.get(closed.node)) is None:
                self.absent_closed_gpus[closed.node, closed.gpu_id] = closed
            else:
                state.closed_gpus[closed.gpu_id] = closed
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
        if change.adopted:
            node = next(node for node in change.nodes if node.name == change.adopted)
            self.adoptions[node.name] = Adoption(node.name, node.gpus, change.at, change.by)
        for node in change.nodes:
            if node.name in self.adoptions and self.adoptions[node.name].gpus != node.gpus:
                del self.adoptions[node.name]
        self._replace_nodes(change.nodes)
        self._set_teams(
            self.teams, {} if self.ledger is None else self.ledger.uses
        )  # types of GPUs may have changed

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
                _take_over(state, old[state.name])
            else:
                self._come_back(state)
        names = {state.name for state in states}
        for previous in self.nodes:
            if previous.name not in names:
                self._leave(previous)
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

    def _require_lease(self, lease_id: str, fencing_token: int) -> Lease:
        lease = self.leases.get(lease_id)
        if lease is None or lease.fencing_token != fencing_token:
            raise LeaseNotFoundError(lease_id, fencing_token)
        return lease

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


def _preemptible_as(lease: Lease) -> tuple[object, ...]:
    """Return what decides, of all that changes in a lease's life, whether and in which turn it is taken."""
    return lease.quarantined, lease.preempted_by, lease.checkpoint_at


def _take_over(state: NodeState, before: NodeState) -> None:
    """Give a node of a new inventory what the node of the same name had."""
    state.drained, state.last_port = before.drained, before.last_port
    for key, lease in before.leases.items():
        for member in lease.on(state.name):
            allocate(state, lease.request, member, force=True)
        state.leases[key] = lease
    carry_over(before, state)


_APPLY: dict[type, Callable[[ClusterState, Any], None]] = {
    Granted: ClusterState._granted,
    Released: ClusterState._ended,
    MembersReleased: ClusterState._members_released,
    Preempting: ClusterState._preempting,
    Expired: ClusterState._ended,
    Renewed: ClusterState._renewed,
    Quarantined: ClusterState._quarantined,
    JobPlaced: ClusterState._job_placed,
    Queued: ClusterState._queued,
    Cancelled: ClusterState._cancelled,
    DeadlineRisk: ClusterState._deadline_risk,
    Announced: ClusterState._announced,
    Withdrawn: ClusterState._withdrawn,
    Drained: ClusterState._drained,
    Resumed: ClusterState._resumed,
    TeamsChanged: ClusterState._teams_changed,
    MaintenanceChanged: ClusterState._maintenance_changed,
    AgentSeen: ClusterState._agent_changed,
    AgentLost: ClusterState._agent_changed,
    GpuClosed: ClusterState._gpus_changed,
    GpuOpened: ClusterState._gpus_changed,
    GpuCleaned: ClusterState._gpus_changed,
    InventoryChanged: ClusterState._inventory_changed,
    ClusterSettingsChanged: ClusterState._settings_changed,
}
