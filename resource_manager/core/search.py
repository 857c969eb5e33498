"""Closure of a server of a restored state until nobody can run there whom that state does not know."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace

from resource_manager.core.changes import Drained, Resumed
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.identifiers import token_of_key
from resource_manager.core.names import listed
from resource_manager.core.node_state import NodeState

UNSEARCHED = "not searched"
"""Beginning of the reason for which a server is closed after a restore; it may follow an earlier reason."""

OUTDATED = "older than the state of "
"""Beginning of the reason for which every server is closed while the store holds an old state."""

_SEPARATOR = f"; {UNSEARCHED}"

_FOUND = "; without a lease runs "
"""What comes before the jobs that a search found, at the end of the reason."""

_ANY_OTHER = "*"
"""Name, which no server has, of the restore of a state among its closures of absent servers."""

NEWCOMERS_S = 30 * 86400.0
"""Time from a restore in which a server that the state did not know is searched when it is added."""

MAX_NAMED = 3
"""Jobs that the reason names."""


def unsearched(node: str, at: float, before: Drained | None, backup: str) -> Drained:
    """Return the closure of a node since a restore; `backup` says of what, `before` is what closed it."""
    reason = (
        f"{UNSEARCHED} since the restore of {backup}: its agent opens it, a reconciler that can look there, "
        f"or an operator who knows that no job runs there without a lease (gpu-manager resume {node})"
    )
    earlier = "" if before is None else reason_before(before)
    if before is None or (is_unsearched(before) and not earlier):
        return Drained(node, at, reason)
    return replace(before, at=at, reason=f"{earlier or 'drained'}; {reason}")


def restored(at: float, backup: str) -> Drained:
    """Return the closure of servers that a restored state does not know: one may have run jobs since."""
    return Drained(_ANY_OTHER, at, backup)


def newcomer(node: str, now: float, absent: Mapping[str, Drained]) -> Drained | None:
    """Return the closure of a server that is added, if a restored state did not know it; else None."""
    restore = absent.get(_ANY_OTHER)
    if restore is None or node in absent or now - restore.at > NEWCOMERS_S:
        return None
    return unsearched(node, now, None, restore.reason)


def outdated(node: str, at: float, newest: str) -> Drained:
    """Return the closure of a node whose state lacks what somebody saw at the time `newest`."""
    return Drained(node, at, f"{OUTDATED}{newest}: gpu-manager store restore FILE")


def awaits_restore(drained: Drained | None) -> bool:
    """Return True if the node is closed until the newest state is restored, or was searched after that."""
    return is_unsearched(drained) or (drained is not None and drained.reason.startswith(OUTDATED))


def is_unsearched(drained: Drained | None) -> bool:
    """Return True if the node may run jobs of leases that the restored state does not know."""
    return drained is not None and (drained.reason.startswith(UNSEARCHED) or _SEPARATOR in drained.reason)


def is_searchable(drained: Drained, settings: ClusterSettings, looked_at: float) -> bool:
    """Return True if a look at the closed node at that time counts as its search.

    One does once the recovery window is over, in which owners of unknown leases stop their jobs.
    """
    return is_unsearched(drained) and looked_at - drained.at >= settings.confirmation_window_s


def reason_before(drained: Drained) -> str:
    """Return the reason for which the node was closed before the restore; empty if it was open."""
    return "" if drained.reason.startswith(UNSEARCHED) else drained.reason.partition(_SEPARATOR)[0]


def closed_by_hand(closed: Drained, before: Drained | None) -> Drained:
    """Return an operator's closure of a node, which goes on to wait for its search if it did before."""
    if before is None or not is_unsearched(before):
        return closed
    waits = before.reason.removeprefix(reason_before(before)).removeprefix("; ")
    return replace(closed, reason=f"{closed.reason or 'drained'}; {waits}")


def closed_without_restore(drained: Iterable[Drained]) -> Iterator[Drained]:
    """Yield what stays closed where nothing will be restored, with the reason from before."""
    for each in drained:
        if not awaits_restore(each) and each.node != _ANY_OTHER:
            yield each
        elif is_unsearched(each) and (before := reason_before(each)):
            yield replace(each, reason=before)


def searched(
    drained: Drained, unknown: Collection[str], now: float, *, is_complete: bool
) -> Iterator[Drained | Resumed]:
    """Yield what a search of a closed node changes: it opens, or its reason names jobs without a lease."""
    if unknown:
        reason = f"{drained.reason.partition(_FOUND)[0]}{_FOUND}{listed(sorted(unknown), MAX_NAMED)}"
        if reason != drained.reason:
            yield replace(drained, reason=reason)
    elif is_complete:
        if before := reason_before(drained):
            yield replace(drained, at=now, reason=before, by="")
        else:
            yield Resumed(drained.node, now)


def without_lease(state: NodeState, keys: Iterable[str]) -> set[str]:
    """Return those of the jobs' keys whose lease the node does not have in the state."""
    tokens = {lease.fencing_token for lease in state.leases.values()}
    tokens |= {ended.fencing_token for ended in state.cleaning.values()}
    return {key for key in keys if token_of_key(key) not in tokens}
