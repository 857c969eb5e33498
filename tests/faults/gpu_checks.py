"""Checks of a history of leases on GPUs that fail and idle, from what reports said, without the fold."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from resource_manager.core.changes import (
    AgentLost,
    AgentSeen,
    Change,
    Expired,
    GpuClosed,
    GpuOpened,
    Granted,
    Preempting,
    Released,
    Resumed,
)
from resource_manager.core.lease_limits import IDLE
from resource_manager.core.models import MILLI_PER_GPU, Lease
from resource_manager.fleet.silence import SILENT_INTERVALS

INTERVAL_S = 0.1
"""Interval of the reports."""


@dataclass(frozen=True, slots=True)
class Seen:
    """What an accepted report said, from this version on: each device there, with the jobs on it by token.

    It came at this time of the store, said that the devices in `idle` compute nothing, and led to version
    `after`.
    """

    version: int
    server: str
    jobs: dict[str, set[int]]
    at: float = 0.0
    idle: frozenset[str] = frozenset()
    after: int = 0

    def shows_idle(self, uuid: str, lease: Lease) -> bool:
        """Return whether a device computes nothing, or nothing of this lease."""
        return uuid in self.idle or lease.fencing_token not in self.jobs.get(uuid, {lease.fencing_token})


def check_gpus(history: Sequence[tuple[int, Change]], seen: Sequence[Seen]) -> list[str]:
    """Every grant on a silent server, of a closed or held GPU, or on a watched one not there or not clean.

    Devices go by UUID, whatever their numbers become.
    """
    complaints: list[str] = []
    watched: set[str] = set()
    silent: set[str] = set()
    closed: dict[tuple[str, int], str] = {}
    live: dict[int, Lease] = {}
    parts: dict[int, int] = {}
    for version, change in history:
        match change:
            case AgentSeen():
                watched.add(change.node)
                silent.discard(change.node)
            case AgentLost():
                silent.add(change.node)
            case Resumed():
                if change.node in silent:
                    watched.discard(change.node)
                silent.discard(change.node)
            case GpuClosed():
                closed[change.node, change.gpu_id] = change.uuid
            case GpuOpened():
                opened = closed.get((change.node, change.gpu_id))
                closed = {place: uuid for place, uuid in closed.items() if uuid != opened}
            case Released() | Expired():
                live.pop(change.fencing_token, None)
            case Granted(lease=lease):
                live[lease.fencing_token] = lease
                parts[lease.fencing_token] = lease.request.gpu_milli
                for member in lease.members:
                    last = [each for each in seen if each.server == member.node and each.version < version]
                    for gpu_id, uuid in zip(member.gpu_ids, member.gpu_uuids, strict=True):
                        if member.node in silent:
                            complaints.append(f"version {version}: a grant on {member.node}, which is silent")
                        which = f"version {version}: {lease.lease_id} got GPU {gpu_id} of {member.node}"
                        holders = [each for each in live.values() if uuid in each.placement.gpu_uuids]
                        taken = sum(each.request.gpu_milli for each in holders)
                        if uuid in closed.values():
                            complaints.append(f"{which}, which is closed")
                        if taken > MILLI_PER_GPU:
                            complaints.append(f"{which}, which is held already")
                        if member.node not in watched or not last:
                            continue
                        if uuid not in last[-1].jobs:
                            complaints.append(f"{which}, which was not there")
                            continue
                        left = last[-1].jobs[uuid] - live.keys()
                        if left and taken + sum(parts[token] for token in left) > MILLI_PER_GPU:
                            complaints.append(f"{which}, on which the job of lease {left} was left")
    return complaints


def check_idle(history: Sequence[tuple[int, Change]], seen: Sequence[Seen]) -> list[str]:
    """Every release of a lease as idle that was not measured to be so for long enough, and each not made."""
    complaints: list[str] = []
    live: dict[int, Lease] = {}
    over: set[int] = set()
    """Leases that are being preempted."""

    def note(version: int, change: Change) -> None:
        match change:
            case Granted(lease=lease):
                live[lease.fencing_token] = lease
            case Released() | Expired():
                live.pop(change.fencing_token, None)
            case Preempting(fencing_token=token):
                over.add(token)
                lease = live[token]
                past = [each for each in seen if each.version < version and each.at >= lease.granted_at]
                if change.preemptor == IDLE and not is_idle(lease, past):
                    complaints.append(f"version {version}: {lease.lease_id} is released, and was not idle")

    changes = list(history)
    for number, each in enumerate(seen):
        while changes and changes[0][0] <= each.version:
            note(*changes.pop(0))
        before = dict(live)
        while changes and changes[0][0] <= each.after:
            note(*changes.pop(0))
        for token, lease in before.items():
            is_here = lease.placement.node == each.server and token in live and token not in over
            past = [other for other in seen[: number + 1] if other.at > lease.granted_at]
            if is_here and is_idle(lease, past):
                complaints.append(f"version {each.version}: {lease.lease_id} is idle, and not released")
    for version, change in changes:
        note(version, change)
    return complaints


def is_idle(lease: Lease, past: Sequence[Seen]) -> bool:
    """Return whether the last of these reports shows all devices of a lease idle for as long as it may be."""
    own = [each for each in past if each.server == lease.placement.node]
    since = now = own[-1].at if own else 0.0
    for each in reversed(own):
        computes = [uuid for uuid in lease.placement.gpu_uuids if not each.shows_idle(uuid, lease)]
        if computes or since - each.at > SILENT_INTERVALS * INTERVAL_S:
            break
        since = each.at
    return now - since >= (lease.request.idle_after_s or math.inf)
