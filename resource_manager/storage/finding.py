"""What a check of a store finds."""

from __future__ import annotations

import time
from dataclasses import dataclass

MAX_CLOCK_DIFFERENCE_S = 10.0


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of a check; `ok` is false if the store does not work, or may lose data.

    A caution is not ok either, but all works.
    """

    ok: bool
    text: str
    is_caution: bool = False


def of_clock(store_time: float) -> Finding:
    """Return whether a store's clock, in seconds since the epoch, agrees with this machine's."""
    difference_s = abs(store_time - time.time())
    is_well = difference_s < MAX_CLOCK_DIFFERENCE_S
    todo = "" if is_well else ": set both by NTP, such as chrony"
    return Finding(
        is_well,
        f"its clock differs from this machine's by {difference_s:.1f} s, and leases end by it{todo}",
    )
