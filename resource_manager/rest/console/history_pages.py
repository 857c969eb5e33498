"""Changes of the history that a page shows."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice

from resource_manager.manager.answer_words import recorded_name
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.recorded_changes import MAX_LOOKED_AT, newest_changes
from resource_manager.manager.results import Recorded


def newest(manager: GPUResourceManager, version: int) -> Iterator[Recorded]:
    """Yield the newest kept changes up to this version, the newest first."""
    return islice(newest_changes(manager.history, version), MAX_LOOKED_AT)


def is_called(change: Recorded, name: str) -> bool:
    """Return True if a change brings the lease or pending request with that short id or display name."""
    shown, _, short_id = recorded_name(change).rpartition(" ")
    return bool(short_id) and name in (shown, short_id)
