"""Mark of a state, kept outside of its store: what a dump of the store that is older does not reach."""

from __future__ import annotations

import re
from dataclasses import dataclass

from resource_manager.storage.backup import NUMBERS_LEFT_FREE
from resource_manager.storage.base import Store

MAX_TEXT = 200

MAX_TIME = 1e11
"""A change was before this time, in seconds: of much later ones no date can be written."""


@dataclass(frozen=True, slots=True, order=True)
class Mark:
    """Incarnation and version that a state had, and the time of the change that led to that version."""

    incarnation: str
    version: int
    at: float

    def __str__(self) -> str:
        return f"{self.incarnation}/{self.version}/{self.at!r}"

    @classmethod
    def parse(cls, text: str | None) -> Mark | None:
        """Return the mark in a text; None for a text that is none."""
        parts = (text or "").strip()[:MAX_TEXT].split("/")
        try:
            incarnation, version, at = parts
            mark = cls(incarnation, int(version), float(at))
        except ValueError:
            return None
        is_one = re.fullmatch("[0-9a-f]{24}", incarnation) and mark.version > 0 and 0 <= mark.at < MAX_TIME
        return mark if is_one else None


def mark_of(store: Store, version: int) -> Mark | None:
    """Return the mark of the version that was just read; None if no change led to it."""
    found = store.history(version - 1, 1)
    if not found or found[0][0] != version:
        return None
    return Mark(store.incarnation, version, found[0][1].at)


def is_behind(store: Store, version: int, mark: Mark) -> bool:
    """Return True if the state, read at that version, lacks the change of the mark: an older dump, or none.

    After a restore or a reset a state has a later incarnation and a great version; one that somebody began on
    an emptied store has a small one. What a history no longer reaches is taken for known.
    """
    if store.incarnation != mark.incarnation:
        return store.incarnation < mark.incarnation or version < NUMBERS_LEFT_FREE
    if version < mark.version:
        return True
    found = store.history(mark.version - 1, 1)
    if found and found[0][0] == mark.version:
        return found[0][1].at != mark.at
    oldest = store.history(0, 1)
    return bool(oldest) and oldest[0][0] < mark.version
