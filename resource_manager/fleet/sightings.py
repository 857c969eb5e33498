"""Sightings of placed jobs on a server: which its agent saw run, and which of them it no longer sees.

A job that was seen once is not started a second time, so a later sight of a whole server without it says that
it is gone for good. One that was never seen may still be started late: of it an agent can say nothing. The
leases of Airflow's tasks are left to their triggers and to `reconcile`, which collect the results of jobs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from resource_manager.agent.report_format import Report
from resource_manager.core.cluster import ClusterState
from resource_manager.core.gpu_state import leases_on
from resource_manager.core.identifiers import job_number, number_of_key
from resource_manager.core.maintenance import to_the_minute
from resource_manager.core.models import Lease, Placement, has_stored_job
from resource_manager.core.names import listed
from resource_manager.core.node_state import NodeState
from resource_manager.fleet.transitions import is_mps_server, is_of
from resource_manager.manager.agent_jobs import is_there

CONFIRMATIONS = 2
"""Number of complete lists of jobs in a row without a job after which it is known to be gone."""

LAUNCHERS = ("local", "ssh", "terminal", "agent")
"""Launchers whose jobs bear their key in each process; those of others are not looked for."""


@dataclass(frozen=True, slots=True)
class Sightings:
    """What was seen so far of the placed jobs of one server.

    `seen` has the boot id under which each job was seen, by the number at the end of its key. `absent` counts
    by fencing token, of quarantined leases only, how often in a row none of its jobs was there; a count holds
    as long as the lease has the same end of its TTL, which a renewal moves.
    """

    seen: dict[str, str] = field(default_factory=dict)
    absent: dict[int, tuple[int, float]] = field(default_factory=dict)


def sightings_after(state: NodeState, report: Report, before: Sightings) -> Sightings:
    """Return the sightings with a report of the node."""
    after = Sightings()
    present = {number for number in map(number_of_key, _keys_in(report)) if number}
    for lease in state.leases.values():
        jobs = _jobs_on(state, lease, report.machine)
        if jobs is None:
            continue
        numbers = {_number(lease, rank) for rank, _ in jobs}
        boot_id = report.boot_id or ""
        after.seen.update({number: before.seen[number] for number in numbers & before.seen.keys()})
        after.seen.update(dict.fromkeys(numbers & present, boot_id))
        if not _is_awaited(lease) or not numbers <= after.seen.keys():
            continue
        token, epoch = lease.fencing_token, _epoch(lease)
        count, of = before.absent.get(token, (-1, epoch))
        if of != epoch:
            count = -1
        if numbers & present:
            count = 0
        elif boot_id and all(after.seen[number] not in ("", boot_id) for number in numbers):
            count = CONFIRMATIONS  # the server was started again, and its processes are gone
        elif count < 0:
            count = 0  # the list of jobs may be older than the quarantine
        elif report.jobs is not None:
            is_gone = report.jobs.complete and all(_is_free(state, report, lease, m) for _, m in jobs)
            count = count + 1 if is_gone else 0
        after.absent[token] = (count, epoch)
    return after


def is_list_wanted(state: NodeState, machine: str | None, known: Sightings) -> bool:
    """Return True if the next report should list the jobs: one was not seen yet, or may be gone."""
    for lease in state.leases.values():
        jobs = _jobs_on(state, lease, machine)
        if jobs and (_is_awaited(lease) or any(_number(lease, rank) not in known.seen for rank, _ in jobs)):
            return True
    return False


def leases_gone(cluster: ClusterState, report: Report, known: Mapping[str, Sightings]) -> Iterator[Lease]:
    """Yield the quarantined leases with a member on the report's node, and a process on no server any more.

    `known` are the sightings of this node, and of the nodes of other members. A stored job of which the
    report tells the end is none of them: its lease is released with that.
    """
    for lease in cluster.node(report.server).leases.values():
        if not _is_awaited(lease) or _tells_end(report, lease):
            continue
        counts = [
            known[member.node].absent.get(lease.fencing_token, (0, math.nan))
            if member.node in known and cluster.node(member.node).watched
            else (0, math.nan)
            for member in lease.members
        ]
        if all(count >= CONFIRMATIONS and epoch == _epoch(lease) for count, epoch in counts):
            yield lease


def _tells_end(report: Report, lease: Lease) -> bool:
    jobs = zip(lease.ranked, lease.places, strict=False)
    own = [(_number(lease, rank), place) for (rank, member), place in jobs if member.node == report.server]
    ended = {number_of_key(run.key) for run in report.runs or () if run.state == "finished"}
    return has_stored_job(lease.request.labels) and all(
        number in ended and is_there(report.here, place) for number, place in own
    )


def partners(state: NodeState, known: Sightings) -> set[str]:
    """Return the other nodes of the gangs that are no longer seen on this one."""
    leases = (lease for lease in state.leases.values() if lease.fencing_token in known.absent)
    return {member.node for lease in leases for member in lease.members} - {state.name}


def gone_in_words(lease: Lease, now: float) -> str:
    """Return how the job is known to be gone: `its agent found no process of it on gpu-c at …`."""
    names = list(dict.fromkeys(member.node for member in lease.members))
    return f"its agent found no process of it on {listed(names, 1)} at {to_the_minute(now)}"


def _is_awaited(lease: Lease) -> bool:
    """Return True if the lease waits for the end of its job, which nobody else watches."""
    is_of_task = {"instance", "dag_id"} <= lease.request.labels.keys()
    return lease.quarantined and (lease.revoked or not is_of_task)


def _jobs_on(state: NodeState, lease: Lease, machine: str | None) -> list[tuple[int, Placement]] | None:
    """Return rank and placement of the lease's jobs there; None if the agent cannot tell of one of them."""
    if not lease.places:
        return None
    found: list[tuple[int, Placement]] = []
    for (rank, member), place in zip(lease.ranked, lease.places, strict=True):
        if member.node == state.name:
            if place.launcher not in LAUNCHERS or not machine or place.machine != machine:
                return None
            found.append((rank, member))
    return found


def _number(lease: Lease, rank: int) -> str:
    """Return the number at the end of the key of a member's job."""
    return job_number(lease.fencing_token, rank, lease.request.nodes)


def _keys_in(report: Report) -> Iterator[str]:
    yield from () if report.jobs is None else report.jobs.keys
    yield from (run.key for run in report.runs or () if run.state == "running")
    for gpu in report.gpus:
        yield from (process.job for process in gpu.processes or () if process.job)


def _epoch(lease: Lease) -> float:
    return lease.expires_at if lease.expires_at < math.inf else 0.0


def _is_free(state: NodeState, report: Report, lease: Lease, member: Placement) -> bool:
    """Return True if nobody computes on the member's GPUs but leases that hold parts of the same ones."""
    by_uuid = {gpu.uuid: gpu for gpu in report.gpus if gpu.uuid is not None}
    for gpu_id in state.gpu_ids_of(member):
        gpu = by_uuid.get(state.gpu_uuids.get(gpu_id, ""))
        if gpu is None or gpu.lost or gpu.processes is None:
            return False
        others = [other for other in leases_on(state, gpu_id) if other.key != lease.key]
        for process in gpu.processes:
            is_other = any(is_of(process, other.lease_id, other.fencing_token) for other in others)
            if not (is_other or is_mps_server(state, process)):
                return False
    return True
