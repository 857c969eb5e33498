"""Times of a run, with the garbage collector kept from interfering."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass(slots=True)
class Times:
    """Seconds of a run: elapsed, and those the process had the processor, which other work hardly affects."""

    wall_s: float = 0.0
    cpu_s: float = 0.0

    def per_s(self, count: int) -> float:
        """Return how many of `count` things the run did per second of processor time."""
        return count / max(self.cpu_s, 1e-9)


@contextmanager
def timed() -> Iterator[Times]:
    """Yield the times of the block, complete when it ends, and keep the garbage collector off in it.

    A simulation makes hundreds of thousands of objects that live on and form no cycle; to scan them is waste.
    """
    times = Times()
    was_on = gc.isenabled()
    gc.disable()
    wall, cpu = time.perf_counter(), time.process_time()
    try:
        yield times
    finally:
        times.wall_s, times.cpu_s = time.perf_counter() - wall, time.process_time() - cpu
        if was_on:
            # Objects made meanwhile are marked old; otherwise the next allocation would scan them all.
            gc.freeze()
            gc.unfreeze()
            gc.enable()
