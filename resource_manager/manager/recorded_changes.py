"""Recorded changes: as a store has them, the newest first, and what people call those that they mention."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING

from resource_manager.core.changes import Change, ClusterSettingsChanged
from resource_manager.manager.answer_words import recorded_name
from resource_manager.manager.results import Recorded
from resource_manager.manager.wording import What, matches
from resource_manager.storage import Store, codec

if TYPE_CHECKING:
    from resource_manager.manager.lease_service import LeaseService

PAGE = 1000

MAX_LOOKED_AT = 20_000
"""Number of changes looked through for those that name a lease."""

MAX_SINCE_ENDED = 5000
"""Number of changes looked through for the end of a lease: its owner may notice it a renewal later."""

LEASE_GONE = "the lease was ended by another client, or its store lost it"


def recorded(store: Store, after: int, limit: int, by: str = "", what: What | None = None) -> list[Recorded]:
    """Return the store's changes after a version, oldest first, as far as `matches` takes them."""
    if not by and what is None:
        return _page(store, after, limit)
    found: list[Recorded] = []
    while len(found) < limit and (page := _page(store, after, PAGE)):
        found += (change for change in page if matches(change, by, what))
        after = page[-1]["version"]
    return found[:limit]


def _page(store: Store, after: int, limit: int) -> list[Recorded]:
    return [
        {"version": version, **codec.change_to_dict(_masked(change))}
        for version, change in store.history(after, limit)
    ]


def _masked(change: Change) -> Change:
    if isinstance(change, ClusterSettingsChanged) and change.settings.notices:
        return replace(change, settings=change.settings.masked)
    return change


def newest_changes(history: Callable[[int, int], Sequence[Recorded]], version: int) -> Iterator[Recorded]:
    """Yield the kept changes up to this version, the newest first, by pages of `history(after, limit)`."""
    while version > 0:
        start = max(version - PAGE, 0)
        page = [change for change in history(start, PAGE) if change["version"] <= version]
        yield from reversed(page)
        version = start if page else _newest_version(history, start)


def _newest_version(history: Callable[[int, int], Sequence[Recorded]], most: int) -> int:
    """Return the version of the newest kept change up to that one, 0 if there is none.

    Versions jump at a restart of the store, a restore and a reset, which keep the changes before it.
    """
    found, beyond = 0, most
    while found < beyond:
        page = history((found + beyond) // 2, 1)
        if page and page[0]["version"] <= most:
            found = page[0]["version"]
        else:
            beyond = (found + beyond) // 2
    return found


def lease_of(change: Recorded) -> str:
    """Return the id of the lease or pending request that a change is about, empty if it is about none."""
    entry = change.get("lease", change)
    return str(entry.get("request", entry).get("lease_id", ""))


def token_of(change: Recorded) -> int | None:
    """Return the fencing token of the lease that a change is about; None if it is about none."""
    token: int | None = change.get("lease", change).get("fencing_token")
    return token


def names_at(shown: Iterable[Recorded], newest_first: Iterable[Recorded]) -> dict[int, dict[str, str]]:
    """Return the names, by lease id, of what the changes shown mention and do not bring, by their versions.

    Each is that of the request which was granted or queued last before the change, among those given.
    """
    wanted = {
        change["version"]: {change[key] for key in ("lease_id", "preemptor") if key in change}
        for change in shown
    }
    unnamed: dict[str, list[int]] = {}
    found: dict[int, dict[str, str]] = {version: {} for version in wanted}
    for change in newest_first:
        for lease_id in wanted.pop(change["version"], ()):
            unnamed.setdefault(lease_id, []).append(change["version"])
        if name := recorded_name(change):
            lease_id = change.get("lease", change)["request"]["lease_id"]
            for version in unnamed.pop(lease_id, ()):
                found[version][lease_id] = name
        if not wanted and not unnamed:
            break
    return found


_ENDINGS = {"cancelled": "cancelled its request", "released": "released its lease"}


def ended_by_others(manager: LeaseService, lease_id: str) -> str:
    """Return who cancelled the request of this id or released its lease, which are gone; empty if nobody did.

    It is the newest change of a lease id among the last `MAX_SINCE_ENDED` of the history. What the caller
    itself ended is not told apart: it knows.
    """
    changes = islice(newest_changes(manager.history, manager.summary()["version"]), MAX_SINCE_ENDED)
    newest = next((change for change in changes if lease_of(change) == lease_id), None)
    if newest is None or newest["change"] not in _ENDINGS:
        return ""
    reason = f": {newest['reason']}" if newest.get("reason") else ""
    return f"{newest.get('by') or 'another client'} {_ENDINGS[newest['change']]}{reason}"
