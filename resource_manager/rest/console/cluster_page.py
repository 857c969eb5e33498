"""The page of the cluster: what is stored, who changed it last, and the notices on every page."""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

from resource_manager.errors import ResourceManagerError
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.notices import notices_of
from resource_manager.manager.results import Recorded
from resource_manager.rest.console.history_pages import RecentChanges
from resource_manager.rest.webhooks import failed_attempts

KINDS = {
    "clustersettingschanged": "settings",
    "inventorychanged": "servers",
    "teamschanged": "teams",
    "maintenancechanged": "maintenance windows",
}
"""What each kind of change is about that is of the cluster itself."""

MAX_SHOWN = 20
NOTICES_FOR_S = 10.0
FAILED_ATTEMPTS = 4
"""Attempts in a row to send a notice, as of the alert, from which on pages say so."""


class NoticeCache:
    """Notices of the last seconds; nothing while the store does not answer, which pages say themselves."""

    def __init__(self) -> None:
        self._looked_at = float("-inf")
        self._found: list[str] = []

    def of(self, manager: GPUResourceManager) -> list[str]:
        """Return the notices about the cluster."""
        if time.monotonic() - self._looked_at > NOTICES_FOR_S:
            self._looked_at = time.monotonic()
            try:
                summary = manager.summary()
                self._found = [
                    *notices_of(summary, manager.settings.inventory, manager.diff),
                    *_not_taken(manager),
                ]
            except ResourceManagerError:
                self._found = []
        return self._found


def _not_taken(manager: GPUResourceManager) -> Iterator[str]:
    """Yield a line for each address that has refused notices for a while."""
    notices = manager.read(lambda cluster, now: cluster.settings.notices)
    for (host, team), attempts in failed_attempts(manager.store, notices).items():
        if attempts >= FAILED_ATTEMPTS:
            of_team = f" of team {team}" if team else ""
            yield (
                f"{host} has not taken {attempts} attempts to send it a notice{of_team}: the service's log "
                "says what it answered"
            )


def look_at(manager: GPUResourceManager, recent: RecentChanges) -> dict[str, Any]:
    """Return the stored cluster, and its last changes, the newest first."""
    version = manager.read(lambda cluster, now: cluster.version)
    changes = (change for change in recent.newest(manager.history, version) if change["change"] in KINDS)
    found = [
        {
            "at": change["at"],
            "what": _what(change),
            "lines": change.get("lines", ()),
            "by": change.get("by", ""),
        }
        for change in islice(changes, MAX_SHOWN)
    ]
    return {"cluster": manager.cluster(), "changes": found, "now": manager.store.now()}


def _what(change: Recorded) -> str:
    return f"GPUs of {change['adopted']}, adopted" if change.get("adopted") else KINDS[change["change"]]
