"""Leases and pending requests by the names that people use for them."""

from __future__ import annotations

from collections.abc import Iterator

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Lease
from resource_manager.core.names import (
    CYCLE,
    Named,
    display_name,
    listed,
    name_of,
    number_of,
    short,
    short_id,
)
from resource_manager.core.pending import PendingRequest
from resource_manager.errors import AmbiguousNameError, LeaseNotFoundError


def find(
    cluster: ClusterState,
    text: str,
    *,
    pending: bool | None = None,
    fencing_token: int | None = None,
    owner: str | None = None,
) -> Named:
    """Return what a full lease id, a short id, `dag.task[3]` or `dag.task` names.

    With `pending` only a pending request, with False only a lease, else either; a lease with that fencing
    token, if one is given. What is the `owner`'s comes before others', and a full id before other names of
    the same owner's: whose id or labels say what another is called must not stand in for it. Raises
    `LeaseNotFoundError`, and `AmbiguousNameError` if there are several.
    """

    def is_meant(entry: Named) -> bool:
        if isinstance(entry, PendingRequest):
            return pending is not False and fencing_token is None
        return not pending and fencing_token in (None, entry.fencing_token)

    number = number_of(text)
    exact = cluster.leases.get(text) or cluster.pending.get(text)
    if exact is not None and is_meant(exact):
        is_no_other_name = number is None and not {".", "@"} & {*text}
        if is_no_other_name or (owner is not None and exact.request.owner == owner):
            return exact
    named = [
        entry
        for entry in _entries(cluster)
        if entry.lease_id == text or entry.sequence % CYCLE == number or is_called(entry, text)
    ]
    found = list(filter(is_meant, named))
    found = [entry for entry in found if entry.request.owner == owner] or found
    whole = [entry for entry in found if entry.lease_id == text]
    if len({entry.request.owner for entry in found}) == 1:
        found = whole or found
    # The remainder of a gang has the names of its request that waits or runs again.
    running = {entry.lease_id for entry in found if not _is_remainder(entry)}
    found = [entry for entry in found if not (_is_remainder(entry) and entry.lease_id in running)]
    if len(found) == 1:
        return found[0]
    if found:
        names = [_told_apart(entry, found, text) for entry in found]
        raise AmbiguousNameError(text, len(found), listed(names))
    alike = [name_of(entry) for entry in filter(is_meant, _entries(cluster)) if contains(entry, text)]
    hint = f"; alike: {listed(alike)}" if alike else ""
    if fencing_token is None and named:
        hint = f": {name_of(named[0])} {'is a lease: release' if pending else 'waits: cancel'} ends it"
    what = "pending request" if pending else "lease" if pending is False else "lease or pending request"
    message = f"no {what} is called {short(text)!r}{hint}"
    leases = [entry for entry in named if isinstance(entry, Lease)]
    if fencing_token is not None and named:
        another = f"{name_of(leases[0])} has another" if leases else f"{name_of(named[0])} waits"
        message = f"no lease is called {short(text)!r} with fencing token {fencing_token}: {another}"
    raise LeaseNotFoundError(text, fencing_token, is_held=bool(leases), message=message)


def find_preferring_pending(cluster: ClusterState, text: str) -> Named:
    """Return what `find` does; where leases and one pending request have that name, the pending one."""
    try:
        return find(cluster, text)
    except AmbiguousNameError as several:
        try:
            return find(cluster, text, pending=True)
        except LeaseNotFoundError:
            raise several from None


def name_in(cluster: ClusterState, lease_id: str) -> str:
    """Return the name of the lease or pending request of that id; the id if it is gone."""
    entry = cluster.leases.get(lease_id) or cluster.pending.get(lease_id)
    return short(lease_id) if entry is None else name_of(entry)


def is_called(entry: Named, text: str) -> bool:
    """Return True if the text is the entry's `dag.task[3]`, or the `dag.task` of a mapped task."""
    name = display_name(entry.lease_id, entry.request.labels)
    if text in (name, name.partition("[")[0]):
        return True
    labels = entry.request.labels
    return bool(labels) and text == f"{labels.get('dag_id')}.{labels.get('task_id')}"


def contains(entry: Named, text: str) -> bool:
    """Return True if display name, short id or lease id contain the text; in whatever case it is typed."""
    text = text.casefold()
    names = (display_name(entry.lease_id, entry.request.labels), short_id(entry.sequence), entry.lease_id)
    return any(text in name.casefold() for name in names)


def _entries(cluster: ClusterState) -> Iterator[Named]:
    yield from cluster.leases.values()
    yield from cluster.remainders.values()
    yield from cluster.pending.values()


def _is_remainder(entry: Named) -> bool:
    return isinstance(entry, Lease) and bool(entry.ranks)


def _told_apart(entry: Named, others: list[Named], text: str) -> str:
    """Return the entry's name, with what tells it apart where its short id does not."""
    name = name_of(entry)
    if short_id(entry.sequence) == text:
        name += f" ({short(entry.lease_id)})"
    if isinstance(entry, Lease) and sum(other.sequence == entry.sequence for other in others) > 1:
        name += f" (fencing token {entry.fencing_token})"
    return name
