"""Colours of leases: all different among those shown together, none like an alarm, constant for life.

The server and the first GPU of a lease determine its colour. No other lease can have that GPU at the same
time, so the colour is unique and constant while other leases start and end, in every process and on every
page. Leases on a GPU fraction, and those without a GPU, get theirs from the fencing token, from a paler half.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

from resource_manager.core.models import MILLI_PER_GPU

HUES = 64
LEVELS = 16
HALF = HUES * LEVELS
"""Number of colours in each half: for whole GPUs, enough for 128 servers of 8."""

FIRST_HUE, LAST_HUE = 135.0, 325.0
"""Range of hues in degrees of OKLCH, green to purple. Alarms: red is near 29, orange 60, yellow 105."""
DARKEST, LIGHTEST = 0.46, 0.82
CHROMA, PALE_CHROMA = 0.09, 0.055

_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)
"""Offsets of hue that put the colours of the next server midway between those of the previous one."""
_STEP = 389
"""Step to the next colour if one is taken; odd, so that it reaches every colour of a half."""


class Holder(NamedTuple):
    """Facts of a lease that determine its colour."""

    lease_id: str
    server_id: int
    gpu_ids: tuple[int, ...]
    gpu_milli: int
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Colour:
    """Colour: a hue of `HUES`, a lightness of `LEVELS`, and the half (pale or not)."""

    hue: int
    level: int
    pale: bool

    @property
    def oklch(self) -> tuple[float, float, float]:
        """Lightness from 0 to 1, chroma, and hue in degrees."""
        return (
            DARKEST + (LIGHTEST - DARKEST) * self.level / (LEVELS - 1),
            PALE_CHROMA if self.pale else CHROMA,
            FIRST_HUE + (LAST_HUE - FIRST_HUE) * self.hue / (HUES - 1),
        )

    @property
    def rgb(self) -> str:
        """`#rrggbb` in sRGB."""
        lightness, chroma, hue = self.oklch
        a, b = chroma * math.cos(math.radians(hue)), chroma * math.sin(math.radians(hue))
        long = (lightness + 0.3963377774 * a + 0.2158037573 * b) ** 3
        medium = (lightness - 0.1055613458 * a - 0.0638541728 * b) ** 3
        short = (lightness - 0.0894841775 * a - 1.2914855480 * b) ** 3
        return "#" + "".join(
            f"{_encoded(part):02x}"
            for part in (
                4.0767416621 * long - 3.3077115913 * medium + 0.2309699292 * short,
                -1.2684380046 * long + 2.6097574011 * medium - 0.3413193965 * short,
                -0.0041960863 * long - 0.7034186147 * medium + 1.7076147010 * short,
            )
        )


def assign(holders: Iterable[Holder]) -> dict[str, Colour]:
    """Return the colour of each lease by task id, all different up to `2 * HALF` leases.

    If two leases have the same preferred colour (with more than 128 servers, or GPU fractions granted more
    than a thousand grants apart), the lease granted first gets it. Beyond `2 * HALF` leases each gets its
    preferred colour.
    """
    oldest_first = sorted(holders, key=lambda holder: holder.fencing_token)
    if len(oldest_first) > 2 * HALF:
        return {holder.lease_id: _colour(_preferred(holder)) for holder in oldest_first}
    taken: set[int] = set()
    free = [HALF, HALF]
    found: dict[str, Colour] = {}
    for holder in oldest_first:
        slot = _preferred(holder)
        half, at = divmod(slot, HALF)
        tries = 0 if free[half] else HALF - 1  # a full half need not be searched
        while slot in taken:
            tries += 1
            slot = (half + tries // HALF) % 2 * HALF + (at + _STEP * tries) % HALF
        taken.add(slot)
        free[slot // HALF] -= 1
        found[holder.lease_id] = _colour(slot)
    return found


def _preferred(holder: Holder) -> int:
    if not holder.gpu_ids or holder.gpu_milli != MILLI_PER_GPU:
        return HALF + holder.fencing_token % HALF
    octet, place = divmod(holder.gpu_ids[0], 8)
    return (8 * (holder.server_id + 61 * octet) + place) % HALF


@cache
def _colour(slot: int) -> Colour:
    """Return the colour of a slot.

    The GPUs of a server are an eighth of the hues apart; those of the next server lie between them. The
    factors keep any two GPUs of four servers of 8 far apart, and the first GPUs of the servers farthest.
    """
    half, at = divmod(slot, HALF)
    server, place = divmod(at, 8)
    block, row = divmod(server, 8)
    hue = 8 * ((3 * place + 5 * row) % 8) + _SPREAD[row]
    level = (2 * ((4 * place + 5 * row) % 8) + 5 * block) % LEVELS
    return Colour(hue, level, bool(half))


def _encoded(linear: float) -> int:
    part = min(max(linear, 0.0), 1.0)
    return round(255 * (12.92 * part if part <= 0.0031308 else 1.055 * part ** (1 / 2.4) - 0.055))
