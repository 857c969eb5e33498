"""Rate limiter on a fake clock."""

from __future__ import annotations

import pytest

from resource_manager.errors import SettingsError
from resource_manager.rest.limits import FixedWindow
from resource_manager.rest.problems import ProblemError


def test_a_new_window_resets_the_counts() -> None:
    now = [0.0]
    window = FixedWindow("2/minute", lambda: now[0])
    window.hit("ada")
    assert not window.is_used_up("ada")
    window.hit("ada")
    window.hit("bob")
    with pytest.raises(ProblemError) as caught:
        window.hit("ada")
    assert caught.value.status == 429
    assert caught.value.headers == {"Retry-After": "60"}
    assert not window.is_used_up("bob")
    now[0] = 59.5
    assert window.is_used_up("ada")
    now[0] = 60.0
    window.hit("ada")


@pytest.mark.parametrize(
    "rate", ["", "many", "0/second", "-1/second", "1/fortnight", "1000", "1/second/second"]
)
def test_an_invalid_rate_is_refused(rate: str) -> None:
    with pytest.raises(SettingsError, match="1000/second"):
        FixedWindow(rate)
