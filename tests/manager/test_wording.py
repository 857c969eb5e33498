"""Changes of the history in words, and the words by which they are asked for."""

from __future__ import annotations

from typing import Any, get_args

import pytest

from resource_manager.core.changes import (
    Cancelled,
    Change,
    Drained,
    GpuClosed,
    GpuOpened,
    Granted,
    InventoryChanged,
    JobPlaced,
    MaintenanceChanged,
    MembersReleased,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
    Resumed,
    TeamsChanged,
)
from resource_manager.core.models import JobPlace, Lease, Placement, Request
from resource_manager.core.names import short_id
from resource_manager.core.teams import Teams
from resource_manager.errors import InvalidRequestError
from resource_manager.manager.wording import (
    MAX_LINE,
    MAX_LINES,
    What,
    bounded,
    by_whom,
    describe,
    matches,
    what_of,
)
from resource_manager.storage import codec

GANG = Lease(Request("t", 2, nodes=2), (Placement("a", (0, 1)), Placement("b", (2, 3))), 1, 0.0, sequence=1)
CPUS = Lease(Request("t"), (Placement("a"),), 1, 0.0, sequence=2)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (Queued(Request("t", 2), 0.0, 1, 0.0), f"t {short_id(1)} asks for 2 GPUs"),
        (Queued(Request("t", 1, gpu_milli=250), 0.0, 1, 0.0), f"t {short_id(1)} asks for 0.25 GPUs"),
        (Queued(Request("t", 8, nodes=2), 0.0, 1, 0.0), f"t {short_id(1)} asks for 2 × 8 GPUs"),
        (Granted(GANG, 0.0), f"t {short_id(1)} on a, GPUs 0, 1; b, GPUs 2, 3"),
        (Granted(CPUS, 0.0), f"t {short_id(2)} on a, no GPU"),
        (JobPlaced("t", 1, (JobPlace("ssh", "a:22"), JobPlace("ssh", "b:22")), 0.0), "t a:22, b:22"),
        (Renewed("t", 1, 0.0), "t"),
        (Released("t", 1, 0.0, "FAILED", reason="no route"), "t FAILED, no route"),
        (MembersReleased("t", 1, (0, 2), 0.0, "FAILED"), "t ranks 0, 2: FAILED"),
        (Preempting("t", 1, "stronger", 9.0, 0.0), "t for stronger"),
        (Preempting("t", 1, "", 9.0, 0.0), "t taken back"),
        (Quarantined("t", 1, 0.0), "t not ended or renewed in time"),
        (Quarantined("t", 1, 0.0, revoked=True), "t released by force"),
        (Cancelled("t", 0.0, "tired"), "t tired"),
        (Drained("a", 0.0, "fan", failed=True), "a failed, fan"),
        (Resumed("a", 0.0), "a"),
        (GpuClosed("a", 3, "", "xid 79; lost", 0.0), "a GPU 3: xid 79; lost"),
        (GpuOpened("a", 3, 0.0), "a GPU 3"),
        (TeamsChanged(Teams(), 0.0, lines=("teams.v.limit: 2 -> 3", "x")), "teams.v.limit: 2 -> 3; x"),
        (MaintenanceChanged((), 0.0, lines=("- window 7",)), "- window 7"),
        (InventoryChanged((), 0.0), "0 servers"),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_change_says_what_it_is_about_and_what_it_does(change: Change, words: str) -> None:
    assert describe(codec.change_to_dict(change)) == words


def test_what_a_change_does_not_bring_is_told_by_its_name() -> None:
    released = codec.change_to_dict(Released("here:d/r/t", 1, 0.0, "FAILED"))
    assert describe(released, {"here:d/r/t": "d.t k7wd"}) == "d.t k7wd FAILED"
    preempted = codec.change_to_dict(Preempting("a", 1, "b", 9.0, 0.0))
    assert describe(preempted, {"b": "d.t k7wd"}) == "a for d.t k7wd"


def test_who_asked_comes_after_what_was_done() -> None:
    assert by_whom("released", {"by": "ada"}) == "released, by ada"
    assert by_whom("expired", {}) == "expired"


def test_every_kind_of_change_can_be_asked_for_by_one_word() -> None:
    kinds = [kind for what in What for kind in what.kinds]
    assert sorted(kinds) == sorted(kind.__name__.lower() for kind in get_args(Change))


@pytest.mark.parametrize(
    ("by", "what", "found"),
    [
        ("", None, True),
        ("ada", None, True),
        ("ad", None, False),
        ("a*", What.RELEASE, True),
        ("ada", What.RENEW, False),
        ("bob", What.RELEASE, False),
        ("*", None, True),
        ("**a*d*a**", None, True),
        ("*d", None, False),
        ("a*a*a", None, False),
        ("*ada*ada*", None, False),
        ("a?a", None, False),
        ("[a-b]da", None, False),
    ],
)
def test_changes_are_found_by_name_and_kind(by: str, what: What | None, found: bool) -> None:
    change: dict[str, Any] = {"change": "released", "by": "ada"}
    assert matches(change, by, what) is found


def test_a_name_with_brackets_is_no_pattern_for_itself() -> None:
    for by in ("team [a]", "team [a*", "*[a]"):
        assert matches({"change": "released", "by": "team [a]"}, by, None)


def test_what_time_brought_has_no_name_to_be_found_by() -> None:
    assert not matches({"change": "expired"}, "ada", None)


def test_an_unknown_kind_is_named_with_those_that_exist() -> None:
    assert what_of("") is None
    with pytest.raises(InvalidRequestError, match=r"^what must be one of submit, grant, .* got 'borrow'$"):
        what_of("borrow")


def test_the_lines_of_a_change_have_an_end() -> None:
    assert bounded(["a", "b"]) == ("a", "b")
    many = bounded(str(number) for number in range(MAX_LINES + 7))
    assert (len(many), many[-1]) == (MAX_LINES + 1, "and 7 more")
    [line] = bounded(["x" * 5000])
    assert len(line) == MAX_LINE
