"""Answers to requests that are sent again under the same idempotency key: from the state, not from a copy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from resource_manager.core.changes import Change, Granted, MaintenanceChanged, Preempting, Queued, Renewed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.refusal import Refusal, RefusalKind
from resource_manager.errors import AlreadyDoneError
from resource_manager.manager.commit.group import Reader, Repeatable
from resource_manager.manager.maintenance import numbered
from resource_manager.manager.results import WindowView
from resource_manager.storage.once import Once

T = TypeVar("T")

LeaseView = Callable[[ClusterState, Lease], T]


def of_grants(
    once: Once | None, requests: Sequence[Request], view: LeaseView[T]
) -> Repeatable[list[tuple[Lease, T] | Refusal]] | None:
    """Repeat with the leases that the requests got, or `AlreadyDoneError` if one of them has ended."""

    def tokens(changes: Sequence[Change]) -> dict[str, int]:
        asked = {request.lease_id for request in requests}
        leases = (change.lease for change in changes if isinstance(change, Granted))
        return {lease.lease_id: lease.fencing_token for lease in leases if lease.lease_id in asked}

    def answer(cluster: ClusterState, now: float, tokens: dict[str, int]) -> list[tuple[Lease, T] | Refusal]:
        again: list[tuple[Lease, T] | Refusal] = []
        for request in requests:
            if request.lease_id in tokens:
                lease = _live(cluster, request.lease_id, tokens[request.lease_id])
                again.append((lease, view(cluster, lease)))
            else:
                again.append(Refusal(RefusalKind.NO_CAPACITY, "it was not granted the first time"))
        return again

    return Repeatable(once, tokens, answer) if once else None


def of_submission(once: Once | None, lease_id: str, reader: Reader[T]) -> Repeatable[T] | None:
    """Repeat with the lease or pending request of this submission, or `AlreadyDoneError` if it has ended."""

    def origin(changes: Sequence[Change]) -> list[float]:
        """Return the fencing token of a grant at once, else when the request was queued: its lease has it."""
        for change in changes:
            if isinstance(change, Queued) and change.request.lease_id == lease_id:
                return [0, change.queued_at]
            if isinstance(change, Granted) and change.lease.lease_id == lease_id:
                return [change.lease.fencing_token]
        return []

    def answer(cluster: ClusterState, now: float, origin: list[float]) -> T:
        lease, pending = cluster.leases.get(lease_id), cluster.pending.get(lease_id)
        origins = [[lease.fencing_token], [0, lease.queued_at]] if lease else []
        origins += [[0, pending.queued_at]] if pending else []
        if origin not in origins:
            raise _over(f"task {lease_id!r} was submitted")
        return reader(cluster, now)

    return Repeatable(once, origin, answer) if once else None


def of_renewal(once: Once | None, lease_id: str, view: LeaseView[T]) -> Repeatable[T] | None:
    """Repeat with the lease as it is, or `AlreadyDoneError` if it has ended."""

    def token(changes: Sequence[Change]) -> int:
        return next(change.fencing_token for change in changes if isinstance(change, Renewed | Preempting))

    def answer(cluster: ClusterState, now: float, fencing_token: int) -> T:
        return view(cluster, _live(cluster, lease_id, fencing_token))

    return Repeatable(once, token, answer) if once else None


def of_reading(once: Once | None, reader: Reader[T]) -> Repeatable[T] | None:
    """Repeat with what the reader answers now."""

    def answer(cluster: ClusterState, now: float, reference: object) -> T:
        return reader(cluster, now)

    return Repeatable(once, lambda changes: None, answer) if once else None


def of_window(once: Once | None) -> Repeatable[WindowView] | None:
    """Repeat with the maintenance window that was added, as it is now.

    Raises `AlreadyDoneError` if it has been removed since.
    """

    def answer(cluster: ClusterState, now: float, reference: object) -> WindowView:
        if (found := numbered(cluster, int(str(reference)), now)) is None:
            raise AlreadyDoneError(f"maintenance window {reference} was added, and is removed or over")
        return found

    def number(changes: Sequence[Change]) -> int:
        (change,) = changes
        assert isinstance(change, MaintenanceChanged)
        return change.windows[-1].window_id

    return Repeatable(once, number, answer) if once else None


def _live(cluster: ClusterState, lease_id: str, fencing_token: int) -> Lease:
    lease = cluster.leases.get(lease_id)
    if lease is None or lease.fencing_token != fencing_token:
        raise _over(f"task {lease_id!r} was granted a lease (fencing token {fencing_token})")
    return lease


def _over(what: str) -> AlreadyDoneError:
    return AlreadyDoneError(
        f"{what} under this idempotency key, and it has ended: use a new key for a new request"
    )
