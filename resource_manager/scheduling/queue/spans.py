"""Spans of time in which members of a gang may start, and when enough of them may start together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping

Span = tuple[float, float, bool, int]
"""Starts of members of a gang: begin, end, True if the end is one too, and the most members."""


def together(spans_of: Mapping[str, Iterable[Span]], members: int) -> Iterator[float]:
    """Yield the times, ascending, at which so many members may start in one of the domains.

    A sweep over all spans by domain: each adds its members from its begin on, and takes them back at its end.
    """
    events: list[tuple[float, int, str, int]] = []
    for domain, spans in spans_of.items():
        for begin, end, is_at_end, count in spans:
            events.append((begin, 0, domain, count))
            if end < math.inf:
                events.append((end, int(is_at_end), domain, -count))
    events.sort()
    count_of: dict[str, int] = {}
    enough: set[str] = set()
    for place, (at, phase, domain, count) in enumerate(events):
        count_of[domain] = count_of.get(domain, 0) + count
        (enough.add if count_of[domain] >= members else enough.discard)(domain)
        following = events[place + 1][:2] if place + 1 < len(events) else None
        if enough and phase == 0 and following != (at, 0):
            yield at
