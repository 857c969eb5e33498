"""Leases in Redis: the counters that they move, and each lease read from the changes in effect for it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar

from resource_manager.core.changes import (
    Change,
    Granted,
    JobPlaced,
    MembersReleased,
    Preempting,
    Quarantined,
    Queued,
    Renewed,
)
from resource_manager.core.models import Lease
from resource_manager.errors import CorruptStateError
from resource_manager.storage.codec import change_from_json

ChangeT = TypeVar("ChangeT", bound=Change)


def counters_after(changes: Sequence[Change]) -> tuple[str, str, int]:
    """Return the fencing token and node of the last grant, empty if there is none, and the last sequence."""
    fencing, last_node, sequence = "", "", 0
    for change in changes:
        if isinstance(change, Granted):
            fencing, last_node = str(change.lease.fencing_token), change.lease.members[-1].node
            sequence = max(sequence, change.lease.sequence)
        elif isinstance(change, Queued):
            sequence = max(sequence, change.sequence)
    return fencing, last_node, sequence


def read_as(text: bytes, kind: type[ChangeT], name: str) -> ChangeT:
    """Parse a change of that kind; raises `CorruptStateError`, which calls it by the name."""
    change = change_from_json(text)
    if not isinstance(change, kind):
        raise CorruptStateError(f"not {name}: {text[:120]!r}")
    return change


def read_lease(
    text: bytes, renewal: bytes | None, preempting: bytes | None, quarantine: bytes | None
) -> Lease:
    """Return the lease of a grant with the last change of each kind."""
    lease = _placed(text)
    if preempting is not None:
        taken = read_as(preempting, Preempting, "a preemption")
        lease = replace(lease, preempted_by=taken.preemptor, preempt_until=taken.until)
    if renewal is not None:
        renewed = read_as(renewal, Renewed, "a renewal")
        lease = replace(
            lease,
            expires_at=renewed.expires_at,
            quarantined=bool(lease.preempted_by) and renewed.at > lease.preempt_until,
            checkpoint_at=renewed.checkpoint_at,
        )
    if quarantine is not None:
        revoked = read_as(quarantine, Quarantined, "a quarantine").revoked
        lease = replace(lease, quarantined=True, revoked=lease.revoked or revoked)
    return lease


def _placed(text: bytes) -> Lease:
    """Return a lease with the places of its jobs, which are on a second line if there are any."""
    granted, _, placed = text.partition(b"\n")
    lease = read_as(granted, Granted, "a lease").lease
    return replace(lease, places=read_as(placed, JobPlaced, "the places of jobs").places) if placed else lease


def read_remainder(text: bytes, released: bytes) -> Lease:
    """Return what is left of a lease after the releases of members, one a line."""
    lease = _placed(text)
    for line in released.splitlines():
        ended = read_as(line, MembersReleased, "a release of members")
        if (rest := lease.without(ended.ranks)) is None:
            raise CorruptStateError(f"a remainder without members: {text[:120]!r}")
        lease = rest
    return lease
