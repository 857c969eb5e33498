"""Filling from its definition: no grouping, no duals; who can still rise is asked with a program a job."""

from __future__ import annotations

from typing import Any

import numpy as np
from scipy.optimize import linprog

from simulator.shares.division import Options
from simulator.shares.instance import Instance
from tests.simulator.shares.small import rates_of

SLACK = 1e-9


def columns_of(instance: Instance, options: Options) -> tuple[Any, Any, Any]:
    """Return normalised throughput by job, time by job, and GPUs by type, of a unit of each column."""
    fleet = np.array(list(instance.gpus.values()), float)
    rates, jobs, types = rates_of(instance), len(instance.jobs), len(fleet)
    columns: list[tuple[Any, Any, Any]] = []
    one, of_type = np.eye(jobs), np.eye(types)
    for i, job in enumerate(instance.jobs):
        if options.agnostic:
            columns.append((one[i], one[i], job.gpus * fleet / fleet.sum()))
            continue
        columns += [(one[i] * rates[i, g], one[i], job.gpus * of_type[g]) for g in range(types)]
        for k, other in enumerate(instance.jobs[i + 1 :], start=i + 1):
            pair = instance.pairs.get((job.kind or "", other.kind or ""))
            if options.pack and pair is not None and job.gpus == other.gpus:
                units = instance.proportional(job), instance.proportional(other)
                for g in np.flatnonzero(fleet >= job.gpus):
                    gain = one[i] * pair[0][g] / units[0] + one[k] * pair[1][g] / units[1]
                    columns.append((gain, one[i] + one[k], job.gpus * of_type[g]))
    gain, time, gpus = (np.array(each).T for each in zip(*columns, strict=True))
    return gain, time, gpus


def weights_of(instance: Instance, policy: str, settled: Any) -> Any:
    """Return the weight of every job, 0 for those whose level does not rise."""
    weights = np.zeros(len(settled))
    for i, job in enumerate(instance.jobs):
        if settled[i]:
            continue
        if policy == "max_min":
            weights[i] = job.weight
            continue
        team = instance.teams[job.team or ""]
        left = [k for k, other in enumerate(instance.jobs) if other.team == job.team and not settled[k]]
        if team.within == "fairness":
            weights[i] = team.weight * job.weight / sum(instance.jobs[k].weight for k in left)
        elif i == left[0]:
            weights[i] = team.weight
    return weights


def fill_job_by_job(instance: Instance, options: Options) -> tuple[float, Any]:
    """Return c of the first program, and the levels."""
    gain, time, gpus = columns_of(instance, options)
    jobs, columns = gain.shape
    limits = np.vstack([time, gpus])
    bounds = np.concatenate([np.ones(jobs), list(instance.gpus.values())])
    levels, settled, first = np.zeros(jobs), np.zeros(jobs, bool), None
    while not settled.all():
        weights = weights_of(instance, options.policy, settled) / [job.gpus for job in instance.jobs]
        rows = np.block([[-gain, weights[:, None]], [limits, np.zeros((len(limits), 1))]])
        found = linprog(
            np.append(np.zeros(columns), -1),
            A_ub=rows,
            b_ub=np.append(SLACK - levels, bounds),
            bounds=[(0, None)] * columns + [(None, None)],
        )
        assert found.status == 0, found.message
        first = found.x[-1] if first is None else first
        levels = levels + max(found.x[-1], 0) * weights
        for i in np.flatnonzero(weights):
            most = linprog(-gain[i], A_ub=np.vstack([-gain, limits]), b_ub=np.append(SLACK - levels, bounds))
            assert most.status == 0, most.message
            settled[i] = -most.fun < levels[i] + 1e-6
    assert first is not None
    return first, levels
