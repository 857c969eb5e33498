"""Changes that the owner of a lease asks for, and its expiry."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from math import isfinite
from numbers import Real

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Expired,
    JobEnd,
    JobPlaced,
    MembersReleased,
    Outcome,
    Quarantined,
    Renewed,
    new_released,
)
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import as_text
from resource_manager.core.models import MAX_RENEWAL_S, JobPlace, Lease, has_stored_job
from resource_manager.core.names import is_hold, name_of, short
from resource_manager.errors import InvalidRequestError, JobPlacedError, LeaseNotFoundError, OtherOwnerError
from resource_manager.scheduling.preemption.preempting import preemption_of
from resource_manager.scheduling.preemption.requeueing import outcome_of, overdue, requeued
from resource_manager.scheduling.queue.giving_back import given_back, maintenance_met
from resource_manager.scheduling.queue.runtime_limits import (
    preempted_at_limit,
    reached,
    renewed_until,
    within_grace,
)
from resource_manager.scheduling.queue.windows import ending
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_REASON = 240
"""Maximum length of the reason of a release, which the history keeps."""


def release(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    *,
    fencing_token: int | None = None,
    owner: str | None = None,
    outcome: str = "",
    job_end: JobEnd = JobEnd.UNKNOWN,
    reason: str = "",
    failed_nodes: Collection[str] = (),
) -> list[Change]:
    """Return the release of a lease, or by force the quarantine of one whose job may run.

    `reason` is a sentence for people, cut if it is long. `failed_nodes` are those on which its job did not
    start: the next request of that id avoids them. The request of a lease that was preempted, or whose job
    did not start, is pending again.

    Raises `LeaseNotFoundError` if there is none with that fencing token, `OtherOwnerError` if it is not that
    owner's, `JobPlacedError` if its job was placed and `job_end` does not say that it is gone, and
    `UnknownNodeError` for a failed node that is not in the inventory.
    """
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    outcome, why = outcome_of(lease, outcome), short(reason, MAX_REASON)
    if lease.places and job_end in (JobEnd.UNKNOWN, JobEnd.FORCED):
        if job_end is JobEnd.UNKNOWN:
            raise _job_placed(lease)
        # What is left of a gang is nobody's to renew already.
        return [] if lease.revoked or lease.ranks else [Quarantined(lease_id, lease.fencing_token, now, True)]
    if lease.ranks:
        return [MembersReleased(lease_id, lease.fencing_token, lease.ranks, now, outcome, reason=why)]
    for name in failed_nodes:
        cluster.node(name)
    released = new_released(
        lease_id,
        lease.fencing_token,
        now,
        outcome,
        reason=why,
        failed_nodes=tuple(dict.fromkeys(failed_nodes)),
    )
    if outcome == Outcome.NOT_STARTED:
        return [released, *given_back(cluster, lease, now)]
    return [released, *requeued(cluster, lease, outcome, now)]


def release_members(
    cluster: ClusterState,
    lease_id: str,
    ranks: Collection[int],
    now: float,
    *,
    fencing_token: int,
    owner: str | None = None,
    outcome: str = "",
    job_end: JobEnd = JobEnd.UNKNOWN,
    reason: str = "",
) -> list[Change]:
    """Return the release of these members of a lease, or of a remainder; all of them end it as a whole.

    Raises as `release` does, and `LeaseNotFoundError` if a member has ended already. Members cannot be
    released by force: the whole lease is.
    """
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    held = {rank for rank, _ in lease.ranked}
    if not ranks or not held.issuperset(ranks):
        raise LeaseNotFoundError(lease_id, fencing_token)
    if held.issubset(ranks):
        token = fencing_token
        return release(
            cluster, lease_id, now, fencing_token=token, outcome=outcome, job_end=job_end, reason=reason
        )
    if lease.places and job_end in (JobEnd.UNKNOWN, JobEnd.FORCED):
        raise _job_placed(lease)
    why = short(reason, MAX_REASON)
    return [MembersReleased(lease_id, fencing_token, tuple(sorted(set(ranks))), now, outcome, reason=why)]


def place_job(
    cluster: ClusterState,
    lease_id: str,
    places: Sequence[JobPlace],
    now: float,
    *,
    fencing_token: int,
    owner: str | None = None,
) -> list[Change]:
    """Return the places of a lease's jobs, one a member, which are about to start there.

    Returns nothing if it has places already: whoever came first starts the jobs. Only walls may be told of
    jobs that were placed before they had any. Raises as `renew` does, and `InvalidRequestError` for a folder
    without its machine: whoever ends the job would look into their own of that name.
    """
    lease = _require_whole_lease(cluster, lease_id, fencing_token, owner)
    if len(places) != len(lease.members):
        text = "{places} must have one entry for each member, {}, got {}"
        raise InvalidRequestError(text, len(lease.members), len(places))
    if any(place.folder and not place.machine for place in places):
        raise InvalidRequestError("{places} must state the machine of each folder, as prepare answers it")
    if lease.places and not _tells_walls(lease.places, places):
        return []
    return [JobPlaced(lease_id, fencing_token, tuple(places), now)]


def _tells_walls(before: Sequence[JobPlace], after: Sequence[JobPlace]) -> bool:
    """Return whether these are the same places, and walls are told that were not known."""
    pairs = zip(before, after, strict=True)
    known = [old if old.walls else replace(old, walls=new.walls) for old, new in pairs]
    return list(after) == known != list(before)


def renew(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    *,
    fencing_token: int | None = None,
    owner: str | None = None,
    checkpoint_at: float | None = None,
    for_s: float | None = None,
) -> list[Change]:
    """Return the renewal of a lease for its TTL from now, or for `for_s` if that is longer.

    `checkpoint_at` is when its job last saved what it did, if that is later than what is known. Raises as
    `release` does, and `InvalidRequestError` if `for_s` is not above 0 and at most `MAX_RENEWAL_S`.
    """
    if for_s is not None and not (isinstance(for_s, Real) and 0 < for_s <= MAX_RENEWAL_S):
        text = "{for_s} must be above 0 and at most {:g} (a day), got {!a:.100}"
        raise InvalidRequestError(text, MAX_RENEWAL_S, for_s)
    if checkpoint_at is not None and not (isinstance(checkpoint_at, Real) and isfinite(checkpoint_at)):
        raise InvalidRequestError("{checkpoint_at} must be a time in seconds, got {!a:.100}", checkpoint_at)
    lease = _require_whole_lease(cluster, lease_id, fencing_token, owner)
    life_s = max(lease.request.ttl_s, for_s or 0.0)
    ends_at = renewed_until(cluster.ledger, lease, now, life_s)
    saved = [float(at) for at in (lease.checkpoint_at, checkpoint_at) if at is not None]
    return [Renewed(lease_id, lease.fencing_token, now, ends_at, max(saved, default=None))]


def preempt(
    cluster: ClusterState,
    lease_id: str,
    current: SchedulingPass,
    *,
    fencing_token: int | None = None,
    preemptor: str = "",
) -> list[Change]:
    """Return the preemption of a lease for a pending request; raises as `preemption_of` and `release`."""
    lease = _require_whole_lease(cluster, lease_id, fencing_token)
    return [preemption_of(cluster, lease, current, preemptor)]


def _require_whole_lease(
    cluster: ClusterState, lease_id: str, fencing_token: int | None, owner: str | None = None
) -> Lease:
    """Return the lease; a remainder or a revoked one has no life to restart, nor to end for another."""
    lease = _require_lease(cluster, lease_id, fencing_token, owner)
    if lease.ranks or lease.revoked:
        raise LeaseNotFoundError(lease_id, fencing_token)
    return lease


def _require_lease(
    cluster: ClusterState, lease_id: str, fencing_token: int | None, owner: str | None
) -> Lease:
    lease = cluster.leases.get(lease_id)
    # First the token: the holder of a lease that has ended must learn that, also where another took its id.
    if lease is None or fencing_token not in (None, lease.fencing_token):
        lease = None if fencing_token is None else cluster.holding(lease_id, fencing_token)
        if lease is None:
            raise LeaseNotFoundError(lease_id, fencing_token)
    if owner not in (None, lease.request.owner):
        raise OtherOwnerError(name_of(lease), lease.request.owner, owner)
    return lease


def _job_placed(lease: Lease) -> JobPlacedError:
    nodes = [member.node for member in lease.members]
    return JobPlacedError(lease.lease_id, name_of(lease), nodes, lease.places[0].launcher)


def expire(cluster: ClusterState, now: float) -> list[Change]:
    """Return the expiry, or the quarantine, of every lease whose TTL has passed.

    One whose job was placed is quarantined: its end is not known to be that of the job.
    Nobody but an agent would have begun a stored job that was not placed: its request waits again.
    A lease that is still held after the end of its preemption is quarantined, one of `hold` ends. What still
    runs in a maintenance window that preempts is preempted, and so is what reached its longest runtime.
    """
    due = cluster.expired(now)
    if not (due or cluster.preempting or cluster.windows):  # as nearly always
        return []
    late = overdue(cluster, now, {lease.lease_id for lease in due}) if cluster.preempting else ()
    windows = ending(cluster, now) if cluster.windows else []
    gone = {lease.lease_id for lease in due}
    return [
        *(change for lease in late for change in _late(cluster, lease, now)),
        *(change for change in windows if change.lease_id not in gone),
        *(change for lease in due for change in _expiry(cluster, lease, now)),
    ]


def _expiry(cluster: ClusterState, lease: Lease, now: float) -> Sequence[Change]:
    if renewed := within_grace(cluster.ledger, lease, now):
        return renewed
    if limit := reached(cluster.ledger, lease, now):
        return preempted_at_limit(cluster.ledger, lease, limit, now)
    if given_back_before := unbegun(cluster, lease, now):
        return given_back_before
    if lease.request.quarantine or lease.places:
        return [Quarantined(lease.lease_id, lease.fencing_token, now)]
    return [Expired(lease.lease_id, lease.fencing_token, now)]


def _late(cluster: ClusterState, lease: Lease, now: float) -> Sequence[Change]:
    """Return what becomes of a lease after the end of its preemption: a hold has no job, and ends.

    Its id is its owner's word: what has a job all the same is no hold.
    """
    if not lease.places and is_hold(lease.lease_id, lease.request.labels):
        return release(cluster, lease.lease_id, now, outcome=Outcome.EVICTED)
    return unbegun(cluster, lease, now) or [Quarantined(lease.lease_id, lease.fencing_token, now)]


def unbegun(
    cluster: ClusterState, lease: Lease, now: float, silent: Collection[str] | None = None
) -> list[Change]:
    """Return what has a request wait again if no agent took its stored job, else nothing.

    That is known once its lease is over, or the agents of some of its nodes are `silent`, which it avoids.
    """
    if not _has_unbegun_job(lease):
        return []
    if lease.preempted_by:
        return release(cluster, lease.lease_id, now, outcome=Outcome.PREEMPTED)
    members = dict.fromkeys(member.node for member in lease.members)
    nodes = [name for name in members if silent is None or name in silent]
    reason = f"no agent took its job on {', '.join(nodes)}"
    return release(
        cluster, lease.lease_id, now, outcome=Outcome.NOT_STARTED, reason=reason, failed_nodes=nodes
    )


def too_late(cluster: ClusterState, now: float, *, lease_id: str, fencing_token: int) -> list[Change]:
    """Return what has a request wait again whose stored job, begun now, would meet maintenance, else nothing.

    The grant counted its runtime from itself, and agents may take the job a while later.
    """
    lease = cluster.holding(lease_id, fencing_token)
    if lease is None or lease.preempted_by or not _has_unbegun_job(lease):
        return []
    if (met := maintenance_met(cluster, lease, now)) is None:
        return []
    begin, end = map(as_text, met)
    reason = f"its job began too late to end before the maintenance from {begin} until {end}"
    return release(cluster, lease_id, now, outcome=Outcome.NOT_STARTED, reason=reason)


def _has_unbegun_job(lease: Lease) -> bool:
    """Return whether the lease has a stored job that no agent has taken."""
    is_taken = lease.places or lease.revoked or lease.request.quarantine
    return not is_taken and has_stored_job(lease.request.labels)


def cancel(
    cluster: ClusterState,
    lease_id: str,
    now: float,
    reason: str = "",
    *,
    owner: str | None = None,
    sequence: int | None = None,
) -> list[Change]:
    """Return the cancellation of a pending request.

    Raises `LeaseNotFoundError` if there is none (with that number in the order of arrival), and
    `OtherOwnerError` if it is not that owner's.
    """
    pending = cluster.pending.get(lease_id)
    if pending is not None and owner not in (None, pending.request.owner):
        raise OtherOwnerError(name_of(pending), pending.request.owner, owner)
    if pending is None or sequence not in (None, pending.sequence):
        raise LeaseNotFoundError(lease_id)
    return [Cancelled(lease_id, now, reason)]
