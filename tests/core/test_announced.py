"""Announced demands: their names, and their order along the DAG."""

from __future__ import annotations

import pytest

from resource_manager.core.announced import along_the_dag, names_announced, run_of
from resource_manager.core.changes import Announced
from resource_manager.core.models import Request


def announced(**after: str) -> dict[str, Announced]:
    """Return announced demands by lease id, each after those named by the letters."""
    return {name: Announced(Request(name, 1), 0.0, tuple(before)) for name, before in after.items()}


def test_a_mapped_task_is_announced_without_its_map_index() -> None:
    assert names_announced("i:d/r/t/3") == ("i:d/r/t/3", "i:d/r/t")
    assert names_announced("by_hand") == ("by_hand", "")
    assert names_announced("i:d/r/t/3#2") == ("i:d/r/t/3", "i:d/r/t"), "as a replay calls its second lease"
    assert run_of("i:d/r/t") == "i:d/r"


@pytest.mark.parametrize(
    ("after", "order"),
    [
        ({"c": "b", "b": "a", "a": ""}, "abc"),
        ({"c": "x", "a": ""}, "ca"),
        ({"a": "b", "b": "a", "c": "b", "d": ""}, "d"),
    ],
    ids=["chain", "some have asked", "a cycle, and what comes after it"],
)
def test_each_comes_after_those_it_waits_for(after: dict[str, str], order: str) -> None:
    assert [each.lease_id for each in along_the_dag(announced(**after))] == list(order)
