"""Figures as text for people: numbers, shares and lengths of time in a unit that suits them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

NOTHING = "–"


@dataclass(frozen=True, slots=True)
class TimeUnit:
    """Unit for lengths of time, used for a whole column or axis, from so many seconds on."""

    name: str
    seconds: float
    from_s: float

    def scaled(self, seconds: Iterable[float]) -> list[float]:
        """Return the lengths in this unit."""
        return [value / self.seconds for value in seconds]


SECONDS = TimeUnit("s", 1.0, 1.0)
UNITS = (
    TimeUnit("days", 86400.0, 2 * 86400.0),
    TimeUnit("hours", 3600.0, 2 * 3600.0),
    TimeUnit("minutes", 60.0, 120.0),
    SECONDS,
    TimeUnit("ms", 1e-3, 1e-3),
    TimeUnit("µs", 1e-6, 0.0),
)


def time_unit(longest_s: float) -> TimeUnit:
    """Return the unit in which a column or axis of times up to that many seconds reads well."""
    return next(unit for unit in UNITS if abs(longest_s) >= unit.from_s) if longest_s else SECONDS


def duration(seconds: float) -> str:
    """Return a length of time such as 3.5 hours or 12 ms."""
    unit = time_unit(seconds)
    return f"{number(seconds / unit.seconds, 1)} {unit.name}"


def instead_of(now_s: float, before_s: float) -> str:
    """Return `4.3 instead of 8.4 hours`, or each in its own unit if one would be below 1."""
    unit = time_unit(max(now_s, before_s))
    if min(now_s, before_s) < unit.seconds:
        return f"{duration(now_s)} instead of {duration(before_s)}"
    return f"{number(now_s / unit.seconds, 1)} instead of {number(before_s / unit.seconds, 1)} {unit.name}"


def number(value: float, digits: int | None = None) -> str:
    """Return a number with thousands separated and at most that many decimals, without trailing zeros.

    Without `digits`, small numbers get three significant figures and others two decimals.
    """
    if isinstance(value, int) or value == 0:
        return f"{value:,}" if isinstance(value, int) else "0"
    if digits is None:
        if abs(value) < 0.1:
            return f"{value:.3g}"
        digits = 2
    text = f"{value:,.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def share(value: float, digits: int = 1) -> str:
    """Return a fraction of one as per cent."""
    return f"{100 * value:.{digits}f} %"
