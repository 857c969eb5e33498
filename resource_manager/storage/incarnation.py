"""Names of the incarnations of a state: a state that began later has the greater name."""

from __future__ import annotations

import os

TIME_DIGITS = 12
"""Digits of the time in milliseconds, to base 16, with which a name begins."""


def new_incarnation(now: float, after: str = "", backup_id: str = "") -> str:
    """Return the name of a state that begins now, greater than `after`, with the id of what it is made of."""
    at = max(round(now * 1000), _time_of(after) + 1)
    return f"{at:0{TIME_DIGITS}x}{backup_id or new_id()}"


def new_id() -> str:
    """Return an id that no backup has had."""
    return os.urandom(6).hex()


def backup_id_of(incarnation: str) -> str:
    """Return the id of the backup that the state was restored from; of another state, that of none."""
    return incarnation[TIME_DIGITS:]


def began_at(incarnation: str) -> float:
    """Return when the state of that name began, in seconds by its store's clock, to the millisecond."""
    return _time_of(incarnation) / 1000


def _time_of(incarnation: str) -> int:
    return int(incarnation[:TIME_DIGITS], 16) if incarnation else 0
