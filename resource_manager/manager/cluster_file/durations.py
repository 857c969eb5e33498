"""Durations as text, in files, options and forms: `90s`, `45min`, `2h`, `3 days`, or seconds."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Annotated

from pydantic import BeforeValidator, Field

_UNITS_S = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0, "w": 604_800.0}
_WORDS = {"sec": "s", "second": "s", "min": "min", "minute": "min", "hour": "h", "day": "d", "week": "w"}
_UNITS_S |= {word + plural: _UNITS_S[unit] for word, unit in _WORDS.items() for plural in ("", "s")}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*([a-z]*)")


def seconds_of(duration: float | str | timedelta) -> float:
    """Return the seconds of a duration such as `3d`, `12h`, `10min` or `90`; raises `ValueError`."""
    if isinstance(duration, timedelta):
        return duration.total_seconds()
    if not isinstance(duration, str | bool):
        return float(duration)
    found = _DURATION.fullmatch(str(duration).strip())
    if found is None or found[2] not in _UNITS_S:
        raise ValueError(f"must be seconds or a text such as 45s, 10min, 12h, 3d, got {duration!r}")
    return float(found[1]) * _UNITS_S[found[2]]


def as_seconds(value: object) -> object:
    """Return the seconds of a text or `timedelta`, and anything else as it is, for a field of seconds."""
    return seconds_of(value) if isinstance(value, (str, timedelta, bool)) else value


Duration = Annotated[
    float, BeforeValidator(as_seconds), Field(ge=0, le=10 * 365 * 86_400, allow_inf_nan=False)
]
Seconds = Annotated[Duration, Field(gt=0)]
