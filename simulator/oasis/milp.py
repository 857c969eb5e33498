"""Mixed-integer linear programmes, built row by row and solved by HiGHS.

HiGHS is used through `highspy`, its own interface, and not `scipy.optimize.milp`: cuts can be added to a kept
model, a known solution can serve as the start, and the dual bound is available after a time limit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import highspy
import numpy as np

from simulator.errors import SimulationError

RELATIVE_GAP = 1e-6
"""An optimum counts as proven when the bound is this close to it."""

PARALLEL_ROWS_AND_COLUMNS = 1 << 13
"""Presolve rule of HiGHS, switched off: with it HiGHS 1.15.1 calls solutions optimal that are not, among
them some of the small programmes that the tests also solve by brute force; without it all agree."""


@dataclass(frozen=True, slots=True)
class Solution:
    """`values` by column, empty if none was found; `bound` is no lower than any solution's objective."""

    values: tuple[float, ...]
    objective: float
    bound: float
    optimal: bool
    infeasible: bool

    def whole(self, column: int) -> int:
        """Return an integer column's value."""
        return round(self.values[column])


class Maximisation:
    """A model that grows by columns and rows and can be solved again after each change."""

    def __init__(self) -> None:
        self._highs: Any = highspy.Highs()  # type: ignore[no-untyped-call]
        for option, value in (
            ("output_flag", False),
            ("threads", 1),
            ("mip_rel_gap", RELATIVE_GAP),
            ("mip_abs_gap", 0.0),
            ("presolve_rule_off", PARALLEL_ROWS_AND_COLUMNS),
        ):
            self._highs.setOptionValue(option, value)
        self._highs.changeObjectiveSense(highspy.ObjSense.kMaximize)
        self.columns = 0

    def add(self, upper: float, gain: float = 0.0, *, integer: bool = True) -> int:
        """Add a column from 0 to `upper`, worth `gain` a unit; return its number."""
        none = np.empty(0)
        self._highs.addCol(gain, 0.0, upper, 0, none.astype(np.int32), none)
        if integer:
            self._highs.changeColIntegrality(self.columns, highspy.HighsVarType.kInteger)
        self.columns += 1
        return self.columns - 1

    def constrain(
        self, terms: Mapping[int, float], *, at_least: float = -math.inf, at_most: float = math.inf
    ) -> None:
        """Constrain the sum of coefficient x column to lie between the two bounds."""
        columns = np.fromiter(terms.keys(), np.int32, len(terms))
        coefficients = np.fromiter(terms.values(), float, len(terms))
        self._highs.addRow(at_least, at_most, len(terms), columns, coefficients)

    def solve(self, time_limit_s: float, *, relaxed: bool = False) -> Solution:
        """Return the best solution within the time; `relaxed` lets integer columns take any value."""
        self._highs.setOptionValue("time_limit", max(0.0, time_limit_s) + self._highs.getRunTime())
        self._highs.setOptionValue("solve_relaxation", relaxed)
        self._highs.run()
        status = self._highs.getModelStatus()
        optimal = status == highspy.HighsModelStatus.kOptimal
        infeasible = status in (
            highspy.HighsModelStatus.kInfeasible,
            highspy.HighsModelStatus.kUnboundedOrInfeasible,
        )
        if not (optimal or infeasible or status == highspy.HighsModelStatus.kTimeLimit):
            raise SimulationError(f"HiGHS stopped with {self._highs.modelStatusToString(status)}")
        found = self._highs.getInfo()
        has_solution = found.primal_solution_status == highspy.SolutionStatus.kSolutionStatusFeasible
        return Solution(
            values=tuple(self._highs.getSolution().col_value) if has_solution else (),
            objective=found.objective_function_value if has_solution else -math.inf,
            bound=found.mip_dual_bound,
            optimal=optimal,
            infeasible=infeasible,
        )
