"""Spans of starts of the members of a gang."""

from __future__ import annotations

import math

from resource_manager.scheduling.queue.spans import together


def test_members_start_together_where_spans_of_one_domain_overlap() -> None:
    spans = {
        "rack 1": [(0.0, 10.0, True, 1), (10.0, 20.0, False, 1), (15.0, math.inf, False, 1)],
        "rack 2": [(5.0, 12.0, False, 1), (12.0, math.inf, False, 1)],
    }
    assert list(together(spans, 2)) == [10.0, 15.0], "at the end of one span too; the others never meet"
    assert list(together(spans, 3)) == []
    everywhere = {"": [each for of_rack in spans.values() for each in of_rack]}
    assert list(together(everywhere, 3)) == [10.0, 15.0], "the end of a span is a start or is none"
