"""The page of benchmarks: which figures meet their targets."""

from __future__ import annotations

import pytest

from benchmarks.tables.row import NOT_MEASURED, Row


@pytest.mark.parametrize(
    ("target", "value", "is_met"),
    [
        ("≤ 0.5 s", "0.50 s", True),
        ("≤ 0.5 s", "0.51 s", False),
        ("≥ 100,000", "99,999/s", False),
        ("≥ 100,000", "132,563 pairs/s", True),
        ("77 to 83 %", "76.9 %", False),
        ("77 to 83 %", "83.0 %", True),
        ("0", "0", True),
        ("0", "1", False),
        ("≤ 1 s", NOT_MEASURED, None),
    ],
)
def test_a_target_is_met_by_what_the_page_says(target: str, value: str, is_met: bool | None) -> None:
    assert Row("a figure", "path", "{}", target).is_met(value) is is_met
