"""Gauges of each GPU: whose it is, what it does, and why it takes no new leases."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.core import GaugeMetricFamily, Metric

from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import cleaning_milli, condition_of, leased_milli, leases_on, shared_gpus
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.core.names import name_of
from resource_manager.core.node_state import NodeState
from resource_manager.fleet.lease_use import idle_leases
from resource_manager.fleet.records import Record, records_of
from resource_manager.fleet.silence import SilenceWatch
from resource_manager.fleet.transitions import is_pinned
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.rest.state_follower import StateFollower
from resource_manager.rest.webhooks import failed_attempts

GPU = ("server", "gpu", "uuid")
PROCESS = ("pid", "user", "command")


def family(name: str, text: str, *labels: str) -> GaugeMetricFamily:
    """Return a gauge without values yet; its name begins as all of ours."""
    return GaugeMetricFamily(f"gpu_manager_{name}", text, labels=labels)


class GpuGauges:
    """Collector from the state and the last reports; only GPUs whose UUID the inventory pins have gauges.

    Of servers without GPUs the agents have theirs.
    """

    def __init__(self, watch: StateFollower, manager: GPUResourceManager, silence: SilenceWatch) -> None:
        self._watch = watch
        self._manager = manager
        self._silence = silence

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        names = self._watch.read(lambda cluster, now: [s.name for s in cluster.nodes if _has_agent(s)])
        records = records_of(self._manager.store, names)
        yield from self._watch.read(lambda cluster, now: self._families(cluster, records, now))
        together = family(
            "agents_silent_together",
            "Servers that fell silent together, over half of those watched, and take leases all the same.",
        )
        together.add_metric((), self._silence.servers_held)
        yield together
        failed = family(
            "notice_failed_attempts",
            "Attempts in a row that the address of a notice did not take.",
            "to",
            "team",
        )
        notices = self._watch.read(lambda cluster, now: cluster.settings.notices)
        for key, attempts in failed_attempts(self._manager.store, notices).items():
            failed.add_metric(key, attempts)
        yield failed

    def _families(self, cluster: ClusterState, records: dict[str, Record], now: float) -> list[Metric]:
        info = family("gpu_info", "1 for each GPU and lease on it; to join by uuid.", *GPU, "lease", "team")
        allocated = family("gpu_allocated_ratio", "Allocated part of the GPU.", *GPU)
        cleaning = family("gpu_cleaning_ratio", "Part that is being cleaned after a lease.", *GPU)
        closed = family("gpu_closed", "1 if the GPU takes no new leases.", *GPU, "reason")
        used = family("gpu_used_ratio", "Utilization in the last report.", *GPU)
        memory = family("gpu_memory_used_bytes", "Memory in use in the last report.", *GPU)
        rogue = family(
            "gpu_rogue_process", "1 for each process that belongs to no lease there.", *GPU, *PROCESS
        )
        shared = family(
            "gpu_share_enforced",
            "1 if an MPS daemon keeps the fractions of the GPU to their parts; of servers that have mps.",
            *GPU,
        )
        watched = family("server_watched", "1 if an agent reports the server's GPUs.", "server")
        silent = family(
            "server_silent", "1 if the server takes no new leases because its agent is silent.", "server"
        )
        age = family("report_age_seconds", "Age of the server's last report.", "server")
        interval = family("report_interval_seconds", "Time between two reports of a server.", "server")
        idle = family(
            "lease_idle_seconds",
            "Time for which a lease has been idle, once it is too long.",
            "lease",
            "team",
            "server",
        )
        for state in filter(_has_agent, cluster.nodes):
            record = records.get(state.name)
            watched.add_metric((state.name,), float(state.watched))
            silent.add_metric((state.name,), float(state.silent is not None))
            if record is not None:
                age.add_metric((state.name,), max(now - record.received_at, 0.0))
                interval.add_metric((state.name,), record.interval_s)
            for uuid in shared_gpus(state) if state.node.mps else ():
                has = record is not None and record.tells_of(now) and uuid in record.mps
                number = next(gpu_id for gpu_id, known in state.gpu_uuids.items() if known == uuid)
                shared.add_metric((state.name, str(number), uuid), float(has))
            for gpu_id, uuid in state.gpu_uuids.items():
                gpu = (state.name, str(gpu_id), uuid)
                for name, team in _holders(state, gpu_id):
                    info.add_metric((*gpu, name, team), 1)
                allocated.add_metric(gpu, leased_milli(state, gpu_id) / MILLI_PER_GPU)
                cleaning.add_metric(gpu, cleaning_milli(state, gpu_id) / MILLI_PER_GPU)
                if (closure := state.closed_gpus.get(gpu_id)) is not None:
                    closed.add_metric((*gpu, condition_of(closure)), 1)
                use = record.gpus.get(gpu_id) if record is not None and record.tells_of(now) else None
                if use is None:
                    continue
                for process in use.rogue:
                    rogue.add_metric((*gpu, *process), 1)
                if use.utilization_percent is not None:
                    used.add_metric(gpu, use.utilization_percent / 100)
                if use.memory_used_mib is not None:
                    memory.add_metric(gpu, use.memory_used_mib * 2**20)
        uses = {name: record.leases for name, record in records.items() if record.tells_of(now)}
        for lease_id, since in idle_leases(cluster, uses, now).items():
            lease = cluster.leases[lease_id]
            idle.add_metric((name_of(lease), lease.request.team, lease.placement.node), now - since)
        of_agents = [watched, silent, age, interval]
        return [info, allocated, cleaning, closed, used, memory, rogue, shared, *of_agents, idle]


def _has_agent(state: NodeState) -> bool:
    """Return True for a server whose agent counts: one that pins its GPUs, or has none and has reported."""
    return state.watched or is_pinned(state)


def _holders(state: NodeState, gpu_id: int) -> list[tuple[str, str]]:
    """Return name and team of each lease on the GPU, a pair of empty ones without any."""
    return [(name_of(lease), lease.request.team) for lease in leases_on(state, gpu_id)] or [("", "")]
