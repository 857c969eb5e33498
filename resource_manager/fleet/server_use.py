"""Use of the GPUs: what the servers last reported and measured, beside the leases."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from resource_manager.agent.report_format import GpuReport, Report
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import cleaning_on, leases_on
from resource_manager.core.models import MILLI_PER_GPU, Gpu
from resource_manager.core.names import display_name, short_id
from resource_manager.core.node_state import NodeState
from resource_manager.fleet.health import HealthTable, findings, health_table
from resource_manager.fleet.lease_use import IdleRules, LeaseUse, idle_leases
from resource_manager.fleet.records import records_of, reports_of
from resource_manager.fleet.transitions import rogue_processes
from resource_manager.manager.queries import Queries
from resource_manager.manager.results import answer_of
from resource_manager.manager.serializers import walls_in_words
from resource_manager.manager.server_views import closed_because, server_state
from resource_manager.manager.use_results import GpuFinding, GpuProcess, GpuUse, ServerUse
from resource_manager.scheduling.accounting.gpu_hours import Measure, measure_of
from resource_manager.storage.base import Store

NOTICE_S = 300.0
"""Time before a lease is released as idle from which its owner is told."""

Uses = Mapping[str, Mapping[int, LeaseUse]]
"""Uses of each server by the fencing tokens of its leases."""


@dataclass(frozen=True, slots=True)
class KeptReport:
    """Last report of a server, when it was received by the store's clock, and the use by its leases."""

    report: Report
    received_at: float
    leases: Mapping[int, LeaseUse]


def kept_reports(store: Store, servers: Iterable[str]) -> dict[str, KeptReport]:
    """Return the reports that the store keeps of these servers."""
    names = list(servers)
    records = records_of(store, names)
    return {
        name: KeptReport(report, record.received_at, record.leases)
        if (record := records.get(name)) is not None
        else KeptReport(report, report.at, {})
        for name, report in reports_of(store, names).items()
    }


def use_of(manager: Queries, servers: Sequence[str] | None = None) -> list[ServerUse]:
    """Return the use of these servers, by default of all, in the inventory's order."""
    asked = None if servers is None else set(servers)

    def names(cluster: ClusterState, now: float) -> list[str]:
        return [state.name for state in cluster.nodes if asked is None or state.name in asked]

    def elsewhere(cluster: ClusterState, now: float) -> set[str]:
        states = (cluster.by_name[name] for name in wanted if name in cluster.by_name)
        held = chain.from_iterable(state.leases.values() for state in states)
        return {member.node for lease in held for member in lease.members} - set(wanted)

    wanted = manager.read(names)
    kept = kept_reports(manager.store, wanted)
    uses = {name: report.leases for name, report in kept.items()}
    if others := manager.read(elsewhere):  # of gangs
        uses |= {name: record.leases for name, record in records_of(manager.store, others).items()}

    def view(cluster: ClusterState, now: float) -> list[ServerUse]:
        states = [state for name in wanted if (state := cluster.by_name.get(name)) is not None]
        held = {lease.lease_id for state in states for lease in state.leases.values()}
        idle = Idleness.of(cluster, uses, now, held)
        table = health_table(cluster.settings.health)
        return [server_use(state, kept.get(state.name), table, now, idle) for state in states]

    return manager.read(view)


def measures_of(manager: Queries) -> Mapping[int, Measure]:
    """Return what the servers measured so far of the leases that they run, by fencing token.

    What they measured of those that have ended is in the history.
    """
    servers = manager.read(lambda cluster, now: [state.name for state in cluster.nodes if state.watched])
    found: dict[int, list[tuple[float, float | None]]] = {}
    for record in records_of(manager.store, servers).values() if servers else ():
        for token, use in record.leases.items():
            if use.busy is not None:
                found.setdefault(token, []).append((use.busy, use.energy_kwh))
    return {token: measure_of(parts) for token, parts in found.items()}


@dataclass(frozen=True, slots=True)
class Idleness:
    """Leases that are idle: for how long those that have been it too long, and how soon they are released."""

    idle_s: Mapping[str, float]
    released_in_s: Mapping[str, float]

    @classmethod
    def of(cls, cluster: ClusterState, uses: Uses, now: float, lease_ids: Iterable[str]) -> Idleness:
        rules = IdleRules(cluster)
        since = idle_leases(cluster, uses, now, only=lease_ids, ahead_s=NOTICE_S)
        ends = {lease_id: at + rules.after_s(cluster.leases[lease_id]) for lease_id, at in since.items()}
        return cls(
            {lease_id: now - at for lease_id, at in since.items() if ends[lease_id] <= now},
            {
                lease_id: max(at - now, 0.0)
                for lease_id, at in ends.items()
                if rules.releases(cluster.leases[lease_id])
            },
        )


def server_use(
    state: NodeState, last: KeptReport | None, table: HealthTable, now: float, idle: Idleness
) -> ServerUse:
    """Return the use of one server by its last report, if there is one."""
    report = None if last is None else last.report
    gpus = () if report is None else report.gpus
    by_uuid = {gpu.uuid: gpu for gpu in gpus if gpu.uuid is not None}
    by_index = {gpu.index: gpu for gpu in gpus}
    return {
        "server_id": state.node.server_id,
        "server_name": state.name,
        "state": server_state(state),
        "is_open": state.is_open,
        "drain_reason": closed_because(state),
        "watched": state.watched,
        "age_s": None if last is None else max(now - last.received_at, 0.0),
        "error": "" if report is None else report.error or "",
        "driver": None if report is None else report.driver,
        "agent_version": None if report is None else report.version,
        "machine": None if report is None else report.machine,
        "gpus": [
            _gpu_use(state, gpu, found, table, idle, _sharing(state, gpu, last))
            for gpu in sorted(state.node.gpus, key=lambda gpu: gpu.gpu_id)
            for found in (by_uuid.get(gpu.uuid) if gpu.uuid else by_index.get(gpu.gpu_id),)
        ],
    }


def _gpu_use(
    state: NodeState, gpu: Gpu, report: GpuReport | None, table: HealthTable, idle: Idleness, sharing: str
) -> GpuUse:
    leases = list(leases_on(state, gpu.gpu_id))
    closed = state.closed_gpus.get(gpu.gpu_id)
    rogue = {process.pid for process in rogue_processes(state, gpu.gpu_id, report)} if report else set()
    return {
        "gpu_id": gpu.gpu_id,
        "uuid": gpu.uuid,
        "type": gpu.gpu_type or (report.type if report else ""),
        "memory_mib": gpu.memory_mib or (report.memory_mib if report else None),
        "memory_used_mib": report.memory_used_mib if report else None,
        "utilization_percent": report.utilization_percent if report else None,
        "temperature_c": report.temperature_c if report else None,
        "power_w": report.power_w if report else None,
        "leases": [
            {
                "task_id": lease.lease_id,
                "name": display_name(lease.lease_id, lease.request.labels),
                "short_id": short_id(lease.sequence),
                "team": lease.request.team,
                "owner": lease.request.owner,
                "gpu_milli": lease.request.gpu_milli,
                "fencing_token": lease.fencing_token,
                "idle_s": idle.idle_s.get(lease.lease_id),
                "released_in_s": idle.released_in_s.get(lease.lease_id),
                "walls": walls_in_words(lease, state.name),
            }
            for lease in leases
        ],
        "processes": None
        if report is None or report.processes is None
        else [answer_of(GpuProcess, each, rogue=each.pid in rogue) for each in report.processes],
        "health": [] if report is None else [answer_of(GpuFinding, each) for each in findings(report, table)],
        "closed": "" if closed is None else closed.reason,
        "cleaning": [entry.name for entry in cleaning_on(state, gpu.gpu_id)],
        "rogue": bool(rogue),
        "idle": any(lease.lease_id in idle.idle_s for lease in leases),
        "sharing": sharing,
    }


def _sharing(state: NodeState, gpu: Gpu, last: KeptReport | None) -> str:
    """Return whether something keeps the fractions of a GPU to their parts, empty if it has none."""
    if all(lease.request.gpu_milli == MILLI_PER_GPU for lease in leases_on(state, gpu.gpu_id)):
        return ""
    if last is not None and gpu.uuid and gpu.uuid in (last.report.mps or ()):
        return "enforced by MPS"
    if not state.node.mps:
        why = "its server keeps no MPS daemons"
    elif last is None or last.report.mps is None:
        why = "no agent that keeps MPS daemons reports"
    else:
        why = last.report.mps_error or "its MPS daemon does not run yet"
    return f"accounted, not enforced: {why}"
