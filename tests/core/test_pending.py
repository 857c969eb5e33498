"""The pending requests in kept orders."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from resource_manager.core.models import Request
from resource_manager.core.pending import PendingRequest, PendingRequests, arrival


def by_name_length(entry: PendingRequest) -> tuple[float, int]:
    return (len(entry.lease_id), entry.sequence)


def requested(name: str, sequence: int, queued_at: float = 0.0) -> PendingRequest:
    return PendingRequest(Request(name, gpus=1), queued_at, sequence)


@given(
    st.lists(st.tuples(st.sampled_from(["a", "bb", "ccc", "dddd", "e"]), st.integers(0, 9), st.booleans())),
    st.integers(0, 8),
)
def test_the_kept_orders_are_those_of_sorting_anew(
    steps: list[tuple[str, int, bool]], first_use: int
) -> None:
    kept, plain = PendingRequests(), dict[str, PendingRequest]()
    for number, (name, place, comes) in enumerate(steps):
        if comes:
            # Some come back to an earlier place, as preempted jobs do; a sequence is given once.
            kept[name] = plain[name] = requested(name, 100 * place + number)
        else:
            assert kept.pop(name, None) == plain.pop(name, None)
        if number >= first_use:
            assert kept.by(by_name_length) == sorted(plain.values(), key=by_name_length)
        assert kept.by(arrival) == sorted(plain.values(), key=arrival)
        assert kept.last == max(plain.values(), key=arrival, default=None)
    assert kept == plain
    assert PendingRequests(plain.values()).by(arrival) == kept.by(arrival)


def test_a_clock_set_back_is_told_until_nothing_is_pending() -> None:
    kept = PendingRequests([requested("a", 1, 5.0), requested("c", 3, 7.0)])
    kept["b"] = requested("b", 2, 6.0)
    assert kept.is_in_time
    kept["d"] = requested("d", 4, 6.5)
    assert not kept.is_in_time
    assert not PendingRequests(kept.values()).is_in_time
    for name in "abcd":
        assert not kept.is_in_time
        del kept[name]
    assert kept.is_in_time


def test_what_changes_an_order_that_was_given_out_is_not_seen_in_it() -> None:
    kept = PendingRequests([requested("a", 1), requested("b", 2)])
    given_out = kept.by(arrival)
    del kept["a"]
    assert [entry.lease_id for entry in given_out] == ["a", "b"]
