"""Published scores of the ten public datasets, by tiers."""

from __future__ import annotations

PUBLISHED_SCORES: dict[str, tuple[float, ...]] = {
    "host": (
        29169.42, 20301.5, 27462.65, 26263.6, 21822.35, 25660.49, 25803.39, 26754.3, 21369.72, 21016.49,
    ),
    "host+bs": (
        29231.58, 24189.68, 27602.95, 26354.84, 22703.44, 27830.61, 26887.08, 27586.95, 23213.47, 24715.19,
    ),
    "host+bs+ue": (
        29312.14, 24776.26, 27660.29, 26594.34, 23236.26, 28412.72, 27716.76, 28095.64, 23912.02, 25646.48,
    ),
}  # fmt: skip
"""Tiers -> the scores of test0 to test9. Source: the contest entry `reskipper/6GANA_AIC`."""


def published_score(dataset_name: str, tiers: str) -> float | None:
    """Return the published score of a public dataset, identified by its name; None for any other."""
    number = dataset_name.removeprefix("test")
    if dataset_name == number or not number.isdecimal() or int(number) > 9:
        return None
    return PUBLISHED_SCORES[tiers][int(number)]
