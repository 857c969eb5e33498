"""Nodes on which jobs did not start: remembered for a while, so that the next try avoids them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resource_manager.core.changes import Released

AVOIDED_S = 600.0
"""Time for which a request avoids a node on which its job did not start."""

MAX_FAILED_STARTS = 256
"""Maximum number of releases that are remembered, the newest."""

FailedStarts = Mapping[str, tuple[Released, ...]]
"""Releases that name failed nodes, by lease id."""


def remembered(known: FailedStarts, new: Released) -> dict[str, tuple[Released, ...]]:
    """Return what is known with a release that names failed nodes, without what is over by then."""
    entries = [entry for entry in in_order(known) if new.at < avoided_until(entry)]
    return by_lease([*entries, new][-MAX_FAILED_STARTS:])


def avoided_until(entry: Released) -> float:
    """Return the time until which the release's failed nodes are avoided."""
    return entry.at + AVOIDED_S


def by_lease(entries: Iterable[Released]) -> dict[str, tuple[Released, ...]]:
    found: dict[str, tuple[Released, ...]] = {}
    for entry in entries:
        found[entry.lease_id] = (*found.get(entry.lease_id, ()), entry)
    return found


def in_order(known: FailedStarts) -> tuple[Released, ...]:
    """Return the releases in the order of their times."""
    entries = (entry for of_lease in known.values() for entry in of_lease)
    return tuple(sorted(entries, key=lambda entry: (entry.at, entry.fencing_token)))
