"""Figures that every simulator computes alike."""

from __future__ import annotations

from collections.abc import Sequence


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
