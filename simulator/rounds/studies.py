"""Published studies: which jobs, servers and kind of rounds belong to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request, Spread
from simulator.replay.workload import Job as Arrival
from simulator.replay.workload import Workload
from simulator.rounds import pollux, shockwave
from simulator.rounds.fixed_rounds import FixedRounds
from simulator.rounds.gavel_rounds import GavelRounds
from simulator.rounds.leases import SpreadLeases, uniform_nodes
from simulator.rounds.policies.base import RoundPolicy
from simulator.rounds.pollux import PolluxJob
from simulator.rounds.record import Rounds
from simulator.rounds.shockwave import ShockwaveJob

STUDIES = {"pollux": ("tiresias", "optimus"), "shockwave": ("gandiva_fair", "max_min_fairness")}
"""Kind of trace -> some of the policies of the study; the first is replayed if none is named."""


def study_workload(kind: str, paths: Sequence[str]) -> Workload:
    """Return the jobs of a study for placement policies and queue orders, which start each job once.

    A job is a gang of members with one GPU, runs as long as it would alone, and is of the team that its
    application or model names.
    """
    jobs: Sequence[PolluxJob | ShockwaveJob]
    if kind == "pollux":
        jobs = pollux.read_jobs(Path(paths[0]), paths[1], paths[2])
        nodes = uniform_nodes(pollux.SERVERS, pollux.GPUS_PER_SERVER)
    else:
        jobs = shockwave.read_jobs(Path(paths[0]))
        nodes = uniform_nodes(shockwave.SERVERS, shockwave.GPUS_PER_SERVER)
    arrivals = []
    for job in jobs:
        team = job.application.name if isinstance(job, PolluxJob) else job.model
        alone_s = job.exclusive_s
        request = Request(
            job.name, 1, nodes=int(job.gpus), spread=Spread.PACK, team=team, expected_runtime_s=alone_s
        )
        arrivals.append(Arrival(request, job.arrival_s, alone_s))
    return Workload.of(kind, ClusterState(nodes), arrivals)


def study(kind: str, paths: Sequence[str], policy: RoundPolicy) -> Rounds:
    """Return the replay of a study: `paths` are its folder and, for pollux, load and workload."""
    if kind == "pollux":
        folder, load, workload = paths
        jobs = pollux.read_jobs(Path(folder), load, workload)
        leases = SpreadLeases(uniform_nodes(pollux.SERVERS, pollux.GPUS_PER_SERVER))
        return FixedRounds(jobs, leases, policy)
    leases = SpreadLeases(uniform_nodes(shockwave.SERVERS, shockwave.GPUS_PER_SERVER))
    return GavelRounds(shockwave.read_jobs(Path(paths[0])), leases, policy)
