"""Colours of leases for people: no two alike among those shown together, none an alarm's, each for life.

A lease's colour follows from where it begins. Nobody else can hold that GPU meanwhile, so the colour is its
own and stays while other leases come and go, in every process and on every page. Leases on part of a GPU,
and those without any, take theirs from the fencing token, from a paler half of the colours.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

from resource_manager.models import MILLI_PER_GPU

HUES = 64
LEVELS = 16
HALF = HUES * LEVELS
"""Colours of each half: for whole GPUs, enough for 128 servers of 8."""

FIRST_HUE, LAST_HUE = 135.0, 325.0
"""Degrees of OKLCH, from green over blue to purple. Red is near 29, orange 60, yellow 105."""
DARKEST, LIGHTEST = 0.46, 0.82
CHROMA, PALE_CHROMA = 0.09, 0.055
MAX_DARK_LEVEL = 4
"""The lightest level on which white text reads better than black."""

_SPREAD = (0, 4, 2, 6, 1, 5, 3, 7)
"""The next server's colours lie in the middle between those of this one."""
_STEP = 389
"""Where to look next if a colour is taken; odd, so that it comes past every one of a half."""


class Holder(NamedTuple):
    """The facts of a lease that its colour follows from."""

    task_id: str
    server_id: int
    gpu_ids: tuple[int, ...]
    gpu_milli: int
    fencing_token: int


@dataclass(frozen=True, slots=True)
class Colour:
    """A hue of `HUES`, a lightness of `LEVELS`, and whether it is of the paler half."""

    hue: int
    level: int
    pale: bool

    @property
    def oklch(self) -> tuple[float, float, float]:
        """Lightness from 0 to 1, chroma, hue in degrees."""
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

    @property
    def ink(self) -> str:
        """The colour of text on it."""
        return "#ffffff" if self.level <= MAX_DARK_LEVEL else "#000000"


def assign(holders: Iterable[Holder]) -> dict[str, Colour]:
    """The colour of each lease by its task id, all different up to `2 * HALF` leases.

    Where two would have the same (more than 128 servers, or parts of GPUs granted more than a thousand
    grants apart), the one that was granted first keeps it. Beyond `2 * HALF` each has the colour it would
    have alone.
    """
    oldest_first = sorted(holders, key=lambda holder: holder.fencing_token)
    if len(oldest_first) > 2 * HALF:
        return {holder.task_id: _colour(_preferred(holder)) for holder in oldest_first}
    taken: set[int] = set()
    found: dict[str, Colour] = {}
    for holder in oldest_first:
        slot = _preferred(holder)
        half, at = divmod(slot, HALF)
        tries = 0
        while slot in taken:
            tries += 1
            slot = (half + tries // HALF) % 2 * HALF + (at + _STEP * tries) % HALF
        taken.add(slot)
        found[holder.task_id] = _colour(slot)
    return found


def _preferred(holder: Holder) -> int:
    if not holder.gpu_ids or holder.gpu_milli != MILLI_PER_GPU:
        return HALF + holder.fencing_token % HALF
    octet, place = divmod(holder.gpu_ids[0], 8)
    return (8 * (holder.server_id + 61 * octet) + place) % HALF


def _colour(slot: int) -> Colour:
    """The GPUs of a server are an eighth of the hues apart, those of the next server between them.

    The factors keep the closest two of four servers of 8 GPUs far apart, and the first GPUs of all most.
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
