"""Plain dictionaries for callers: allocations, queue entries and summaries with the original's keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from resource_manager.core import lease_limits
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.core.models import MILLI_PER_GPU, Gpu, Lease, Node, Placement, Request
from resource_manager.core.name_lookup import name_in
from resource_manager.core.names import display_name, name_of, short, short_id
from resource_manager.manager import results
from resource_manager.manager.answer_words import duration
from resource_manager.manager.plurals import times
from resource_manager.manager.refusal_wording import detail_of
from resource_manager.scheduling.reasons.announced_arrivals import Arrival
from resource_manager.scheduling.reasons.feasibility import Standing, standings
from resource_manager.scheduling.reasons.lease_ends import MAX_PLAYS
from resource_manager.scheduling.reasons.start_estimates import Start
from resource_manager.scheduling.scheduling_pass import SchedulingPass


def allocation(cluster: ClusterState, lease: Lease) -> results.Allocation:
    """Return an allocation result (original design, section 6.1.2), extended by fields of the lease."""
    request = lease.request
    members = [member_view(cluster, request, rank, placed) for rank, placed in lease.ranked]
    first = members[0]
    return {
        "server_id": first["server_id"],
        "server_name": first["server_name"],
        "gpu_ids": list(first["gpu_ids"]),
        "cpu_count": first["cpu_count"],
        "gpu_devices": ",".join(map(str, first["gpu_ids"])),
        "gpu_uuids": list(first["gpu_uuids"]),
        "task_id": request.lease_id,
        "name": display_name(request.lease_id, request.labels),
        "short_id": short_id(lease.sequence),
        "address": first["address"],
        "vendor": first["vendor"],
        "gpu_memory_mib": first["gpu_memory_mib"],
        "fencing_token": lease.fencing_token,
        "granted_at": lease.granted_at,
        "expires_at": None if lease.expires_at == math.inf else lease.expires_at,
        "queued_at": lease.queued_at,
        "state": "ERROR" if lease.quarantined else "PREEMPTING" if lease.preempted_by else "RUNNING",
        "quarantined": lease.quarantined,
        "preempted_by": preemptor_in_words(lease.preempted_by) or None,
        "until": None if lease.preempt_until == math.inf else lease.preempt_until,
        "checkpoint_at": lease.checkpoint_at,
        "gpu_failed": "" if (failure := cluster.gpu_failure(lease)) is None else failure.reason,
        "job_places": [results.answer_of(results.Place, place) for place in lease.places],
        "revoked": lease.revoked,
        "reason": _reason(cluster, lease),
        "members": members,
        **_demand(request, cluster),
    }


def _reason(cluster: ClusterState, lease: Lease) -> str:
    if lease.quarantined:
        return quarantine_in_words(lease)
    if not (by := lease.preempted_by):
        return ""
    return lease_limits.in_words(by, name_in(cluster, preemptor_in_words(by)))


def quarantine_in_words(lease: Lease) -> str:
    """Return why a lease is quarantined: who may still use its GPUs, where, and what ends it."""
    owner = lease.request.owner or "no owner"
    servers = ", ".join(dict.fromkeys(member.node for member in lease.members))
    why = "was released by force" if lease.revoked else "was not renewed"
    if lease.preempted_by:
        why = "is held beyond its preemption"
    if lease.ranks:
        why = "is what is left of its gang, whose other members were released"
    if not lease.places:
        is_kept = lease.request.quarantine or lease.ranks
        ends = "then release the lease" if is_kept else "or wait until nobody renews the lease"
        who = f"{name_of(lease)} of {owner} {why}"
        return f"{who}, and its process on {servers} may still run: end that, {ends}"
    where = f"its job on {servers}"
    if lease.places[0].user:
        where += f" ({lease.places[0].launcher}, user {lease.places[0].user})"
    return (
        f"{name_of(lease)} of {owner} {why}, and {where} may still run: stop it, or release it with "
        "--gone once it is known to be gone"
    )


def member_view(cluster: ClusterState, request: Request, rank: int, placed: Placement) -> results.Member:
    state = cluster.by_name[placed.node]
    node, gpu_ids = state.node, list(state.gpu_ids_of(placed))
    gpus = [gpu for gpu in node.gpus if gpu.gpu_id in gpu_ids]
    memory_mib = min((gpu.memory_mib for gpu in gpus), default=0)
    account = None if cluster.ledger is None else cluster.ledger.accounts.get(request.team)
    user = "" if account is None else account.team.user
    return {
        "rank": rank,
        "server_id": node.server_id,
        "server_name": node.name,
        "address": _address(node, user),
        "user": user,
        "gpu_ids": gpu_ids,
        "gpu_uuids": list(placed.gpu_uuids),
        "vendor": gpus[0].vendor if gpus else node.vendor,
        "gpu_memory_mib": memory_mib * request.gpu_milli // MILLI_PER_GPU,
        "mps_folder": _mps_folder(node, request, gpus),
        "confine": confine_of(cluster, node),
        "writable": writable_of(cluster, node),
        "cpu_count": request.resources.get("cpus", 0),
        "port": placed.port,
        "interface": node.interface,
        "job_user": node.job_user,
    }


def _address(node: Node, user: str) -> str:
    if not user or not node.address:
        return node.address
    return f"{user}@{node.address.rpartition('@')[2]}"


def confine_of(cluster: ClusterState, node: Node) -> str:
    """Return whether plain jobs on the node run within walls: `off`, `try` or `must`."""
    return node.confine or cluster.settings.confine


def writable_of(cluster: ClusterState, node: Node) -> list[str]:
    """Return the paths of the node that a job within walls may write to, besides its own folder."""
    return [*dict.fromkeys((*cluster.settings.writable, *node.writable))]


def walls_in_words(lease: Lease, node: str = "") -> str:
    """Return what keeps the jobs of a lease, or those on one node, to their GPUs; empty if nothing is to."""
    placed = zip(lease.members, lease.places, strict=False)
    found = {place.walls: member.node for member, place in placed if member.node == node or not node}
    found.pop("", None)
    return ", ".join(walls if len(found) == 1 else f"{on}: {walls}" for walls, on in found.items())


def _mps_folder(node: Node, request: Request, gpus: Sequence[Gpu]) -> str:
    """Return the folder of the MPS daemon of the GPU of a fraction, empty if none is kept for it."""
    if request.gpu_milli == MILLI_PER_GPU or not node.mps:
        return ""
    return next((f"{node.mps}/{gpu.uuid}" for gpu in gpus if gpu.uuid and not gpu.is_mig), "")


def sharing_in_words(request: Request, members: Sequence[results.Member]) -> str:
    """Return whether something keeps a GPU fraction to its part; empty for whole GPUs."""
    if request.gpu_milli == MILLI_PER_GPU or not members:
        return ""
    without = [member["server_name"] for member in members if not member["mps_folder"]]
    if not without:
        return "enforced by MPS"
    return f"accounted, not enforced: no MPS daemon is kept on {', '.join(dict.fromkeys(without))}"


def pending(standing: Standing, cluster: ClusterState, now: float) -> results.QueueEntry:
    """Return a queue entry: position from 1 in queue order; `kind` and `reason` of the wait."""
    entry, request = standing.entry, standing.entry.request
    return {
        "task_id": request.lease_id,
        "name": display_name(request.lease_id, request.labels),
        "short_id": short_id(entry.sequence),
        "state": "WAITING",
        "position": standing.position,
        "kind": str(standing.refusal.kind),
        "reason": detail_of(standing.refusal),
        "sequence": entry.sequence,
        "queued_at": entry.queued_at,
        "waited_s": max(now - entry.queued_at, 0.0),
        "required_gpus": request.gpus,
        "required_cpus": request.resources.get("cpus", 0),
        **_demand(request, cluster),  # type: ignore[typeddict-item]  # it has no `estimated_start`
    }


def queue(cluster: ClusterState, current: SchedulingPass) -> list[results.QueueEntry]:
    """Return every queue entry in queue order, with the reason of its wait."""
    return [pending(standing, cluster, current.now) for standing in standings(cluster, current)]


def estimate(start: Start, confidence: str = "few data") -> results.ExpectedStart:
    """Return the expected start, in seconds since the epoch, its interval, server and confidence.

    If it cannot be estimated, `at` is None, `confidence` is unknown and `detail` has the reason.
    """
    confidence = "unknown" if start.at is None else confidence
    more = {"server_name": start.node, "confidence": confidence, "detail": detail_of(start.why)}
    return results.answer_of(results.ExpectedStart, start, **more)


def coming(arrival: Arrival) -> results.ComingDemand:
    """Return an announced demand, and when it should be made."""
    announced, request = arrival.announced, arrival.announced.request
    earliest, at, latest = arrival.times or (None, None, None)
    detail = ""
    if at is None:
        name = short(arrival.unknown)
        no_run = f"no earlier run of {name} is known"
        detail = f"it is unknown when {name} starts" if arrival.waits else no_run
    return results.answer_of(
        results.ComingDemand,
        request,
        task_id=request.lease_id,
        name=display_name(request.lease_id, request.labels),
        required_gpus=request.gpus,
        gpu_types=list(request.gpu_types),
        copies=announced.copies,
        labels=dict(request.labels),
        announced_at=announced.at,
        at=at,
        earliest=earliest,
        latest=latest,
        detail=detail,
    )


def gpus_required(demand: Mapping[str, Any]) -> str:
    """Return the GPUs that one request asks for: `4`, `0.5`, of a gang `2 × 8`."""
    return times(demand["nodes"], f"{demand['required_gpus'] * demand['gpu_milli'] / MILLI_PER_GPU:g}")


def gpus_coming(demand: Mapping[str, Any]) -> str:
    """Return the GPUs of an announced demand: `4`, `0.5`, of 20 mapped tasks `20 × 4`, of a gang `2 × 8`."""
    gpus = gpus_required(demand)
    return times(demand["copies"], gpus) if demand["copies"] else f"? × {gpus}"


def coming_in_words(demands: Sequence[Mapping[str, Any]], now: float) -> str:
    """Return how many GPUs more will be asked for, and by when; empty if nothing is announced."""

    def gpus(entries: Iterable[Mapping[str, Any]]) -> str:
        milli = sum(
            each["required_gpus"] * each["gpu_milli"] * each["nodes"] * max(each["copies"], 1)
            for each in entries
        )
        return f"{milli / MILLI_PER_GPU:g} more " + ("GPU" if milli == MILLI_PER_GPU else "GPUs")

    timed = [each for each in demands if each["at"] is not None]
    open_ended = [each for each in demands if each["at"] is None]
    parts = []
    if timed:
        parts.append(f"within {duration(max(each['at'] for each in timed) - now)} {gpus(timed)}")
    if open_ended:
        parts.append(f"at an unknown time {gpus(open_ended)}")
    return f"{', '.join(parts)} will be asked for" if parts else ""


def queue_entry(cluster: ClusterState, lease_id: str, current: SchedulingPass) -> results.QueueEntry:
    """Return one pending request, with its position and the reason of its wait."""
    return pending(next(standings(cluster, current, only=(lease_id,))), cluster, current.now)


def _demand(request: Request, cluster: ClusterState) -> results.Requested:
    return {
        "gpu_milli": request.gpu_milli,
        "gpu_types": list(request.gpu_types),
        "types": str(request.types),
        "gpu_memory": request.gpu_memory,
        "link": str(request.link),
        "nodes": request.nodes,
        "resources": dict(request.resources),
        "priority": request.priority,
        "preemptible": request.preemptible,
        "preempt_grace_s": request.preempt_grace_s,
        "preempt_signal": request.preempt_signal,
        "team": request.team,
        "owner": request.owner,
        "expected_runtime_s": request.expected_runtime_s,
        "max_runtime_s": request.max_runtime_s,
        "requeue_after_s": request.requeue_after_s,
        "on_idle": request.on_idle,
        "deadline_at": request.deadline_at,
        "late_end": cluster.at_risk.get(request.lease_id),
        "labels": dict(request.labels),
    }


ONE_COURSE = "from one simulated course: the interval is not known"


def is_of_one_course(start: Mapping[str, Any]) -> bool:
    """Return whether an expected start stands on one play alone, and such estimates are not calibrated."""
    return start.get("plays") == 1 and start["confidence"] != "calibrated"


def interval_in_words(start: Mapping[str, Any], now: float) -> str:
    """Return how sure an expected start is: `2 min to 1.0 h, calibrated`; few plays are told of."""
    found = [str(start["confidence"])]
    earliest, latest = start.get("earliest"), start.get("latest")
    if is_of_one_course(start):
        return ONE_COURSE
    if earliest is not None and earliest != latest:
        end = "after more than " + duration(earliest - now)
        if latest is not None:
            end = f"{duration(earliest - now)} to {duration(latest - now)}"
        found.insert(0, end)
    if 1 < start.get("plays", 1) < MAX_PLAYS:
        found.append(f"{start['plays']} plays only")
    return ", ".join(found)


def deadline_in_words(entry: Mapping[str, Any], now: float) -> str:
    """Return when a demand's deadline is, and when its task should end if that is later; else empty."""
    if (deadline_at := entry.get("deadline_at")) is None:
        return ""
    left_s = deadline_at - now
    found = f"deadline in {duration(left_s)}" if left_s > 0 else f"deadline {duration(-left_s)} ago"
    if entry["late_end"] is None:
        return found
    return f"{found}, at risk: should end in {duration(entry['late_end'] - now)}"
