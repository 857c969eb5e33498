"""The program by which the figures of Gavel's Figure 11 were made: all active jobs settle at once.

Its optimum is not unique; the printed figures are where an interior-point solver stops, and rows that seem to
say nothing move that point.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import sparse

from simulator.errors import SimulationError
from simulator.rounds.linear_programs import Solve
from simulator.shares.filling import Filling, Weigh


def settle_at_once(rates: Any, sizes: Any, fleet: Sequence[int], weigh: Weigh, solve: Solve) -> Filling:
    """Return the filling by one program, or by one for each place in the teams' queues.

    `rates` are normalised throughputs by job (rows) and GPU type, `sizes` the GPUs of each job, `fleet` those
    of each type. The variables are c, then the times job by job; each row is at most its bound. Raises
    `SimulationError` if the solver fails.
    """
    jobs, types = rates.shape
    normalised = sparse.block_diag([sparse.coo_array(row) for row in rates[:, None, :]])
    time = sparse.kron(sparse.eye(jobs), np.ones((1, types)))
    gpus = sparse.kron(sizes[None, :], sparse.eye(types))
    always = sparse.vstack([-sparse.eye(jobs * types), gpus, time, -normalised])
    always = sparse.hstack([sparse.csr_matrix((always.shape[0], 1)), always])
    limits = np.concatenate([np.zeros(jobs * types), fleet, np.ones(jobs)])
    objective = np.append(-1.0, np.zeros(jobs * types))
    most = (sizes[:, None] * rates).max()
    levels, settled = np.zeros(jobs), np.zeros(jobs, bool)
    rises: list[float] = []
    while not settled.all():
        weights = weigh(settled) / sizes
        active = weights > 0
        inverse = np.divide(1.0, weights, out=np.zeros(jobs), where=active)
        rising = sparse.hstack([np.ones((jobs, 1)), -sparse.diags(inverse) @ normalised])
        rows = sparse.vstack([rising, always]).tocsc()
        found = solve(
            objective, rows, np.concatenate([np.where(active, -levels * inverse, most), limits, -levels])
        )
        if found is None:
            raise SimulationError("--settle at_once: the solver found no optimum: try --solver ecos or highs")
        risen = np.where(active, (normalised @ found[1:] - levels) * inverse, most).min()
        levels += weights * risen
        settled |= active
        rises.append(float(risen))
    return Filling(levels, found[1:].reshape(jobs, types), rises[0], len(rises))
