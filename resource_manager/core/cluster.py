"""Cluster state with free and allocated capacity, built by applying changes to an inventory."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from resource_manager.core import changes
from resource_manager.core.announced import names_announced
from resource_manager.core.attained_service import Attained, with_service, without_job
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.failed_starts import FailedStarts, by_lease, by_time, with_failed_start
from resource_manager.core.gpu_state import GpuChange, change_gpus, recount
from resource_manager.core.inventory import Adoption, adoptions_after
from resource_manager.core.leased_nodes import LeasedNodes
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Lease, Node
from resource_manager.core.node_state import Cleaning
from resource_manager.core.pending import PendingRequest, PendingRequests
from resource_manager.core.runtimes import LearntRuntimes, class_of, run_s, teaches
from resource_manager.core.team_ledger import Use, at_time
from resource_manager.core.teams import Teams
from resource_manager.errors import CapacityError, CorruptStateError, LeaseNotFoundError


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
    drained: tuple[changes.Drained, ...] = ()
    retired: tuple[str, ...] = ()
    last_node: str | None = None
    teams: Teams = field(default_factory=Teams)
    use: Mapping[str, Use] = field(default_factory=dict)
    watched: tuple[str, ...] = ()
    silent: tuple[changes.AgentLost, ...] = ()
    closed_gpus: tuple[changes.GpuClosed, ...] = ()
    opened_gpus: tuple[changes.GpuOpened, ...] = ()
    cleaning: tuple[Cleaning, ...] = ()
    remainders: tuple[Lease, ...] = ()
    last_ports: Mapping[str, int] = field(default_factory=dict)
    windows: tuple[Window, ...] = ()
    settings: ClusterSettings = field(default_factory=ClusterSettings)
    adoptions: tuple[Adoption, ...] = ()
    failed_starts: tuple[changes.Released, ...] = ()
    runtimes: Mapping[str, tuple[float, ...]] = field(default_factory=dict)
    attained: Mapping[str, int] = field(default_factory=dict)
    at_risk: Mapping[str, float] = field(default_factory=dict)
    announced: tuple[changes.Announced, ...] = ()


class ClusterState(LeasedNodes):
    """Inventory, leases and queue of the cluster, modified only by `apply(change)`.

    Nodes keep the order of the inventory. Integer amounts stay exact; once a node has no lease left, its
    float amounts are reset to its totals exactly.
    """

    def __init__(self, nodes: Iterable[Node] = ()) -> None:
        super().__init__(nodes)
        self.pending = PendingRequests()
        self.windows: tuple[Window, ...] = ()
        """The maintenance windows; none on most clusters, so that they then cost nothing."""
        self.settings = ClusterSettings()
        """The settings of the cluster; each change gives a new object."""
        self.adoptions: dict[str, Adoption] = {}
        """Adoptions by server, also of servers that left the inventory."""
        self.failed_starts: FailedStarts = {}
        """The releases of leases whose jobs did not start, by lease id; the next try avoids those nodes."""
        self.runtimes = LearntRuntimes()
        """How long tasks of each class ran, by the leases that were released as a success."""
        self.attained: Attained = {}
        """The service of unfinished jobs; each change gives a new object."""
        self.at_risk: Mapping[str, float] = {}
        """When what may miss its deadline should end, by lease id; each change gives a new object."""
        self.announced: Mapping[str, changes.Announced] = {}
        """What tasks of running DAGs will ask for, by lease id; each change gives a new object."""

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
            failed_starts=by_time(self.failed_starts),
            runtimes=self.runtimes.runs,
            attained=dict(self.attained),
            at_risk=self.at_risk,
            announced=tuple(each for _, each in sorted(self.announced.items())),
        )

    @classmethod
    def from_snapshot(cls, snapshot: Snapshot) -> ClusterState:
        """Return a state equal to the one the snapshot was taken of.

        Raises `CorruptStateError` if a lease is on no server, or on one that is not among the nodes.
        """
        cluster = cls(snapshot.nodes)
        held = (*snapshot.leases, *snapshot.remainders)
        if nowhere := next((lease for lease in held if not lease.members), None):
            raise CorruptStateError(f"lease {nowhere.lease_id!r} is on no server")
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

    def apply(self, *together: changes.Change) -> None:
        """Apply changes in order; on `CapacityError` or a lookup error that change, and the rest, is not."""
        for change in together:
            _APPLY[type(change)](self, change)
            self.version += 1

    # ---- one method for each kind of change ----

    def _granted(self, change: changes.Granted) -> None:
        lease_id = change.lease.lease_id
        self._grant(change.lease)
        self._made(lease_id)
        pending = self.pending.pop(lease_id, None) if self.pending else None
        if pending is not None:
            self._undone_by(self.pending.__setitem__, lease_id, pending)

    def _ended(self, change: changes.Released | changes.Expired) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._end(lease, change.at)
        if type(change) is not changes.Released or change.outcome not in ("", _SUCCESS):
            self._set("attained", with_service(self.attained, lease, change.at))
        elif self.attained:
            self._set("attained", without_job(self.attained, lease.lease_id))
        if type(change) is changes.Released:
            if change.outcome == _SUCCESS and teaches(lease.request):
                order = self.runtimes.classes if self._undo is not None else ()
                name = class_of(lease.request)
                before = self.runtimes.learn(name, run_s(lease.granted_at, change.at))
                self._undone_by(self.runtimes.unlearn, name, before, order)
            if change.failed_nodes:
                self._set("failed_starts", with_failed_start(self.failed_starts, change))

    def _members_released(self, change: changes.MembersReleased) -> None:
        lease_id, fencing_token, ranks = change.lease_id, change.fencing_token, set(change.ranks)
        lease = self.holding(lease_id, fencing_token)
        if lease is None:
            raise LeaseNotFoundError(lease_id, fencing_token)
        if not ranks or not ranks.issubset(rank for rank, _ in lease.ranked):
            raise CapacityError(f"lease {lease_id!r} has no members {sorted(ranks)}")
        if not lease.ranks:  # what is left of a gang adds nothing to its job
            self._set("attained", with_service(self.attained, lease, change.at))
        self._end_members(lease, ranks, change.at)

    def _renewed(self, change: changes.Renewed) -> None:
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

    def _preempting(self, change: changes.Preempting) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, preempted_by=change.preemptor, preempt_until=change.until))

    def _quarantined(self, change: changes.Quarantined) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        self._replace_lease(lease, replace(lease, quarantined=True, revoked=lease.revoked or change.revoked))

    def _job_placed(self, change: changes.JobPlaced) -> None:
        lease = self._require_lease(change.lease_id, change.fencing_token)
        if len(change.places) != len(lease.members):
            raise CapacityError(f"lease {change.lease_id!r} has {len(lease.members)} members to place")
        self._replace_lease(lease, replace(lease, places=change.places))

    def _queued(self, change: changes.Queued) -> None:
        lease_id = change.request.lease_id
        if lease_id in self.pending or lease_id in self.leases:
            raise CapacityError(f"task {lease_id!r} is already pending or holds a lease")
        self.sequence = max(self.sequence, change.sequence)
        self.pending[lease_id] = PendingRequest(change.request, change.queued_at, change.sequence)
        self._made(lease_id)
        self._undone_by(self.pending.__delitem__, lease_id)

    def _cancelled(self, change: changes.Cancelled) -> None:
        pending = self.pending.pop(change.lease_id, None)
        if pending is None:
            raise LeaseNotFoundError(change.lease_id)
        self._undone_by(self.pending.__setitem__, pending.lease_id, pending)

    def _resumed(self, change: changes.Resumed) -> None:
        state = self.node(change.node)
        self._change_drained(state, None)
        if state.silent is not None:
            self._change_agent(state, watched=False, silent=None)

    def _teams_changed(self, change: changes.TeamsChanged) -> None:
        before = self.ledger
        uses = {} if before is None else at_time(before.uses, change.at, before.rules.half_life_s)
        self._set_teams(change.teams, uses)
        self._undone_by(setattr, self, "ledger", before)

    def _deadline_risk(self, change: changes.DeadlineRisk) -> None:
        others = {name: ends_by for name, ends_by in self.at_risk.items() if name != change.lease_id}
        risk = {} if change.ends_by is None else {change.lease_id: change.ends_by}
        self._set("at_risk", others | risk)

    def _announced(self, change: changes.Announced) -> None:
        self._set("announced", {**self.announced, change.lease_id: change})

    def _made(self, lease_id: str) -> None:
        """End the announcement of a request that is made now."""
        if self.announced:
            self._no_longer_announced(names_announced(lease_id))

    def _no_longer_announced(self, lease_ids: Collection[str]) -> None:
        if not self.announced.keys().isdisjoint(lease_ids):
            left = {key: each for key, each in self.announced.items() if key not in lease_ids}
            self._set("announced", left)

    def _agent_changed(self, change: changes.AgentSeen | changes.AgentLost) -> None:
        silent = change if isinstance(change, changes.AgentLost) else None
        self._change_agent(self.node(change.node), watched=True, silent=silent)

    def _gpus_changed(self, change: GpuChange) -> None:
        state = self.node(change.node)
        self._change_gpus(state, partial(change_gpus, state, change))

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

    def _inventory_changed(self, change: changes.InventoryChanged) -> None:
        if self._undo is not None:
            raise CapacityError("an inventory change cannot be tried: apply it outside of a trial")
        self.adoptions = adoptions_after(self.adoptions, change)
        self._replace_nodes(change.nodes)
        self._set_teams(self.teams, self.ledger.uses if self.ledger else {})  # types of GPUs may have changed


_SUCCESS = changes.Outcome.SUCCESS.value  # looking it up at each end takes as long as the comparison

_APPLY: dict[type, Callable[[ClusterState, Any], None]] = {
    changes.Granted: ClusterState._granted,
    changes.Released: ClusterState._ended,
    changes.MembersReleased: ClusterState._members_released,
    changes.Preempting: ClusterState._preempting,
    changes.Expired: ClusterState._ended,
    changes.Renewed: ClusterState._renewed,
    changes.Quarantined: ClusterState._quarantined,
    changes.JobPlaced: ClusterState._job_placed,
    changes.Queued: ClusterState._queued,
    changes.Cancelled: ClusterState._cancelled,
    changes.DeadlineRisk: ClusterState._deadline_risk,
    changes.Announced: ClusterState._announced,
    changes.Withdrawn: lambda state, change: state._no_longer_announced((change.lease_id,)),
    changes.Drained: lambda state, change: state._change_drained(state.node(change.node), change),
    changes.Resumed: ClusterState._resumed,
    changes.TeamsChanged: ClusterState._teams_changed,
    changes.MaintenanceChanged: lambda state, change: state._set("windows", change.windows),
    changes.AgentSeen: ClusterState._agent_changed,
    changes.AgentLost: ClusterState._agent_changed,
    changes.GpuClosed: ClusterState._gpus_changed,
    changes.GpuOpened: ClusterState._gpus_changed,
    changes.GpuCleaned: ClusterState._gpus_changed,
    changes.InventoryChanged: ClusterState._inventory_changed,
    changes.ClusterSettingsChanged: lambda state, change: state._set("settings", change.settings),
}
