"""Lanes of the Gantt chart."""

from __future__ import annotations

from simulator.serverless.plots import _lanes
from simulator.serverless.run import FunctionRecord


def record(fn_id: int, start: float, end: float) -> FunctionRecord:
    return FunctionRecord(0, fn_id, "a", 0, 0, start, start, start, end, 0.0)


def test_containers_that_overlap_in_time_get_different_lanes() -> None:
    records = [record(0, 0, 4), record(1, 5, 6), record(2, 1, 5), record(3, 2, 3), record(4, 3, 9)]
    assert _lanes(records) == [0, 0, 1, 2, 2]
