"""Linear programs of the share policies, and the solvers that can be chosen for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from resource_manager.errors import how_to_install
from simulator.errors import SimulationError

Solve = Callable[[Any, Any, Any], Any]
"""(c, G, h) -> the x that minimises c·x subject to Gx ≤ h, as numpy arrays; None if there is none."""


def highs(c: Any, rows: Any, bounds: Any) -> Any:
    """Solve with HiGHS, a simplex method: a vertex of the optimal set."""
    from scipy.optimize import linprog

    found = linprog(c, A_ub=rows, b_ub=bounds, bounds=(None, None), method="highs")
    return found.x if found.status == 0 else None


def ecos(c: Any, rows: Any, bounds: Any) -> Any:
    """Solve with ECOS, an interior-point method, as the studies did; its package has licence GPL-3."""
    import ecos as solver
    from scipy.sparse import csc_matrix

    cones = {"l": len(bounds), "q": [], "e": 0}
    found = solver.solve(c, csc_matrix(rows), bounds, cones, verbose=False)
    return found["x"] if found["info"]["exitFlag"] == 0 else None


SOLVERS: dict[str, Solve] = {"highs": highs, "ecos": ecos}


def get_solver(name: str) -> Solve:
    """Return the solver of that name; raise `SimulationError` if it is unknown or not installed."""
    if name not in SOLVERS:
        raise SimulationError(f"unknown solver {name!r}; known are {', '.join(SOLVERS)}")
    if name == "ecos":
        try:
            import ecos  # noqa: F401
        except ModuleNotFoundError as error:
            raise SimulationError(f"--solver ecos needs ecos (GPL-3): {how_to_install('ecos')}") from error
    return SOLVERS[name]


def shares(
    objective: Any, sizes: Any, gpus: float, solve: Solve, *, before: Any = None, after: Any = None
) -> Any:
    """Return x that minimises the objective, 0 ≤ x ≤ 1 and sizes·x ≤ gpus, clipped to [0, 1]; or None.

    `before` and `after` are further (rows, bounds) above and below those. Where the objective has one more
    variable than jobs, it comes first and is left out of the answer.
    """
    import numpy as np

    jobs = len(sizes)
    extra = len(objective) - jobs
    unit = np.hstack([np.zeros((jobs, extra)), np.eye(jobs)])
    total = np.concatenate([np.zeros(extra), sizes])
    parts = [(-unit, np.zeros(jobs)), (total[None, :], np.array([gpus])), (unit, np.ones(jobs))]
    parts = [part for part in (before, *parts, after) if part is not None]
    rows = np.vstack([part[0] for part in parts])
    bounds = np.concatenate([part[1] for part in parts])
    found = solve(objective, rows, bounds)
    return None if found is None else np.clip(found[extra:], 0.0, 1.0)
