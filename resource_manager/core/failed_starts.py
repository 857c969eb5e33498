"""Nodes on which jobs did not start: remembered for a while, so that the next try avoids them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from resource_manager.core.changes import Released

AVOIDED_S = 600.0
"""Time for which a request avoids a node on which its job did not start."""

MAX_FAILED_STARTS = 256
"""Maximum of releases that are remembered; beyond it the oldest are dropped."""

FailedStarts = Mapping[str, tuple[Released, ...]]
"""Releases that name failed nodes, by lease id."""


def with_failed_start(known: FailedStarts, released: Released) -> dict[str, tuple[Released, ...]]:
    """Return the failed starts with one more, without those whose time is over."""
    entries = [entry for entry in by_time(known) if released.at < avoided_until(entry)]
    return by_lease([*entries, released][-MAX_FAILED_STARTS:])


def avoided_until(entry: Released) -> float:
    """Return the time until which the release's failed nodes are avoided."""
    return entry.at + AVOIDED_S


def by_lease(entries: Iterable[Released]) -> dict[str, tuple[Released, ...]]:
    """Return the releases by lease id."""
    found: dict[str, tuple[Released, ...]] = {}
    for entry in entries:
        found[entry.lease_id] = (*found.get(entry.lease_id, ()), entry)
    return found


def by_time(known: FailedStarts) -> tuple[Released, ...]:
    """Return the releases in the order of their times."""
    entries = (entry for of_lease in known.values() for entry in of_lease)
    return tuple(sorted(entries, key=lambda entry: (entry.at, entry.fencing_token)))
