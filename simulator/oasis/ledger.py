"""Allocations of the worker and parameter servers: one `ClusterState` per slot, changed by the allocator."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Gpu, Lease, Node, Request
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.placement.policies.first_fit import first_fit
from resource_manager.scheduling.queue.orders import fifo
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from simulator.errors import SimulationError
from simulator.oasis.model import GPU, Amounts, Instance, TrainingJob, Units, to_units

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

WORKER = "worker"
PS = "ps"

NODE_RESOURCES = ("", "micro_cpus", "memory_kb", "storage_kb", "bandwidth_kbps")
"""Names on a `Node`, in the order and units of `Units`; GPUs are devices there, not an amount."""


class Pool:
    """The servers of one role, with their free amounts in every slot as an array derived from the ledger.

    `capacity` is servers x resources, `free` is slots x servers x resources, both in `Units`.
    """

    def __init__(self, role: str, servers: Sequence[Amounts], first_index: int, slots: int) -> None:
        self.role = role
        self.first_index = first_index
        units = [to_units(server) for server in servers]
        self.capacity: Floats = np.array(units, dtype=float)
        self.total: Floats = self.capacity.sum(axis=0)
        self.free: Floats = np.repeat(self.capacity[np.newaxis], slots, axis=0)
        self.nodes = [
            Node(
                name=f"{role}-server-{index}",
                server_id=first_index + index,
                resources=dict(zip(NODE_RESOURCES[1:], capacity[1:], strict=True)),
                gpus=tuple(Gpu(gpu_id) for gpu_id in range(capacity[GPU])),
            )
            for index, capacity in enumerate(units)
        ]

    def __len__(self) -> int:
        return len(self.nodes)

    def fit_when_empty(self, job: TrainingJob) -> int:
        """Return how many workers (or PS) of the job fit when nothing else runs."""
        return int(max_multiple(self.capacity, demand_of(job, self.role)).sum())

    def fit(self, job: TrainingJob, first_slot: int, last_slot: int | None = None) -> Ints:
        """Return how many workers (or PS) of the job still fit on each server: slots x servers."""
        return max_multiple(self.free[first_slot:last_slot], demand_of(job, self.role))


def demand_of(job: TrainingJob, role: str) -> Units:
    """Return the demand of one worker, or one PS, of the job."""
    return job.worker_units if role == WORKER else job.ps_units


def max_multiple(free: Floats, demand: Units) -> Ints:
    """Return the largest whole n with n x demand <= free in every resource.

    `free` has resources last; an empty demand fits any number of times, returned as 2**31.
    """
    most: Floats = np.full(free.shape[:-1], 2.0**31)
    for r, amount in enumerate(demand):
        if amount:
            # Exact: both are whole numbers far below 2**53.
            np.minimum(most, free[..., r] // amount, out=most)
    return most.astype(np.int64)


class Ledger:
    """One cluster state per slot over the same servers, changed through the allocator only."""

    def __init__(self, instance: Instance) -> None:
        self.slots = instance.slots
        self.worker = Pool(WORKER, instance.worker_servers, 0, instance.slots)
        self.ps = Pool(PS, instance.ps_servers, len(self.worker), instance.slots)
        nodes = [*self.worker.nodes, *self.ps.nodes]
        self.states = [ClusterState(nodes) for _ in range(instance.slots)]
        self._marks = [state.mark for state in self.states]
        self._placed = [0] * instance.slots

    def pool(self, role: str) -> Pool:
        """Return the servers of the role."""
        return self.worker if role == WORKER else self.ps

    def place(self, slot: int, job: TrainingJob, role: str, server: int, count: int) -> Lease:
        """Allocate that many workers (or PS) of the job on the server, as one lease.

        Raises `SimulationError` if the allocator refuses: the scheduler's plan exceeds a capacity.
        """
        pool = self.pool(role)
        demand = demand_of(job, role)
        self._placed[slot] += 1
        request = Request(
            lease_id=f"{job.job_id}/{role}/{self._placed[slot]}",
            gpus=count * demand[GPU],
            resources={name: count * demand[r] for r, name in enumerate(NODE_RESOURCES) if r != GPU},
            required_node=pool.nodes[server].name,
            owner=job.job_id,
            labels={"role": role, "count": str(count)},
        )
        changes = allocator.allocate(self.states[slot], request, SchedulingPass(first_fit, fifo, slot))
        if not changes:
            raise SimulationError(
                f"slot {slot}: {count} x {role} of job {job.job_id!r} do not fit on {request.required_node}"
            )
        self._apply(slot, changes)
        return self.states[slot].leases[request.lease_id]

    def remove(self, slot: int, lease: Lease) -> None:
        """Release a lease of the slot."""
        self._apply(slot, lease_steps.release(self.states[slot], lease.lease_id, slot))

    def end_slot(self, slot: int) -> tuple[Lease, ...]:
        """Check the slot's state, release every lease and return the leases that ran."""
        state = self.states[slot]
        allocator.check(state)
        ran = tuple(state.leases.values())
        for lease in ran:
            self._apply(slot, lease_steps.release(state, lease.lease_id, slot, outcome="slot over"))
        return ran

    def _apply(self, slot: int, changes: list[Change]) -> None:
        state = self.states[slot]
        for change in changes:
            state.apply(change)
        changed = state.changed_since(self._marks[slot])
        self._marks[slot] = state.mark
        for index in range(len(state.nodes)) if changed is None else changed:
            pool = self.worker if index < self.ps.first_index else self.ps
            node = state.nodes[index]
            row = pool.free[slot, index - pool.first_index]
            row[GPU] = node.whole_free
            row[1:] = [node.free[name] for name in NODE_RESOURCES[1:]]


def count_of(lease: Lease) -> int:
    """Return how many workers (or PS) the lease is for."""
    return int(lease.request.labels["count"])


def role_of(lease: Lease) -> str:
    """Return `worker` or `ps`."""
    return lease.request.labels["role"]
