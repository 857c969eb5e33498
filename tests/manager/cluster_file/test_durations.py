"""Durations as people write them, wherever one is read."""

from __future__ import annotations

import pytest

from resource_manager.manager.cluster_file.durations import seconds_of


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *[("90", 90), ("90s", 90), ("5m", 300), ("10min", 600), ("2h", 7200), ("1.5 d", 129_600)],
        *[("1 hour", 3600), ("90 minutes", 5400), ("2 days", 172_800), ("3weeks", 1_814_400)],
    ],
)
def test_a_unit_is_a_letter_or_a_word(text: str, seconds: float) -> None:
    assert seconds_of(text) == seconds


@pytest.mark.parametrize("text", ["", "h", "1 month", "1 hs", "-1h", "1h30min", "1e3s"])
def test_other_texts_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="must be seconds or a text such as 45s"):
        seconds_of(text)
