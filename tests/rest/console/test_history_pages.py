"""The newest changes of the history, which pages show: read once, then as they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from flask.testing import FlaskClient

from resource_manager import GPUResourceManager
from resource_manager.errors import StoreUnavailableError
from resource_manager.manager.recorded_changes import MAX_LOOKED_AT
from resource_manager.rest.console.history_pages import MAX_READ, RecentChanges
from resource_manager.rest.tokens import Role


class Kept:
    """History of so many changes, which counts those that are read."""

    def __init__(self, count: int) -> None:
        self.read = 0
        self.changes: list[dict[str, Any]] = []
        self.grow(count)

    def grow(self, count: int, kind: str = "granted") -> None:
        versions = range(len(self.changes) + 1, len(self.changes) + count + 1)
        self.changes += [{"version": version, "change": kind} for version in versions]

    def __call__(self, after: int, limit: int) -> list[Any]:
        page = self.changes[after : after + limit]
        self.read += len(page)
        return page

    def newest_first(self, version: int) -> list[Any]:
        return self.changes[max(version - MAX_LOOKED_AT, 0) : version][::-1]


def test_changes_are_read_once_and_then_as_they_come() -> None:
    kept, recent = Kept(3000), RecentChanges()
    assert recent.newest(kept, 3000) == kept.newest_first(3000)
    kept.grow(2500)
    kept.read = 0
    assert recent.newest(kept, 5500) == kept.newest_first(5500)
    assert kept.read < 2600
    assert recent.newest(kept, 10) == kept.newest_first(10), "as of a page whose state is older"


def test_renewals_push_nothing_out() -> None:
    """A GPU that was closed, and why, was shown for minutes where thousands of leases are renewed."""
    kept, recent = Kept(10), RecentChanges()
    shown = recent.newest(kept, 10)
    for count in (1500, MAX_LOOKED_AT):
        kept.grow(count, "renewed")
        kept.read = 0
        assert recent.newest(kept, len(kept.changes)) == shown
        assert kept.read <= count + 1, "those since the last look"
    kept.grow(1, "gpuclosed")
    assert [each["change"] for each in recent.newest(kept, len(kept.changes))][:2] == ["gpuclosed", "granted"]


def test_after_a_long_time_only_the_newest_are_read() -> None:
    kept, recent = Kept(10), RecentChanges()
    recent.newest(kept, 10)
    kept.grow(MAX_READ + 1)
    kept.read = 0
    version = len(kept.changes)
    assert recent.newest(kept, version) == kept.newest_first(version)
    assert kept.read <= MAX_LOOKED_AT + 1000


def test_renewals_of_a_morning_without_a_page_push_nothing_out() -> None:
    """A service that was just started, and one that nobody looked at, read as far as the store reaches."""
    kept, recent = Kept(10), RecentChanges()
    shown = recent.newest(kept, 10)
    kept.grow(MAX_READ - 100, "renewed")
    assert recent.newest(kept, len(kept.changes)) == shown
    assert kept.read <= MAX_READ
    restarted = RecentChanges()
    assert restarted.newest(kept, len(kept.changes)) == shown
    kept.grow(200, "renewed")
    kept.read = 0
    assert RecentChanges().newest(kept, len(kept.changes)) == []
    assert kept.read <= MAX_READ + 1000
    assert restarted.newest(kept, len(kept.changes)) == shown


def test_after_an_outage_amid_the_first_read_all_is_read() -> None:
    kept, recent = Kept(3000), RecentChanges()

    def fails(after: int, limit: int) -> list[Any]:
        if after < 2000:
            raise StoreUnavailableError("gone")
        return kept(after, limit)

    with pytest.raises(StoreUnavailableError):
        recent.newest(fails, 3000)
    assert recent.newest(kept, 3000) == kept.newest_first(3000)


@pytest.mark.parametrize("grows", [0, 80], ids=["shorter", "other"])
def test_a_history_that_was_set_back_to_an_older_one_is_read_again(grows: int) -> None:
    kept, recent = Kept(100), RecentChanges()
    recent.newest(kept, 100)
    del kept.changes[50:]
    kept.grow(grows, "released")
    assert recent.newest(kept, 50 + grows) == kept.newest_first(50 + grows)


def test_an_open_page_of_a_lease_reads_only_what_came_since(
    as_role: Callable[..., FlaskClient], manager: GPUResourceManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    manager.submit("t", 2)
    for _ in range(50):
        manager.drain(0, 7, reason="ECC")
        manager.resume(0, 7)
    history, read = manager.store.history, []

    def counted(after: int, limit: int) -> Any:
        page = list(history(after, limit))
        read.append(len(page))
        return page

    monkeypatch.setattr(manager.store, "history", counted)
    reader = as_role(Role.READER)
    for expected in (range(100, 1000), range(10)):
        read.clear()
        assert "granted on gpu-server-" in reader.get("/lease?id=t").text
        assert sum(read) in expected
        manager.renew("t")
