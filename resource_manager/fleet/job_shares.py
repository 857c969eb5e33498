"""Bound of what an agent is told at once: long commands of one owner keep no other job from starting."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Container, Mapping, Sequence
from typing import Any

logger = logging.getLogger(__name__)

MAX_SPEC_BYTES = 32 * 2**20
"""Most bytes of the jobs that are to start, half of what an agent reads of an answer."""

FEW = 200
"""So many jobs fit, however long each of them is."""


def fitting(
    items: Sequence[dict[str, Any]], owners: Mapping[str, str], begun: Container[str]
) -> list[dict[str, Any]]:
    """Return what is wanted of jobs, of each owner's starts the oldest if all are too long for one answer.

    `owners` are those of the jobs by key, and `begun` the jobs that need no start any more: they come last.
    What ends a job is always in it.
    """
    starts = [item for item in items if "spec" in item]
    if len(starts) <= FEW or len(json.dumps(starts)) <= MAX_SPEC_BYTES:
        return list(items)
    share = MAX_SPEC_BYTES // len({owners[item["key"]] for item in starts})
    sizes = Counter[str]()
    late = set()
    for item in sorted(starts, key=lambda item: (item["key"] in begun, int(item["token"]))):
        owner, size = owners[item["key"]], len(json.dumps(item))
        if sizes[owner] + size > share:
            late.add(item["key"])
        else:
            sizes[owner] += size
    if waiting := [key for key in late if key not in begun]:
        logger.warning(
            "an agent's answer has no room for all that is to start: of %d, %d later",
            len(starts),
            len(waiting),
        )
    return [item for item in items if item["key"] not in late]
