"""Upper bound of the predicted ends of a NUMA node's containers, cheaper than the prediction.

The rent needs the prediction only if the bound does not show that the server is rented for long enough.
"""

from __future__ import annotations

import math

from simulator.serverless.container import Container

SLACK = 1.001
"""Factor by which rounding speeds down to integers may delay an end under a bound."""

MIN_THREAD_SPEED = 1001
"""Operations per second of a thread that keep rounding within `SLACK`, if the container's rate is high."""


class LatestEndBound:
    """Upper bound `latest` (s) of all predicted ends of a node, kept in constant time per event.

    Until the container that ends last has ended, either each of its threads has a core of its own, for as
    long as its work takes alone, or all cores are busy, for at most as long as all work takes on all cores
    (the argument of Graham, Bounds on multiprocessing timing anomalies, 1969). `latest` is the sum of
    both, over all containers included, and of what rounding down may cost: one operation of
    every container at each event, of which every container has two. It is infinite if threads are so slow
    that rounding their speeds matters.
    """

    def __init__(self, cpu: int, core_speed: int) -> None:
        self._cpu = cpu
        self._core_speed = core_speed
        self._alone = -math.inf
        self._all_cores_s = 0.0
        self._slowest = 0.0
        self._threads = 0
        self._events = 0
        self._lost_s = 0.0
        self.latest = -math.inf

    def extend(self, container: Container, start: float, left: int, threads: int) -> None:
        """Include a container that starts at `start` (s) with `left` operations; `threads` counts all."""
        numerator, denominator = container.rate
        slowness = denominator / numerator
        if threads > self._threads or slowness > self._slowest:
            self._slow_down(threads, slowness)
        alone_s = SLACK * slowness * left / self._core_speed
        if start + alone_s > self._alone:
            self._alone = start + alone_s
        self._all_cores_s += alone_s * container.parallelism / self._cpu
        self._events += 2
        self.latest = self._alone + self._all_cores_s + self._events * self._lost_s

    def _slow_down(self, threads: int, slowness: float) -> None:
        self._threads = max(threads, self._threads)
        self._slowest = max(slowness, self._slowest)
        cores_per_thread = self._cpu / max(self._threads, self._cpu)
        if self._core_speed * cores_per_thread < MIN_THREAD_SPEED * (1.0 + self._slowest):
            self._all_cores_s = math.inf
        self._lost_s = SLACK * self._slowest / self._core_speed * (1.0 + self._threads / self._cpu)

    def replace(self, predicted_end: float) -> None:
        """Lower the bound to a prediction made for the containers that it includes."""
        self.latest = predicted_end + self._events * self._lost_s
