"""Arrival times of workflows: given, or drawn from a Poisson process."""

from __future__ import annotations

import math

import numpy as np

from simulator.errors import InputError

MAX_ARRIVALS = 1_000_000


def parse_arrivals(text: str, seed: int) -> list[float]:
    """Parse `0,1,2.5` or `poisson:RATE:N` (RATE per second, N workflows) into seconds; raise `InputError`."""
    if text.startswith("poisson:"):
        parts = text.split(":")
        try:
            rate, count = float(parts[1]), int(parts[2])
        except (IndexError, ValueError):
            rate, count = 0.0, 0
        if len(parts) != 3 or not 0 < rate < math.inf or not 1 <= count <= MAX_ARRIVALS:
            wanted = f"poisson:RATE:N with RATE above 0 and N from 1 to {MAX_ARRIVALS:,}"
            raise InputError(f"arrivals {text!r}: expected {wanted}")
        gaps = np.random.default_rng(seed).exponential(1.0 / rate, size=count)
        return [float(time) for time in np.cumsum(gaps)]
    try:
        times = [float(part) for part in text.split(",")]
    except ValueError:
        times = [-1.0]
    if not all(0 <= time < math.inf for time in times):
        raise InputError(f"arrivals {text!r}: expected seconds like 0,1,2.5 or poisson:RATE:N")
    return times
