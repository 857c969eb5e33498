"""Answers to requests that are sent again under the same idempotency key.

A lease or pending request is answered as it is now; what else a change led to, as it was right after it.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Sequence
from contextlib import nullcontext
from typing import TypeVar

from resource_manager.core import changes as kinds
from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease, Request
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import AlreadyDoneError
from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.commit.group import Reader, Repeatable
from resource_manager.manager.maintenance_windows import numbered
from resource_manager.manager.refusal_wording import Refusal
from resource_manager.storage.once import Once

T = TypeVar("T")

LeaseView = Callable[[ClusterState, Lease], T]


def of_grants(
    once: Once | None, requests: Sequence[Request], view: LeaseView[T], taken: Container[str] = ()
) -> Repeatable[list[tuple[Lease, T] | Refusal | None]] | None:
    """Repeat with the leases that the requests got or had, or `AlreadyDoneError` if one of them has ended.

    The ids that are `taken` belong to other requests.
    """

    def tokens(changes: Sequence[Change], cluster: ClusterState, now: float) -> dict[str, int]:
        own = {request.lease_id for request in requests if request.lease_id not in taken}
        granted = [change.lease for change in changes if isinstance(change, kinds.Granted)]
        leases = [*(cluster.leases[lease_id] for lease_id in own & cluster.leases.keys()), *granted]
        return {lease.lease_id: lease.fencing_token for lease in leases if lease.lease_id in own}

    def answer(
        cluster: ClusterState, now: float, tokens: dict[str, int]
    ) -> list[tuple[Lease, T] | Refusal | None]:
        again: list[tuple[Lease, T] | Refusal | None] = []
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

    def origin(changes: Sequence[Change], cluster: ClusterState, now: float) -> list[float]:
        """Return the fencing token of a grant at once, else when the request was queued: its lease has it."""
        for change in changes:
            if isinstance(change, kinds.Queued) and change.request.lease_id == lease_id:
                return [0, change.queued_at]
            if isinstance(change, kinds.Granted) and change.lease.lease_id == lease_id:
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


def of_lease(once: Once | None, lease_id: str, view: LeaseView[T]) -> Repeatable[T] | None:
    """Repeat with the lease as it is, or `AlreadyDoneError` if it has ended."""

    def token(changes: Sequence[Change], cluster: ClusterState, now: float) -> int:
        return next(
            change.fencing_token for change in changes if isinstance(change, kinds.Renewed | kinds.Preempting)
        )

    def answer(cluster: ClusterState, now: float, fencing_token: int) -> T:
        return view(cluster, _live(cluster, lease_id, fencing_token))

    return Repeatable(once, token, answer) if once else None


def of_done(once: Once | None) -> Repeatable[None] | None:
    """Repeat with no more than that it was done."""
    return Repeatable(once, lambda *_: None, lambda *_: None) if once else None


def of_release(once: Once | None) -> Repeatable[bool] | None:
    """Repeat with whether the lease, or members of it, ended; else it was quarantined."""

    def is_over(changes: Sequence[Change], cluster: ClusterState, now: float) -> bool:
        return any(isinstance(change, kinds.Released | kinds.MembersReleased) for change in changes)

    return Repeatable(once, is_over, lambda cluster, now, reference: bool(reference)) if once else None


def of_answer(once: Once | None, reader: Reader[T]) -> Repeatable[T] | None:
    """Repeat with what the reader answers right after the changes: values of JSON."""

    def answer_after(changes: Sequence[Change], cluster: ClusterState, now: float) -> T:
        is_inventory = any(isinstance(change, kinds.InventoryChanged) for change in changes)
        after = ClusterState.from_snapshot(cluster.snapshot()) if is_inventory else cluster
        with nullcontext() if is_inventory else cluster.trial():  # an inventory cannot be tried
            after.apply(*changes)
            return reader(after, now)

    return Repeatable(once, answer_after, lambda cluster, now, reference: reference) if once else None


def of_window(once: Once | None) -> Repeatable[WindowView] | None:
    """Repeat with the maintenance window that was added, as it is now.

    Raises `AlreadyDoneError` if it has been removed since.
    """

    def answer(cluster: ClusterState, now: float, reference: object) -> WindowView:
        if (found := numbered(cluster, int(str(reference)), now)) is None:
            raise AlreadyDoneError(f"maintenance window {reference} was added, and is removed or over")
        return found

    def number(changes: Sequence[Change], cluster: ClusterState, now: float) -> int:
        (change,) = changes
        assert isinstance(change, kinds.MaintenanceChanged)
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
