"""Figures that every simulator computes alike."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence


def percentile(values: Sequence[float], percent: float) -> float | None:
    """Return the percentile of the values, in any order; None without values.

    The rule is numpy's "linear": the smallest value is the 0th, the largest the 100th, the others lie evenly
    between, and a percentile that falls between two values is interpolated. Muri's p99 follows its paper.
    """
    import numpy as np

    return float(np.percentile(values, percent, method="linear")) if values else None


def mean(values: Sequence[float]) -> float | None:
    """Return the mean; None without values."""
    return sum(values) / len(values) if values else None


def over_seeds(values: Sequence[float | None]) -> dict[str, float | None]:
    """Return the mean over seeds with its 95 % confidence interval (Student's t); None below two seeds."""
    known = [value for value in values if value is not None]
    if not known:
        return {"mean": None, "low": None, "high": None}
    import numpy as np

    mean = float(np.mean(known))
    if len(known) < 2:
        return {"mean": mean, "low": None, "high": None}
    from scipy.special import stdtrit

    half = float(stdtrit(len(known) - 1, 0.975) * np.std(known, ddof=1) / math.sqrt(len(known)))
    return {"mean": mean, "low": mean - half, "high": mean + half}


def is_above(values: Sequence[float], others: Sequence[float]) -> bool:
    """Return whether the mean is above the others' beyond chance: their confidence intervals do not overlap.

    Single values are compared as they are.
    """
    return is_interval_above(over_seeds(values), over_seeds(others))


def is_interval_above(of: Mapping[str, float | None], than: Mapping[str, float | None]) -> bool:
    """Return whether one result of `over_seeds` is above another, as `is_above` has it."""
    low = of["mean"] if of.get("low") is None else of["low"]
    high = than["mean"] if than.get("high") is None else than["high"]
    return low is not None and high is not None and low > high
