"""Changes of the history that a page shows, the newest first read."""

from __future__ import annotations

from collections.abc import Iterator

from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.results import Recorded

PAGE = 1000
MAX_LOOKED_AT = 20_000
"""Number of changes that a page looks through for those it shows."""


def newest(manager: GPUResourceManager, version: int) -> Iterator[Recorded]:
    """Yield the newest kept changes up to this version, the newest first."""
    end = version
    while end > max(version - MAX_LOOKED_AT, 0):
        start = max(end - PAGE, 0)
        page = [change for change in manager.history(start, PAGE) if change["version"] <= end]
        if not page:
            return
        yield from reversed(page)
        end = start


def lease_of(change: Recorded) -> str:
    """Return the id of the lease or pending request that a change is about, empty if it is about none."""
    if "lease" in change:
        return str(change["lease"]["request"]["lease_id"])
    if "request" in change:
        return str(change["request"]["lease_id"])
    return str(change.get("lease_id", ""))
