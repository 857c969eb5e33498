"""The closure of a server since a restore, alone and on top of an earlier one."""

from __future__ import annotations

from dataclasses import replace

from resource_manager.core.changes import Drained
from resource_manager.core.search import (
    NEWCOMERS_S,
    awaits_restore,
    closed_by_hand,
    closed_without_restore,
    is_unsearched,
    newcomer,
    outdated,
    reason_before,
    restored,
    unsearched,
)


def test_an_open_server_is_closed_for_its_search_alone() -> None:
    closed = unsearched("a", 5.0, None, "the backup of noon")
    assert is_unsearched(closed)
    assert reason_before(closed) == ""
    assert closed.reason.startswith("not searched since the restore of the backup of noon: ")
    assert "gpu-manager resume a" in closed.reason


def test_a_closed_server_keeps_its_reason_through_every_restore() -> None:
    closed = unsearched("a", 5.0, Drained("a", 1.0, "fans", failed=True, by="ada"), "one")
    again = unsearched("a", 9.0, closed, "another")
    assert is_unsearched(again)
    assert (reason_before(again), again.at, again.failed, again.by) == ("fans", 9.0, True, "ada")
    assert "restore of one" not in again.reason
    assert reason_before(unsearched("a", 9.0, Drained("a", 1.0), "one")) == "drained"


def test_a_second_restore_of_a_server_that_was_open_closes_it_for_its_search_alone() -> None:
    again = unsearched("a", 9.0, unsearched("a", 5.0, None, "one"), "another")
    assert reason_before(again) == ""


def test_no_other_closure_waits_for_a_search() -> None:
    assert not is_unsearched(None)
    assert not is_unsearched(Drained("a", 1.0, "fans"))


def test_a_server_of_an_old_state_waits_for_the_restore_and_no_search_opens_it() -> None:
    closed = outdated("a", 5.0, "2026-12-01T12:00:00Z")
    assert closed.reason == "older than the state of 2026-12-01T12:00:00Z: gpu-manager store restore FILE"
    assert awaits_restore(closed)
    assert not is_unsearched(closed)
    assert awaits_restore(unsearched("a", 5.0, None, "one"))
    assert not awaits_restore(Drained("a", 1.0, "fans"))


def test_a_server_that_is_drained_meanwhile_still_waits_for_its_search() -> None:
    drained = Drained("a", 9.0, "new fans", failed=True)
    for before in (None, Drained("a", 1.0, "fans")):
        closed = unsearched("a", 5.0, before, "one")
        again = closed_by_hand(drained, closed)
        assert closed_by_hand(drained, again) == again
        assert is_unsearched(again)
        assert (reason_before(again), again.at, again.failed) == ("new fans", 9.0, True)
        assert again.reason.endswith("; " + unsearched("a", 5.0, None, "one").reason)
        assert reason_before(closed_by_hand(Drained("a", 9.0), closed)) == "drained"
        assert closed_by_hand(drained, before) is drained


def test_a_server_is_new_to_a_restored_state_for_thirty_days_unless_it_left_it() -> None:
    mark = restored(5.0, "the backup of noon")
    absent = {mark.node: mark, "left": Drained("left", 1.0, "fans")}
    closed = newcomer("a", 9.0, absent)
    assert closed == unsearched("a", 9.0, None, "the backup of noon")
    assert newcomer("left", 9.0, absent) is None, "it comes back as it left"
    assert newcomer("a", 5.0 + NEWCOMERS_S + 1.0, absent) is None
    assert newcomer("a", 9.0, {}) is None


def test_where_nothing_will_be_restored_servers_are_as_they_were_before() -> None:
    fans = Drained("a", 1.0, "fans", failed=True, by="ada")
    waiting = [
        unsearched("b", 5.0, None, "one"),
        outdated("c", 5.0, "2026-12-01T12:00:00Z"),
        unsearched("d", 5.0, replace(fans, node="d"), "one"),
        restored(5.0, "one"),
    ]
    assert list(closed_without_restore([fans, *waiting])) == [fans, replace(fans, node="d", at=5.0)]
