"""First states, single commits, and a seeded random walk through every kind of change."""

from __future__ import annotations

import random
import time
from dataclasses import replace

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Announced,
    Change,
    ClusterSettingsChanged,
    DeadlineRisk,
    Drained,
    GpuCleaned,
    GpuClosed,
    Granted,
    InventoryChanged,
    JobEnd,
    MaintenanceChanged,
    Outcome,
    Preempting,
    Resumed,
    TeamsChanged,
    Withdrawn,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings, HealthRule
from resource_manager.core.maintenance import Window
from resource_manager.core.models import Gpu, JobPlace, Lease, Node, Placement, Request, Spread
from resource_manager.core.teams import Team, Teams
from resource_manager.errors import StaleStateError
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies import get_policy
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store
from resource_manager.storage.clock import CLOCK_TOLERANCE_S


def servers(count: int = 4) -> tuple[Node, ...]:
    return tuple(
        Node(
            f"gpu-server-{i}",
            i,
            {"cpus": 64},
            tuple(Gpu(k, "A100") for k in range(8)),
            "10.0.0.1",
            labels={"rack": "ab"[i % 2]},
            gang_ports=(29500, 29503),
        )
        for i in range(count)
    )


def first_state(count: int = 4) -> Snapshot:
    return Snapshot(version=0, last_fencing_token=0, sequence=0, nodes=servers(count))


def started(store: Store, settings: ClusterSettings = ClusterSettings()) -> ClusterState:  # noqa: B008
    """Return a replica of the first state, which is written if the store is empty."""
    store.initialise(replace(first_state(), settings=settings))
    replica = store.refresh(None)
    assert replica is not None
    return replica


def granted(cluster: ClusterState, task_id: str, now: float, gpus: int = 2) -> Granted:
    """Return a lease of a minute on the first node that fits it."""
    request = Request(task_id, gpus, resources={"cpus": 4})
    node = next(cluster.candidates(request))
    placement = Placement(node.name, node.pick_gpus(request))
    return Granted(Lease(request, (placement,), cluster.last_fencing_token + 1, now, now + 60.0), now)


def add(store: Store, cluster: ClusterState, task_id: str) -> None:
    """Commit a lease and apply it to the replica; decide again if this machine stood still meanwhile."""
    while True:
        begun_at, now = time.monotonic(), store.now()
        change = granted(cluster, task_id, now)
        try:
            store.commit(cluster.version, [change], now=now)
        except StaleStateError as error:
            if "clock" not in str(error) or time.monotonic() - begun_at < CLOCK_TOLERANCE_S / 2:
                raise
            continue
        break
    cluster.apply(change)
    store.tidy_up(cluster)


STEPS = (
    "allocate", "submit", "release", "release", "members", "renew", "expire", "cancel", "preempt", "node",
    "gpu", "gpu", "gpu", "place", "revoke",
)  # fmt: skip


class Walk:
    """A source of random changes decided on a replica, which it does not change."""

    def __init__(self, seed: int, name: str = "task") -> None:
        self.rng = random.Random(seed)
        self.name = name
        self.count = 0
        self.policy = get_policy("first_fit")

    def request(self) -> Request:
        self.count += 1
        rng = self.rng
        return Request(
            f"{self.name}-{self.count}" if rng.random() < 0.8 else f"{self.name}/{self.count}",
            gpus := rng.randint(1, 8),
            gpu_milli=rng.choice((250, 1000)) if gpus == 1 else 1000,
            resources={"cpus": rng.randint(1, 32)},
            ttl_s=rng.choice((5.0, 60.0, float("inf"))),
            quarantine=rng.random() < 0.2,
            team=rng.choice(("", "vision", "nlp")),
            nodes=rng.choice((1, 1, 2)),
            spread=rng.choice(list(Spread)),
            same=rng.choice(("", "rack")),
        )

    def changes(self, cluster: ClusterState, now: float) -> list[Change]:
        """Return the changes of a step, some of which a caller asked for."""
        changes = self._changes(cluster, now)
        if changes and self.rng.random() < 0.5:
            changes[0] = replace(changes[0], by=self.rng.choice(("ada", "unix:bob@gpu-a")))
        return changes

    def _changes(self, cluster: ClusterState, now: float) -> list[Change]:
        rng = self.rng
        step = rng.choice(STEPS)
        if step == "allocate":
            return allocator.allocate(cluster, self.request(), SchedulingPass(self.policy, fifo, now))
        if step == "submit":
            return allocator.submit(cluster, self.request(), SchedulingPass(self.policy, fifo, now))
        if step == "expire":
            return self._with_dispatch(
                cluster, lease_steps.expire(cluster, now + rng.choice((0.0, 30.0))), now
            )
        if step == "cancel" and cluster.pending:
            gone = lease_steps.cancel(cluster, rng.choice(sorted(cluster.pending)), now, "tired")
            return self._with_dispatch(cluster, gone, now)
        if step == "release" and cluster.leases:
            lease = cluster.leases[rng.choice(sorted(cluster.leases))]
            failed = [member.node for member in lease.members if lease.fencing_token % 4 == 0]
            ended = lease_steps.release(
                cluster,
                lease.lease_id,
                now,
                outcome="success",
                job_end=JobEnd.ENDED,
                reason="no route",
                failed_nodes=failed,
            )
            return self._with_dispatch(cluster, ended, now)
        if step == "members" and (held := [*cluster.leases.values(), *cluster.remainders.values()]):
            lease = rng.choice(held)
            ranks = [rank for rank, _ in lease.ranked]
            ended = lease_steps.release_members(
                cluster,
                lease.lease_id,
                rng.sample(ranks, rng.randint(1, len(ranks))),
                now,
                fencing_token=lease.fencing_token,
                job_end=JobEnd.ENDED,
            )
            return self._with_dispatch(cluster, ended, now)
        if step == "renew" and (held := [lease for lease in cluster.leases.values() if not lease.revoked]):
            return lease_steps.renew(cluster, rng.choice(held).lease_id, now)
        if step == "place" and (held := [lease for lease in cluster.leases.values() if not lease.revoked]):
            lease = rng.choice(held)
            places = [JobPlace("ssh", machine=member.node, user="u") for member in lease.members]
            return lease_steps.place_job(
                cluster, lease.lease_id, places, now, fencing_token=lease.fencing_token
            )
        if step == "revoke" and (held := [lease for lease in cluster.leases.values() if lease.places]):
            return lease_steps.release(cluster, rng.choice(held).lease_id, now, job_end=JobEnd.FORCED)
        if step == "preempt" and cluster.leases:
            lease = cluster.leases[rng.choice(sorted(cluster.leases))]
            until = now + rng.choice((0.0, 60.0))
            if lease.lease_id not in cluster.preempting:
                return [Preempting(lease.lease_id, lease.fencing_token, "stronger", until, now)]
            ended = lease_steps.release(
                cluster, lease.lease_id, now, outcome=Outcome.PREEMPTED, job_end=JobEnd.ENDED
            )
            return self._with_dispatch(cluster, ended, now)
        if step == "node":
            return self._node(cluster, now)
        if step == "gpu":
            return self._with_dispatch(cluster, self._gpu(cluster, now), now)
        return []

    def _with_dispatch(self, cluster: ClusterState, changes: list[Change], now: float) -> list[Change]:
        return allocator.with_dispatch(cluster, changes, SchedulingPass(self.policy, fifo, now))

    def _gpu(self, cluster: ClusterState, now: float) -> list[Change]:
        rng = self.rng
        state = rng.choice(cluster.nodes)
        kind = rng.randrange(5)
        if kind == 0:
            is_lost = state.watched and rng.random() < 0.5
            return [AgentLost(state.name, now, now - 60.0) if is_lost else AgentSeen(state.name, now)]
        if kind == 1 and not state.closed_gpus:
            return [GpuClosed(state.name, rng.randrange(8), "", "xid 79", now, stop=rng.random() < 0.5)]
        if kind == 2 and state.closed_gpus:
            return allocator.resume_gpu(cluster, state.name, rng.choice(sorted(state.closed_gpus)), now)
        dirty = [entry for node in cluster.nodes for entry in node.cleaning.values()]
        return [GpuCleaned(each.node, each.gpu_id, each.fencing_token, now, 0.25, 1.5) for each in dirty]

    def _node(self, cluster: ClusterState, now: float) -> list[Change]:
        open_nodes = [state for state in cluster.nodes if state.is_open]
        kind = self.rng.randrange(9)
        if kind == 0 and len(open_nodes) > 2:
            return [Drained(open_nodes[-1].name, now, "fans", failed=self.rng.random() < 0.5)]
        if kind == 1:
            return [Resumed(state.name, now) for state in cluster.nodes if state.drained or state.silent]
        if kind == 2:
            keep = servers(self.rng.randint(3, 5))
            adopted = self.rng.choice(("", keep[0].name))
            return [
                InventoryChanged(
                    tuple(replace(node, address="10.0.0.2") for node in keep), now, adopted=adopted
                )
            ]
        if kind == 3:
            team = Team("vision", self.rng.randint(0, 8), limit=self.rng.choice((None, 9)))
            return [TeamsChanged(self.rng.choice((Teams(), Teams((team,)))), now)]
        if kind == 4:
            window = Window(1, (cluster.nodes[0].name,), now + 9.5, now + 20.0, 604800.0, "fans", True)
            return [MaintenanceChanged(self.rng.choice(((), (window,))), now)]
        if kind == 5:
            health = (HealthRule("xid 63", self.rng.choice(("note", "ignore"))),)
            settings = ClusterSettings("fgd", order="fifo", min_gpus=0, prices={"A100": 2.5}, health=health)
            return [ClusterSettingsChanged(self.rng.choice((ClusterSettings(), settings)), now)]
        if kind == 6:
            return [DeadlineRisk(self.rng.choice("ab"), now, self.rng.choice((None, now + 1.5)))]
        if kind == 7:  # by one of the next requests, or the mapped task that they are of
            name = self.rng.choice((f"{self.name}-{self.count + self.rng.randint(1, 3)}", self.name))
            if name in cluster.announced:
                return [Withdrawn(name, now, "the run has ended")]
            return [Announced(Request(name, 1, labels={"dag_id": "d"}), now, ("u",), 20)]
        return []
