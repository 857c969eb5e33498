"""The newest changes of the history, cached for pages, and those about a server's health in words."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import islice
from typing import Any

from resource_manager.manager.answer_words import recorded_name
from resource_manager.manager.recorded_changes import MAX_LOOKED_AT, PAGE, newest_changes
from resource_manager.manager.results import Recorded
from resource_manager.manager.wording import by_whom

HEALTH = {
    "gpuclosed": "GPU {gpu_id} closed",
    "gpuopened": "GPU {gpu_id} opened",
    "agentseen": "watched by its agent",
    "agentlost": "its agent is silent: no new leases",
    "drained": "drained",
    "resumed": "resumed",
}
"""Text of each kind of change that is about the health of a server."""

MAX_SHOWN = 50
"""Most changes of a server that its page shows."""

MAX_READ = 5 * MAX_LOOKED_AT
"""Most changes that are read at once for those that are no renewals: a store keeps about as many."""

History = Callable[[int, int], Sequence[Recorded]]
"""Changes after a version, oldest first, so many at most."""


class RecentChanges:
    """The newest changes of a history but renewals, cached: read once, then followed; thread-safe.

    Open pages ask after each change of the cluster, and decoding the newest 20,000 takes long. Renewals of
    each lease every 40 s would push all else out: within minutes where thousands run.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._changes: deque[Recorded] = deque(maxlen=MAX_LOOKED_AT)
        self._last: Recorded | None = None
        """The newest that was read, a renewal or not."""

    def newest(self, history: History, version: int) -> list[Recorded]:
        """Return the newest kept changes up to this version, the newest first."""
        with self._lock:
            if not self._follow(history, version):
                self._read(history, version)
            return [change for change in reversed(self._changes) if change["version"] <= version]

    def _follow(self, history: History, version: int) -> bool:
        """Add the changes up to this version; return False if they do not go on from those read before.

        False after a restore of an older dump, or where the store has dropped them all.
        """
        if self._last is None or version > self._last["version"] + MAX_READ:
            return False
        page = history(self._last["version"] - 1, PAGE)
        if not page or page[0] != self._last:
            return False
        self._add(page[1:])
        while len(page) == PAGE and page[-1]["version"] < version:
            page = history(page[-1]["version"], PAGE)
            self._add(page)
        return True

    def _read(self, history: History, version: int) -> None:
        last: Recorded | None = None
        found: deque[Recorded] = deque(maxlen=MAX_LOOKED_AT)
        for change in islice(newest_changes(history, version), MAX_READ):
            last = last or change
            if change["change"] != "renewed":
                found.appendleft(change)
                if len(found) == MAX_LOOKED_AT:
                    break
        self._last, self._changes = last, found

    def _add(self, changes: Sequence[Recorded]) -> None:
        self._changes.extend(change for change in changes if change["change"] != "renewed")
        self._last = changes[-1] if changes else self._last


def introduces(change: Recorded, name: str) -> bool:
    """Return True if the change grants, queues or announces what has that short id or display name."""
    shown, _, short_id = recorded_name(change).rpartition(" ")
    return bool(short_id) and name in (shown, short_id)


def health_history(newest_first: Iterable[Recorded], server: str) -> list[Recorded]:
    """Return the server's last changes of health, the newest first, among these changes."""
    found = (change for change in newest_first if change["change"] in HEALTH and change["node"] == server)
    return list(islice(found, MAX_SHOWN))


def describe_health(change: Mapping[str, Any]) -> str:
    """Return one of these changes as a phrase."""
    text = "marked as failed" if change.get("failed") else HEALTH[change["change"]].format_map(change)
    return by_whom(f"{text}: {change['reason']}" if change.get("reason") else text, change)
