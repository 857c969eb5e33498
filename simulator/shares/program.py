"""The linear program of a max-min level, over groups of alike jobs, solved by HiGHS and kept warm.

Between two programs only weights and levels change, so each goes on from the basis of the one before.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations_with_replacement
from typing import Any, NamedTuple

import highspy
import numpy as np
from scipy import sparse

from simulator.errors import SimulationError
from simulator.shares.groups import Group
from simulator.shares.instance import Pairs

TOLERANCE = 1e-9
"""Largest violation of a row and of a reduced cost: errors of levels add up over the programs."""

OPTIONS = {
    "output_flag": False,
    "threads": 1,
    "presolve": "off",
    "simplex_strategy": 4,  # primal: the last solution stays feasible, from which it has few steps to go
    "primal_feasibility_tolerance": TOLERANCE,
    "dual_feasibility_tolerance": TOLERANCE,
}


class Column(NamedTuple):
    """Time on a GPU type of a group, or of two (or twice of one) together, in which they gain `rates`."""

    gpu: int
    groups: tuple[int, ...]
    rates: tuple[float, ...]


def columns_of(groups: Sequence[Group], pairs: Pairs, fleet: Sequence[int]) -> list[Column]:
    """Return the columns of the groups alone and, where there are throughputs, of two jobs together."""
    columns = [
        Column(gpu, (number,), (rate,))
        for number, group in enumerate(groups)
        for gpu, rate in enumerate(group.rates)
        if rate > 0
    ]
    for a, b in combinations_with_replacement(range(len(groups)) if pairs else (), 2):
        first, second = groups[a], groups[b]
        rates = pairs.get((first.job.kind or "", second.job.kind or ""))
        if rates is None or first.job.gpus != second.job.gpus or (a == b and len(first.members) < 2):
            continue
        for gpu, (one, other) in enumerate(zip(*rates, strict=True)):
            if (one or other) and fleet[gpu] >= first.job.gpus:
                gains = one / first.proportional, other / second.proportional
                columns.append(Column(gpu, (a, b), gains))
    return columns


class Program:
    """Maximise c: an active group gets its level and c times its weight, any other its level."""

    def __init__(self, groups: Sequence[Group], columns: Sequence[Column], fleet: Sequence[int]) -> None:
        self.groups, self._fleet = groups, np.array(fleet, float)
        self._weights = np.zeros(len(groups))
        self._counts = np.array([len(group.members) for group in groups], float)
        shape = (len(groups), len(columns))
        entries = [
            (group, number, rate)
            for number, column in enumerate(columns)
            for group, rate in zip(column.groups, column.rates, strict=True)
        ]
        of_group, of_column, rates = map(np.array, zip(*entries, strict=True))
        self._entries = of_group, of_column
        self._gain = sparse.csr_array((rates / self._counts[of_group], self._entries), shape)
        self._time = sparse.csr_array((np.ones(len(entries)), self._entries), shape)
        self._sizes = np.array([group.job.gpus for group in groups])
        self._type = np.array([column.gpu for column in columns])
        self._sharing = np.array([len(column.groups) for column in columns])
        used = self._sizes[[column.groups[0] for column in columns]]
        self._used = sparse.csr_array((used, (self._type, range(len(columns)))), (len(fleet), len(columns)))
        self._highs = self._model()

    def _model(self) -> Any:
        """Return the model: rows of throughput and of time by group, then of GPUs by type; c comes last."""
        matrix = sparse.vstack([self._gain, self._time, self._used]).tocsc()
        matrix.resize(matrix.shape[0], matrix.shape[1] + 1)
        count, last, most = len(self.groups), matrix.shape[1] - 1, highspy.kHighsInf
        cost, low = np.append(np.zeros(last), 1.0), np.append(np.zeros(last), -most)
        at_least = np.append(np.zeros(count), np.full(count + len(self._fleet), -most))
        at_most = np.concatenate([np.full(count, most), self._counts, self._fleet])
        by_column, maximise = int(highspy.MatrixFormat.kColwise), int(highspy.ObjSense.kMaximize)
        highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in OPTIONS.items():
            highs.setOptionValue(option, value)
        bounds = (cost, low, np.full(last + 1, most), at_least, at_most)
        whole, size = np.zeros(last + 1, np.int32), (last + 1, matrix.shape[0], matrix.nnz)
        entries = (matrix.indptr, matrix.indices, matrix.data)
        highs.passModel(*size, by_column, maximise, 0.0, *bounds, *entries, whole)
        return highs

    def solve(self, weights: Any, levels: Any) -> tuple[float, Any, Any, Any]:
        """Solve for weights (0: not active) and levels of one job of each group.

        Return c, by group the normalised throughput and what a unit more of it takes from c (for a group, of
        all its jobs), and by column the time.
        """
        count, scale = len(self.groups), weights.max()
        every, most = np.arange(count, dtype=np.int32), np.full(count, highspy.kHighsInf)
        for ease in (0.0, TOLERANCE):  # rarely, HiGHS gets lost where levels leave next to no freedom
            for group in np.flatnonzero(weights / scale != self._weights):
                self._highs.changeCoeff(group, len(self._type), -weights[group] / scale)
            self._weights = weights / scale
            self._highs.changeRowsBounds(count, every, levels * (1 - ease), most)
            self._highs.run()
            if (status := self._highs.getModelStatus()) == highspy.HighsModelStatus.kOptimal:
                break
            self._highs, self._weights = self._model(), np.zeros(count)
        else:
            raise SimulationError(f"HiGHS stopped with {status.name}")
        found = self._highs.getSolution()
        times = self._within_bounds(np.maximum(found.col_value[:-1], 0.0))
        duals = -np.array(found.row_dual[:count]) / scale
        return found.col_value[-1] / scale, self._gain @ times, duals, times

    def _within_bounds(self, times: Any) -> Any:
        """Return the times less what the solver's tolerance let them exceed jobs and GPUs by.

        Levels taken from them can be had exactly, so no number of programs makes the next one infeasible.
        """
        group, column = self._entries
        over = np.ones(len(times))
        np.maximum.at(over, column, (self._time @ times / self._counts)[group])
        times = times / over
        used = self._used @ times / np.maximum(self._fleet, 1.0)
        return times / np.maximum(used, 1.0)[self._type]

    def gpus_of_a_job(self, times: Any) -> Any:
        """Return the GPUs of each type that one job of each group has on average; two share half and half."""
        own = times / self._sharing
        by_type = [self._time @ np.where(self._type == gpu, own, 0.0) for gpu in range(len(self._fleet))]
        return np.stack(by_type, axis=1) * (self._sizes / self._counts)[:, None]
