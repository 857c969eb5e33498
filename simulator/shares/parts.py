"""Parts of an instance (Narayanan et al., POP, SOSP 2021): every K-th job on a K-th of the GPUs."""

from __future__ import annotations

from dataclasses import replace

from resource_manager.manager.plurals import counted
from simulator.errors import SimulationError
from simulator.shares.instance import Instance


def divide(instance: Instance, parts: int) -> list[Instance]:
    """Return the parts; a job has throughput 0 on a type of which its part has fewer GPUs than it needs.

    Raises `SimulationError` if a part has no jobs, or a job that can run nowhere in it.
    """
    if parts > len(instance.jobs):
        raise SimulationError(
            f"--parts {parts} for {counted(len(instance.jobs), 'job')}: some parts would have none"
        )
    gpus = {name: count // parts for name, count in instance.gpus.items()}
    where = "the fleet" if parts == 1 else "its part of the fleet"
    jobs = []
    for job in instance.jobs:
        fleet = zip(gpus.values(), job.rates, strict=True)
        rates = tuple(rate if count >= job.gpus else 0.0 for count, rate in fleet)
        if not any(rates):
            raise SimulationError(f"job {job.name!r} can run on no GPU type of {where}")
        jobs.append(replace(job, rates=rates))
    return [replace(instance, gpus=gpus, jobs=tuple(jobs[part::parts])) for part in range(parts)]
