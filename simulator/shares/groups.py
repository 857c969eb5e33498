"""Alike jobs taken as one: programs grow with the kinds of jobs and not with the jobs."""

from __future__ import annotations

from dataclasses import dataclass

from simulator.shares.instance import Instance, Job, Rates


@dataclass(frozen=True, slots=True)
class Group:
    """Alike jobs by their numbers in the instance; `job` is the first of them."""

    members: tuple[int, ...]
    job: Job
    proportional: float
    """Throughput of that job if it always runs, on each type in proportion to its number of GPUs."""
    rates: Rates
    """Throughput on each type that the policy knows, in units of that one."""


def group_jobs(instance: Instance, by_team: bool, agnostic: bool, *, apart: bool = False) -> list[Group]:
    """Return the groups of alike jobs, or of one job each, in the order of their first jobs.

    An agnostic policy knows one type, on which each job is as fast as in proportion. The jobs of a team that
    goes by their order are not alike.
    """
    groups: dict[object, list[int]] = {}
    for number, job in enumerate(instance.jobs):
        kind = None if agnostic else (job.kind, job.rates)
        key: object = (kind, job.gpus, job.weight, job.team if by_team else None)
        if apart or (by_team and instance.teams[job.team or ""].within == "fifo"):
            key = number
        groups.setdefault(key, []).append(number)
    return [_group(instance, tuple(members), agnostic) for members in groups.values()]


def _group(instance: Instance, members: tuple[int, ...], agnostic: bool) -> Group:
    job = instance.jobs[members[0]]
    unit = instance.proportional(job)
    return Group(members, job, unit, (1.0,) if agnostic else tuple(rate / unit for rate in job.rates))
