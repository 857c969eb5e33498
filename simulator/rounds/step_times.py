"""Time of a training step by placement: measured, or interpolated between what was measured."""

from __future__ import annotations

from collections.abc import Iterable
from functools import cache
from typing import Any, NamedTuple

from simulator.errors import InputError

MAX_MEASURED_SERVERS = 16


class StepTime(NamedTuple):
    """Seconds of a step, and the part of them spent in synchronisation."""

    step_s: float
    sync_s: float


class Measured(NamedTuple):
    """One measurement: servers and GPUs, samples for each GPU, and the time."""

    servers: int
    gpus: int
    local_bsz: int
    time: StepTime


class StepTimes:
    """Step times of one application; shapes are tuples of the numbers of GPUs by server."""

    def __init__(
        self, placements: Iterable[tuple[tuple[int, ...], int, StepTime]], scalability: Iterable[Measured]
    ) -> None:
        import numpy as np

        by_shape: dict[tuple[int, ...], list[tuple[int, StepTime]]] = {}
        averaged: dict[tuple[int, int, int], list[StepTime]] = {}
        for shape, local_bsz, time in placements:
            by_shape.setdefault(shape, []).append((local_bsz, time))
            averaged.setdefault((len(shape), sum(shape), local_bsz), []).append(time)
        self._by_shape = {
            shape: (np.array([size for size, _ in rows], float), np.array([time for _, time in rows]))
            for shape, rows in ((shape, sorted(rows)) for shape, rows in by_shape.items())
        }
        # The points lie on a grid, so their triangulation, and with it the results, depends on their order.
        points = [(*key, *np.mean(times, axis=0)) for key, times in sorted(averaged.items())]
        points += [(row.servers, row.gpus, row.local_bsz, *row.time) for row in scalability]
        self._points = np.array(points)
        self.of = cache(self._of)

    def _of(self, shape: tuple[int, ...], local_bsz: int) -> StepTime:
        """Return the time of a step; not a number where nothing near was measured."""
        import numpy as np

        rotated = min(shape[place:] + shape[:place] for place in range(len(shape)))
        if rotated in self._by_shape:
            sizes, times = self._by_shape[rotated]
            return StepTime(*(float(np.interp(local_bsz, sizes, column)) for column in times.T))
        point = (min(len(shape), MAX_MEASURED_SERVERS), sum(shape), local_bsz)
        return StepTime(*map(float, self._interpolated()(point).reshape(2)))

    @cache  # noqa: B019
    def _interpolated(self) -> Any:
        from scipy.interpolate import LinearNDInterpolator
        from scipy.spatial import QhullError

        try:
            return LinearNDInterpolator(self._points[:, :3], self._points[:, 3:])
        except (QhullError, ValueError, IndexError) as error:
            raise InputError("too few step times were measured to interpolate between them") from error
