"""Use of GPUs, sampled from reports: utilization, memory, strangers, and since when a lease is idle."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from resource_manager.agent.report_format import GpuReport, Report
from resource_manager.core.changes import Preempting, Renewed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.lease_limits import IDLE, IdleAction
from resource_manager.core.models import MILLI_PER_GPU, Lease
from resource_manager.core.node_state import NodeState
from resource_manager.fleet.transitions import MAX_COMMAND, MAX_LISTED, is_of, rogue_processes
from resource_manager.scheduling.queue.runtime_limits import preempted_at_limit

MJ_PER_KWH, W_S_PER_KWH = 3.6e9, 3.6e6
"""Millijoules and watt-seconds of a kilowatt-hour."""


@dataclass(frozen=True, slots=True)
class LeaseUse:
    """Use of a server's GPUs by one lease: how many utilizations were sampled, and since when all were idle.

    `idle_since` is None if the last sample was not idle. Of `measured_s` seconds between samples all were
    idle for `idle_s`, and `energy_kwh` was taken, None if unknown.
    """

    samples: int = 0
    idle_since: float | None = None
    gpus: int = 0
    measured_s: float = 0.0
    idle_s: float = 0.0
    energy_kwh: float | None = None

    @property
    def busy(self) -> float | None:
        """The part of the measured time in which it computed, None without any."""
        return 1 - self.idle_s / self.measured_s if self.measured_s else None


@dataclass(frozen=True, slots=True)
class GpuSample:
    """Last sample of a GPU; None is what its library cannot say.

    `rogue` has pid, user and command of processes that belong to no lease there, the first `MAX_LISTED`.
    """

    utilization_percent: int | None = None
    memory_used_mib: int | None = None
    memory_mib: int | None = None
    rogue: tuple[tuple[str, str, str], ...] = ()
    energy_mj: int | None = None


def sample_gpus(state: NodeState, report: Report) -> dict[int, GpuSample]:
    """Return the sample of each GPU that the inventory pins, by its number there."""
    reported = {gpu.uuid: gpu for gpu in report.gpus}
    return {
        gpu_id: GpuSample(
            gpu.utilization_percent,
            gpu.memory_used_mib,
            gpu.memory_mib,
            tuple(
                (str(process.pid), process.user or "", (process.command or "")[:MAX_COMMAND])
                for process in rogue_processes(state, gpu_id, gpu)[:MAX_LISTED]
            ),
            gpu.energy_mj,
        )
        for gpu_id, uuid in state.gpu_uuids.items()
        if (gpu := reported.get(uuid)) is not None
    }


def sample_leases(
    state: NodeState,
    report: Report,
    before: Mapping[int, LeaseUse],
    samples: Mapping[int, GpuSample],
    rules: IdleRules,
    now: float,
    passed_s: float,
) -> dict[int, LeaseUse]:
    """Return the use by each lease on the node, by fencing token, with the report as one more sample.

    `before` and `samples` are the uses and samples of the report that came `passed_s` ago. The use by a lease
    that has ended stays until its GPUs are clean.
    """
    reported = {gpu.uuid: gpu for gpu in report.gpus}
    found = {
        entry.fencing_token: before[entry.fencing_token]
        for entry in state.cleaning.values()
        if entry.fencing_token in before
    }
    for lease in state.leases.values():
        gpus = {
            gpu_id: reported.get(state.gpu_uuids.get(gpu_id))
            for member in lease.members
            if member.node == state.name
            for gpu_id in state.gpu_ids_of(member)
        }
        known = {gpu_id: gpu for gpu_id, gpu in gpus.items() if gpu is not None}
        if not known or len(known) < len(gpus):
            if (use := before.get(lease.fencing_token)) is not None:  # what was measured stays
                found[lease.fencing_token] = replace(use, idle_since=None)
            continue
        is_idle = all(_is_idle(gpu, lease, rules.below(lease)) for gpu in known.values())
        use = before.get(lease.fencing_token, LeaseUse(gpus=len(known)))
        count = use.samples + sum(gpu.utilization_percent is not None for gpu in known.values())
        since = (now if use.idle_since is None else use.idle_since) if is_idle else None
        if lease.fencing_token in before and count:
            # A sample stands until the next.
            idle_s = use.idle_s + (passed_s if use.idle_since is not None else 0.0)
            share = lease.request.gpu_milli / MILLI_PER_GPU
            energy_kwh = use.energy_kwh
            for gpu_id, gpu in known.items():
                if (taken := _energy_kwh(samples.get(gpu_id), gpu, passed_s)) is not None:
                    energy_kwh = (energy_kwh or 0.0) + share * taken
            use = replace(use, measured_s=use.measured_s + passed_s, idle_s=idle_s, energy_kwh=energy_kwh)
        found[lease.fencing_token] = replace(use, samples=count, idle_since=since)
    return found


def _energy_kwh(before: GpuSample | None, gpu: GpuReport, passed_s: float) -> float | None:
    """Return what a GPU took since its last sample: by its counter, else by its power now."""
    first = None if before is None else before.energy_mj
    if first is not None and gpu.energy_mj is not None and gpu.energy_mj >= first:
        return (gpu.energy_mj - first) / MJ_PER_KWH
    return None if gpu.power_w is None else gpu.power_w * passed_s / W_S_PER_KWH


def _is_idle(gpu: GpuReport, lease: Lease, below: float) -> bool:
    """Return True if the GPU computes less than that, or nothing of the lease runs on it."""
    if gpu.utilization_percent is not None and gpu.utilization_percent < below:
        return True
    return gpu.processes is not None and all(
        process.lease_source not in ("none", "unreadable")
        and not is_of(process, lease.lease_id, lease.fencing_token)
        for process in gpu.processes
    )


@dataclass(frozen=True, slots=True)
class IdleRules:
    """Rules by which a lease counts as idle: of its request, else its team, else the cluster's settings."""

    cluster: ClusterState

    def below(self, lease: Lease) -> float:
        """Return the utilization in percent below which a GPU of the lease counts as idle."""
        return float(self._rule(lease, "idle_below"))

    def after_s(self, lease: Lease) -> float:
        """Return the time for which the lease may be idle without a warning."""
        return float(self._rule(lease, "idle_after_s"))

    def releases(self, lease: Lease) -> bool:
        """Return True if the lease is released after that time, not only reported."""
        return bool(self._rule(lease, "idle_action") == IdleAction.RELEASE)

    def _rule(self, lease: Lease, name: str) -> Any:
        ledger = self.cluster.ledger
        team = None if ledger is None else ledger.of(lease.request).team
        stated = (getattr(source, name, None) for source in (lease.request, team))
        return next((rule for rule in stated if rule not in (None, "")), getattr(self.cluster.settings, name))


def idle_leases(
    cluster: ClusterState,
    uses: Mapping[str, Mapping[int, LeaseUse]],
    now: float,
    *,
    only: Iterable[str] | None = None,
    ahead_s: float = 0.0,
) -> dict[str, float]:
    """Return the leases that are idle on all their servers, for longer than they may be: since when.

    `uses` are those of each server, by fencing token; with `ahead_s` also those that will be so long after.
    """
    rules = IdleRules(cluster)
    found: dict[str, float] = {}
    for lease_id in cluster.leases if only is None else only:
        lease = cluster.leases.get(lease_id)
        if lease is None or not lease.request.gpus:
            continue
        sampled = [uses.get(member.node, {}).get(lease.fencing_token) for member in lease.members]
        since = [use.idle_since for use in sampled if use is not None and use.idle_since is not None]
        if len(since) == len(lease.members) and now + ahead_s - max(since) >= rules.after_s(lease):
            found[lease_id] = max(since)
    return found


def idle_releases(
    cluster: ClusterState, uses: Mapping[str, Mapping[int, LeaseUse]], now: float, node: str
) -> list[Renewed | Preempting]:
    """Return the preemptions of leases on the node that were idle for so long that they are released."""
    rules = IdleRules(cluster)
    found: list[Renewed | Preempting] = []
    for lease_id in idle_leases(cluster, uses, now, only=cluster.node(node).leases):
        lease = cluster.leases[lease_id]
        if rules.releases(lease) and not (lease.preempted_by or lease.quarantined):
            found += preempted_at_limit(cluster.ledger, lease, IDLE, now)
    return found
