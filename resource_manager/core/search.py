"""Closure of a server of a restored state until nobody can run there whom that state does not know."""

from __future__ import annotations

from dataclasses import replace

from resource_manager.core.changes import Drained

UNSEARCHED = "not searched"
"""Beginning of the reason for which a server is closed after a restore; it may follow an earlier reason."""

OUTDATED = "older than the state of "
"""Beginning of the reason for which every server is closed while the store holds an old state."""

_SEPARATOR = f"; {UNSEARCHED}"


def unsearched(node: str, at: float, before: Drained | None, backup: str) -> Drained:
    """Return the closure of a node since a restore; `backup` says of what, `before` is what closed it."""
    reason = (
        f"{UNSEARCHED} since the restore of {backup}: its agent opens it, or an operator who knows that no "
        f"job runs there without a lease (gpu-manager resume {node})"
    )
    earlier = "" if before is None else reason_before(before)
    if before is None or (is_unsearched(before) and not earlier):
        return Drained(node, at, reason)
    return replace(before, at=at, reason=f"{earlier or 'drained'}; {reason}")


def outdated(node: str, at: float, newest: str) -> Drained:
    """Return the closure of a node whose state lacks what somebody saw at the time `newest`."""
    return Drained(node, at, f"{OUTDATED}{newest}: gpu-manager store restore FILE")


def awaits_restore(drained: Drained | None) -> bool:
    """Return True if the node is closed until the newest state is restored, or was searched after that."""
    return is_unsearched(drained) or (drained is not None and drained.reason.startswith(OUTDATED))


def is_unsearched(drained: Drained | None) -> bool:
    """Return True if the node may run jobs of leases that the restored state does not know."""
    return drained is not None and (drained.reason.startswith(UNSEARCHED) or _SEPARATOR in drained.reason)


def reason_before(drained: Drained) -> str:
    """Return the reason for which the node was closed before the restore; empty if it was open."""
    return "" if drained.reason.startswith(UNSEARCHED) else drained.reason.partition(_SEPARATOR)[0]
