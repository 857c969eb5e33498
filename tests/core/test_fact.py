"""Facts: values that know their fields."""

from __future__ import annotations

from typing import get_args

import pytest

from resource_manager.core.fact import fact
from resource_manager.core.refusal import Fact
from resource_manager.core.server_facts import NoAddress, NoServer


@fact
class Distance:
    """Distance between two servers."""

    hops: int
    unit: str = "hops"


def test_facts_of_the_same_fields_are_the_same() -> None:
    assert Distance(3) == Distance(3, "hops")
    assert len({Distance(3), Distance(3), Distance(4)}) == 2
    facts: set[object] = {NoAddress(), NoServer()}
    assert len(facts) == 2, "facts without a field are told apart by their class"


def test_a_fact_shows_its_fields_and_takes_no_other() -> None:
    assert repr(Distance(3)) == "Distance(hops=3, unit='hops')"
    with pytest.raises(AttributeError):
        Distance(3).weight = 1  # type: ignore[attr-defined]


def test_every_ground_of_a_refusal_is_a_fact() -> None:
    assert {kind.__eq__ for kind in get_args(Fact)} == {Distance.__eq__}
