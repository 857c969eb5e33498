"""Operations on leases and requests."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import flask

from resource_manager.core.changes import JobEnd
from resource_manager.core.models import JobPlace, Lease
from resource_manager.core.name_lookup import find
from resource_manager.errors import NO_LEASE, LeaseNotFoundError
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.manager.results import Allocation, ReleaseResult, Renewal, Submission
from resource_manager.rest.answers import (
    AnnounceAnswer,
    BatchAnswer,
    Done,
    ReleaseAnswer,
    RenewBatchAnswer,
    WithdrawAnswer,
)
from resource_manager.rest.api.operations import routes
from resource_manager.rest.auth import Identity
from resource_manager.rest.ownership import not_released, owned, owner_required, require_run_jobs
from resource_manager.rest.problems import ProblemError, from_refusal
from resource_manager.rest.schemas import (
    AllocateBody,
    AnnounceBody,
    BatchBody,
    CancelBody,
    LeaseBody,
    PlaceBody,
    PreemptBody,
    ReleaseBody,
    RenewBatchBody,
    RenewBody,
    SubmitBody,
    WithdrawBody,
)
from resource_manager.rest.service import Service
from resource_manager.rest.tokens import Role
from resource_manager.storage.once import Once


@routes.add("POST", "/api/allocate", Role.USER, tag="leases")
def allocate(service: Service, caller: Identity, body: AllocateBody, once: Once | None = None) -> Allocation:
    """Grant GPUs now, or answer 503."""
    result = service.manager.try_allocate(owned(service, body, caller), once=once)
    if isinstance(result, Refusal):
        service.metrics.refusals.labels(result.kind).inc()
        raise from_refusal(result)
    return result


@routes.add("POST", "/api/allocate/batch", Role.USER, tag="leases")
def allocate_batch(
    service: Service, caller: Identity, body: BatchBody, once: Once | None = None
) -> BatchAnswer:
    """Grant several requests, each on its own; each counts for the limit of calls."""
    _count_items(service, body.requests)
    requests: list[AllocateBody] = []
    for number, item in enumerate(body.requests):
        try:
            requests.append(owned(service, item, caller))
        except ProblemError as error:
            raise ProblemError(error.status, f"requests.{number}.{error.detail}") from None
    results: list[Any] = []
    refusals: list[Any] = []
    for result in service.manager.try_allocate_batch(requests, once=once):
        if isinstance(result, Refusal):
            service.metrics.refusals.labels(result.kind).inc()
            results.append(None)
            refusals.append({"kind": str(result.kind), "detail": result.detail})
        else:
            results.append(result)
            refusals.append(None)
    return {"results": results, "refusals": refusals}


@routes.add("POST", "/api/submit", Role.USER, tag="queue")
def submit(service: Service, caller: Identity, body: SubmitBody, once: Once | None = None) -> Submission:
    """Grant GPUs now, or queue the request."""
    if body.job is not None:
        require_run_jobs(caller)
    return service.manager.submit(owned(service, body, caller), job=body.job, once=once)


@routes.add("POST", "/api/announce", Role.USER, tag="queue")
def announce(service: Service, caller: Identity, body: AnnounceBody) -> AnnounceAnswer:
    """Announce a demand that a task will make; it holds nothing."""
    demand = owned(service, body, caller)
    return {"announced": service.manager.announce(demand, after=body.after, copies=body.copies)}


@routes.add("POST", "/api/withdraw", Role.USER, tag="queue")
def withdraw(service: Service, caller: Identity, body: WithdrawBody) -> WithdrawAnswer:
    """Withdraw announced demands; of another owner as operator only."""
    owner = owner_required(caller)
    return {
        "withdrawn": service.manager.withdraw(body.task_ids, run=body.run, owner=owner, reason=body.reason)
    }


@routes.add("POST", "/api/release", Role.USER, failures=(404, 409), tag="leases")
def release(service: Service, caller: Identity, body: ReleaseBody, once: Once | None = None) -> ReleaseAnswer:
    """End a lease; of another owner as operator only."""
    lease_id, token = _lease_named(service, caller, body)
    if body.job_end is JobEnd.GONE and not caller.is_operator:
        raise ProblemError(403, "job_end gone is an operator's word that nothing runs there any more")
    how: Any = {
        "fencing_token": token,
        "owner": owner_required(caller),
        "outcome": body.outcome,
        "job_end": body.job_end,
        "reason": body.reason,
        "once": once if body.fencing_token is None else None,  # with its token no repeat acts twice
    }
    if body.ranks is None:
        result = service.manager.release(lease_id, failed_nodes=body.failed_nodes, **how)
    else:
        result = service.manager.release_members(lease_id, body.ranks, **how)
    if result not in (ReleaseResult.RELEASED, ReleaseResult.QUARANTINED):
        raise not_released(service, caller, lease_id, token)
    return {"success": True, "task_id": lease_id, "quarantined": result is ReleaseResult.QUARANTINED}


@routes.add("POST", "/api/place", Role.USER, failures=(404,), tag="leases")
def place(service: Service, caller: Identity, body: PlaceBody) -> Allocation:
    """Store where the jobs of a lease are about to start."""
    places = [JobPlace(**place.model_dump()) for place in body.places]
    return service.manager.place_job(
        body.task_id, places, fencing_token=body.fencing_token, owner=owner_required(caller)
    )


@routes.add("POST", "/api/renew", Role.USER, failures=(404, 409), tag="leases")
def renew(service: Service, caller: Identity, body: RenewBody, once: Once | None = None) -> Allocation:
    """Renew a lease: its TTL starts again now."""
    lease_id, token = _lease_named(service, caller, body)
    return service.manager.renew(
        lease_id,
        fencing_token=token,
        owner=owner_required(caller),
        checkpoint_at=body.checkpoint_at,
        for_s=body.for_s,
        once=once if body.fencing_token is None else None,  # with its token no repeat acts twice
    )


@routes.add("POST", "/api/renew/batch", Role.USER, tag="leases")
def renew_all(service: Service, caller: Identity, body: RenewBatchBody) -> RenewBatchAnswer:
    """Renew several leases in one commit; each counts for the limit of calls."""
    _count_items(service, body.renewals)
    renewals = [cast("Renewal", each.model_dump()) for each in body.renewals]
    return {"renewed": service.manager.renew_all(renewals, owner=owner_required(caller))}


@routes.add("POST", "/api/preempt", Role.OPERATOR, failures=(404, 409), tag="leases")
def preempt(service: Service, caller: Identity, body: PreemptBody, once: Once | None = None) -> Allocation:
    """Preempt a lease for a pending request: its job has its grace to save, then its request waits again."""
    lease_id, token = _lease_named(service, caller, body)
    is_exact = body.exact or not body.preemptor
    preemptor = _id_of(service, caller, body.preemptor, None, pending=True, exact=is_exact)[0]
    return service.manager.preempt(
        lease_id, preemptor=preemptor, fencing_token=token, dry_run=body.dry_run, once=once
    )


@routes.add("POST", "/api/cancel", Role.USER, failures=(404, 409), tag="queue")
def cancel(service: Service, caller: Identity, body: CancelBody, once: Once | None = None) -> Done:
    """Remove a pending request from the queue."""
    lease_id, sequence = _id_of(service, caller, body.task_id, body.sequence, pending=True, exact=body.exact)
    owner = owner_required(caller)
    if not service.manager.cancel(lease_id, owner=owner, sequence=sequence, reason=body.reason, once=once):
        raise ProblemError(404, f"task {body.task_id!r} has no pending request", kind=NO_LEASE)
    return {"success": True, "task_id": lease_id}


def _count_items(service: Service, items: Sequence[object]) -> None:
    """Count each item of a batch as a call; its first one is counted as the call itself."""
    if len(items) > 1:
        service.limits.count(flask.g.counted_as, len(items) - 1)


def _lease_named(service: Service, caller: Identity, body: LeaseBody) -> tuple[str, int | None]:
    return _id_of(service, caller, body.task_id, body.fencing_token, pending=False, exact=body.exact)


def _id_of(
    service: Service, caller: Identity, name: str, number: int | None, *, pending: bool, exact: bool
) -> tuple[str, int | None]:
    """Return the full lease id of that name, with the fencing token of a lease or the sequence in the queue.

    With `number`, the caller's own, the name is a full id. So it is where nothing has that name: a repeated
    call comes after the end.
    """
    if exact or number is not None:
        return name, number
    try:
        owner = owner_required(caller)
        entry = service.manager.read(lambda cluster, now: find(cluster, name, pending=pending, owner=owner))
    except LeaseNotFoundError:
        return name, None
    return entry.lease_id, entry.fencing_token if isinstance(entry, Lease) else entry.sequence
