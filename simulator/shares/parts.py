"""Parts of an instance (Narayanan et al., POP, SOSP 2021): every K-th job on a K-th of the GPUs."""

from __future__ import annotations

from dataclasses import replace

from resource_manager.manager.plurals import counted
from simulator.errors import SimulationError
from simulator.shares.instance import Instance


def divide(instance: Instance, parts: int) -> list[Instance]:
    """Return the parts; raise `SimulationError` if one has no jobs, or a job that can run nowhere in it."""
    if parts > len(instance.jobs):
        raise SimulationError(
            f"--parts {parts} for {counted(len(instance.jobs), 'job')}: some parts would have none"
        )
    gpus = {name: count // parts for name, count in instance.gpus.items()}
    where = "the fleet" if parts == 1 else "its part of the fleet"
    for job in instance.jobs:
        fleet = zip(gpus.values(), job.rates, strict=True)
        if not any(rate > 0 and count >= job.gpus for count, rate in fleet):
            raise SimulationError(f"job {job.name!r} can run on no GPU type of {where}")
    return [replace(instance, gpus=gpus, jobs=instance.jobs[part::parts]) for part in range(parts)]
