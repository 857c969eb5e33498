"""Published studies: which jobs, servers and kind of rounds belong to a trace."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from simulator.rounds import pollux, shockwave
from simulator.rounds.fixed_rounds import FixedRounds
from simulator.rounds.gavel_rounds import GavelRounds
from simulator.rounds.leases import SpreadLeases, uniform_nodes
from simulator.rounds.policies.base import RoundPolicy
from simulator.rounds.record import Rounds

STUDIES = {"pollux": ("tiresias", "optimus"), "shockwave": ("gandiva_fair", "max_min_fairness")}
"""Kind of trace -> some of the policies of the study; the first is replayed if none is named."""


def study(kind: str, paths: Sequence[str], policy: RoundPolicy) -> Rounds:
    """Return the replay of a study: `paths` are its folder and, for pollux, load and workload."""
    if kind == "pollux":
        folder, load, workload = paths
        jobs = pollux.read_jobs(Path(folder), load, workload)
        leases = SpreadLeases(uniform_nodes(pollux.SERVERS, pollux.GPUS_PER_SERVER))
        return FixedRounds(jobs, leases, policy)
    leases = SpreadLeases(uniform_nodes(shockwave.SERVERS, shockwave.GPUS_PER_SERVER))
    return GavelRounds(shockwave.read_jobs(Path(paths[0])), leases, policy)
