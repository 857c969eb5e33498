"""Prometheus metrics in base units: counters from the history, gauges from the current state."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sized
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.gc_collector import GCCollector
from prometheus_client.process_collector import ProcessCollector

from resource_manager import STORED_FORMAT, __version__
from resource_manager.core import changes
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import withheld_milli
from resource_manager.core.lease_limits import LIMITS
from resource_manager.core.maintenance import is_window, preemptor_in_words
from resource_manager.core.models import MILLI_PER_GPU
from resource_manager.core.names import is_hold, name_of
from resource_manager.core.node_state import NodeState
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import StateLostError
from resource_manager.manager.server_views import cpu_usage
from resource_manager.rest.observability.gpu_metrics import family
from resource_manager.rest.state_follower import StateFollower
from resource_manager.scheduling.accounting.lives import Life
from resource_manager.scheduling.queue.windows import under_maintenance

CLUSTER_CHANGES: dict[type[changes.Change], str] = {
    changes.InventoryChanged: "servers",
    changes.ClusterSettingsChanged: "settings",
    changes.TeamsChanged: "teams",
    changes.MaintenanceChanged: "maintenance",
}

LATENCY_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60)
WAIT_BUCKETS_S = (0, 1, 5, 15, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400, 3 * 86_400)
DURATION_BUCKETS_S = (1, 10, 60, 300, 900, 3600, 4 * 3600, 12 * 3600, 86_400, 3 * 86_400, 7 * 86_400)


class ManagerMetrics:
    """Observer of the manager of this process: waits for the lock, commits, conflicts, jumps of the clock."""

    def __init__(self, registry: CollectorRegistry, on_commit: Callable[[], None]) -> None:
        self._on_commit = on_commit
        counter = partial(Counter, registry=registry)
        histogram = partial(Histogram, registry=registry, buckets=LATENCY_BUCKETS_S)
        self._lock_wait = histogram("gpu_manager_lock_wait_seconds", "Waits for the lock.")
        self._commit = histogram("gpu_manager_commit_seconds", "Commits to the store.")
        self._clock_jumps = counter(
            "gpu_manager_store_clock_jumps",
            "Jumps of the store's clock by more than 5 s that this process saw.",
        )
        self._conflicts = counter(
            "gpu_manager_commit_conflicts", "Commits refused because another writer committed first."
        )

    def measured(self, name: str, value: float) -> None:
        if name == "lock_wait_s":
            self._lock_wait.observe(value)
        elif name == "commit_s":
            self._commit.observe(value)
            self._on_commit()
        elif name == "commit_conflicts":
            self._conflicts.inc(value)
        elif name == "clock_jump_s":
            self._clock_jumps.inc()


class Metrics:
    """All metrics of one service, in their own registry; `on_commit` is called after each of its commits."""

    def __init__(self, watch: StateFollower, on_commit: Callable[[], None] = lambda: None) -> None:
        self.registry = registry = CollectorRegistry()
        self.manager = ManagerMetrics(registry, on_commit)
        counter, gauge = partial(Counter, registry=registry), partial(Gauge, registry=registry)
        histogram = partial(Histogram, registry=registry)
        version = gauge("gpu_manager_build_info", "1 for this version.", ("version", "format"))
        version.labels(__version__, STORED_FORMAT).set(1)
        self.requests = histogram(
            "gpu_manager_http_request_seconds",
            "Requests to the service by route.",
            ("method", "route", "status"),
            buckets=LATENCY_BUCKETS_S,
        )
        self.in_progress = gauge(
            "gpu_manager_http_requests_in_progress", "Requests being answered, without event streams."
        )
        self.open_streams: dict[str, int] = {}
        gauge("gpu_manager_http_streams", "Open pages that follow events.").set_function(
            lambda: sum(tuple(self.open_streams.values()))
        )
        self.refusals = counter("gpu_manager_refusals", "Requests to allocate that were refused.", ("kind",))
        for kind in RefusalKind:
            self.refusals.labels(kind)
        self._allocations = counter("gpu_manager_allocations", "Leases granted.", ("server",))
        self._releases = counter("gpu_manager_releases", "Leases released.")
        self._expirations = counter(
            "gpu_manager_expirations",
            "Leases that were not renewed in time, or were quarantined.",
            ("quarantined",),
        )
        self._waits = histogram(
            "gpu_manager_wait_seconds", "Time from submission to grant.", buckets=WAIT_BUCKETS_S
        )
        self._durations = histogram(
            "gpu_manager_lease_seconds", "Life of leases that ended.", buckets=DURATION_BUCKETS_S
        )
        self._preemptions = counter(
            "gpu_manager_preemptions",
            "Leases preempted: for another team's guarantee, a higher priority in their own, maintenance, an "
            "operator who asked for it, or at a limit of theirs: idle, max_runtime, requeue_after.",
            ("reason",),
        )
        for reason in ("guarantee", "priority", "maintenance", "operator", *map(preemptor_in_words, LIMITS)):
            self._preemptions.labels(reason)
        for quarantined in ("true", "false"):
            self._expirations.labels(quarantined)
        self._cluster_changes = counter(
            "gpu_manager_cluster_changes",
            "Changes of the stored cluster: its servers, settings, teams, maintenance windows.",
            ("kind",),
        )
        for part in CLUSTER_CHANGES.values():
            self._cluster_changes.labels(part)
        self._without_state = CollectorRegistry()
        self._unusable = Gauge(
            "gpu_manager_state_unusable",
            "1 if nothing can be granted, by reason: closed, outdated (set back to a dump), lost.",
            ("reason",),
            registry=self._without_state,
        )
        registry.register(self._unusable)
        self._unusable.labels("lost").set(0)
        self._watch = watch
        watch.on_change(self._count)
        registry.register(_State(watch))
        ProcessCollector(registry=registry)
        GCCollector(registry=registry)

    def watch_service(
        self, requests: Sized, is_closed: Callable[[], bool], is_outdated: Callable[[], bool]
    ) -> None:
        """Count the requests that are held; show whether the state was closed or set back, at each scrape."""
        text = "Requests that wait until they are due."
        gauge = Gauge("gpu_manager_http_held_requests", text, registry=self.registry)
        gauge.set_function(lambda: len(requests))
        self._unusable.labels("closed").set_function(is_closed)
        self._unusable.labels("outdated").set_function(is_outdated)

    def text(self) -> bytes:
        """Return the metrics in the exposition format, with all changes up to now counted.

        Of a lost state there is nothing to show but that it is lost.
        """
        try:
            self._watch.read(lambda cluster, now: None)
        except StateLostError:
            self._unusable.labels("lost").set(1)
            return generate_latest(self._without_state)
        self._unusable.labels("lost").set(0)
        return generate_latest(self.registry)

    def _count(self, change: changes.Change, life: Life | None) -> None:
        if (part := CLUSTER_CHANGES.get(type(change))) is not None:
            self._cluster_changes.labels(part).inc()
        if life is None:
            return
        match change:
            case changes.Granted():
                for node in {member.node for member in life.granted.members}:
                    self._allocations.labels(node).inc()
                self._waits.observe(life.waited_s)
            case changes.Released():
                self._releases.inc()
            case changes.Expired() if _was_lost(change, life):
                self._expirations.labels("false").inc()
            case changes.Quarantined() | changes.MembersReleased() if not life.was_quarantined(change.at):
                self._expirations.labels("true").inc()
            case changes.Preempting() if change.preemptor:
                self._preemptions.labels(_reason_of(change, life)).inc()
        if isinstance(change, changes.ENDS) and len(life.ends) == 1:
            self._durations.observe(max(change.at - life.granted.granted_at, 0.0))


def _was_lost(change: changes.Expired, life: Life) -> bool:
    """Return whether a lease ended that its worker should have renewed: no hold, nor after its grace."""
    is_preempted = life.preempted_by and change.at >= life.lease.preempt_until
    return not (is_preempted or is_hold(life.lease.lease_id, life.lease.request.labels))


def _reason_of(change: changes.Preempting, life: Life) -> str:
    """Return why a lease is preempted: by whom, at which limit, or by which right of the preemptor."""
    if change.by_operator:
        return "operator"
    if change.preemptor in LIMITS:
        return preemptor_in_words(change.preemptor)
    if is_window(change.preemptor):
        return "maintenance"
    is_own = life.preemptor is not None and life.preemptor.team == life.lease.request.team
    return "priority" if is_own else "guarantee"


class _State:
    """Collector of gauges from the state at the time of the scrape."""

    def __init__(self, watch: StateFollower) -> None:
        self._watch = watch

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        yield from self._watch.read(self._families)

    @staticmethod
    def _families(cluster: ClusterState, now: float) -> list[Metric]:
        of_type = ("server", "gpu_type")
        free = family("gpus_free", "Free GPUs, GPU fractions included.", *of_type)
        allocated = family("gpus_allocated", "Allocated GPUs, GPU fractions included.", *of_type)
        closed = family("gpus_closed", "Unused GPUs that take no new leases.", *of_type)
        cpus_free = family("cpus_free", "Free CPUs.", "server")
        cpus_allocated = family("cpus_allocated", "Allocated CPUs.", "server")
        cpus_closed = family("cpus_closed", "Unused CPUs of servers that take no new leases.", "server")
        is_open = family("server_open", "1 if the server takes new leases.", "server")
        failed = family("server_failed", "1 if the server was drained as failed.", "server")
        for state in cluster.nodes:
            for gpu_type, (unused_milli, closed_milli, total_milli) in _milli_by_type(state).items():
                unused, withheld = unused_milli / MILLI_PER_GPU, closed_milli / MILLI_PER_GPU
                free.add_metric((state.name, gpu_type), unused if state.is_open else 0)
                closed.add_metric((state.name, gpu_type), withheld + (0 if state.is_open else unused))
                allocated.add_metric((state.name, gpu_type), total_milli / MILLI_PER_GPU - unused - withheld)
            cpus = cpu_usage(state)
            cpus_free.add_metric((state.name,), cpus.free)
            cpus_allocated.add_metric((state.name,), cpus.used)
            cpus_closed.add_metric((state.name,), cpus.closed)
            is_open.add_metric((state.name,), float(state.is_open))
            failed.add_metric((state.name,), float(state.drained is not None and state.drained.failed))
        of_team = family(
            "team_gpus",
            "GPUs of a team: guaranteed, allocated, and borrowed beyond the guarantee.",
            "team",
            "kind",
        )
        for account in () if cluster.ledger is None else cluster.ledger.accounts.values():
            for kind, milli in (
                ("guaranteed", account.guaranteed),
                ("allocated", account.allocated),
                ("borrowed", max(account.allocated - account.guaranteed, 0)),
            ):
                of_team.add_metric((account.name, kind), milli / MILLI_PER_GPU)
        busy = {lease.key for lease in under_maintenance(cluster, now)}
        preempting = [cluster.leases[lease_id].quarantined for lease_id in cluster.preempting]
        ending = family(
            "leases_preempting",
            "Leases that are being preempted; stuck: still held after their grace.",
            "stuck",
        )
        for stuck in (True, False):
            ending.add_metric((str(stuck).lower(),), preempting.count(stuck))
        oldest = min((entry.queued_at for entry in cluster.pending.values()), default=now)
        single = {
            "leases_under_maintenance": ("Leases on servers that are in a maintenance window.", len(busy)),
            "deadlines_at_risk": (
                "Leases and pending requests that may miss their deadline.",
                len(cluster.at_risk),
            ),
            "announced_demands": (
                "Demands that tasks of running DAGs are announced to make.",
                len(cluster.announced),
            ),
            "queue_length": ("Pending requests.", len(cluster.pending)),
            "queue_oldest_seconds": ("Age of the oldest pending request.", max(now - oldest, 0.0)),
        }
        return [
            *(free, allocated, closed, cpus_free, cpus_allocated, cpus_closed),
            *(is_open, failed, of_team, ending),
            *_leases(cluster),
            *(GaugeMetricFamily(f"gpu_manager_{name}", *given) for name, given in single.items()),
        ]


def _leases(cluster: ClusterState) -> list[Metric]:
    """Return the number of leases by state, and one gauge for each that is quarantined."""
    live = family("leases", "Live leases by state.", "state")
    quarantined = family(
        "lease_quarantined",
        "1 for each server of a lease that was not renewed and whose job may still run there.",
        *("lease", "team", "server"),
    )
    counts = dict.fromkeys(("running", "preempting", "quarantined"), 0)
    for lease in (*cluster.leases.values(), *cluster.remainders.values()):
        counts["quarantined" if lease.quarantined else "preempting" if lease.preempted_by else "running"] += 1
        for server in {member.node for member in lease.members} if lease.quarantined else ():
            quarantined.add_metric((name_of(lease), lease.request.team, server), 1)
    for state, count in counts.items():
        live.add_metric((state,), count)
    return [live, quarantined]


def _milli_by_type(state: NodeState) -> dict[str, tuple[int, int, int]]:
    """Return GPU type -> (free, closed or being cleaned, total) in thousandths of a GPU."""
    by_type: dict[str, tuple[int, int, int]] = {}
    withheld = withheld_milli(state)
    for gpu in state.node.gpus:
        free, closed, total = by_type.get(gpu.gpu_type, (0, 0, 0))
        free += state.gpu_free[gpu.gpu_id]
        closed += withheld.get(gpu.gpu_id, 0)
        by_type[gpu.gpu_type] = free, closed, total + MILLI_PER_GPU
    return by_type
