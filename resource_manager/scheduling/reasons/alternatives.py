"""Alternatives to a request that waits: what would start sooner, each by one play of the queue."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace

from resource_manager.core.changes import Cancelled, Queued
from resource_manager.core.cluster import ClusterState
from resource_manager.core.models import Request
from resource_manager.core.team_ledger import UNNAMED
from resource_manager.scheduling.reasons.capacity_grounds import never_fits
from resource_manager.scheduling.reasons.start_estimates import estimate_starts
from resource_manager.scheduling.scheduling_pass import SchedulingPass

MAX_TEAMS = 3
"""Maximum number of other teams that are tried."""

UNKNOWN_RUNTIME_S = 3600.0
"""Runtime that is tried where none is known."""

MIN_GAIN_S = 60.0
"""Least time by which an alternative has to start sooner to be named."""


@dataclass(frozen=True, slots=True)
class Alternative:
    """A request that would start sooner, in words of its change, and when."""

    change: str
    at: float


def alternatives(
    cluster: ClusterState,
    current: SchedulingPass,
    request: Request,
    goes_on: Callable[[], bool] = lambda: True,
    least_gpus: int = 1,
    teams: Collection[str] = (),
) -> list[Alternative]:
    """Return what would start sooner than the request, the soonest first.

    A pending request would be changed at its place in the queue, another one queued now. As many are tried
    as end while `goes_on` returns True. The caller may ask for `least_gpus` at least, and for these `teams`
    alone, for any if there are none.
    """
    expected = _start_of(cluster, current, request, goes_on)
    found: list[Alternative] = []
    for change, other in _variants(cluster, current, request, least_gpus, teams):
        if not goes_on():
            break
        at = None if never_fits(cluster, other) else _start_of(cluster, current, other, goes_on)
        if at is not None and (expected is None or at <= expected - MIN_GAIN_S):
            found.append(Alternative(change, at))
    return sorted(found, key=lambda each: each.at)


def _start_of(
    cluster: ClusterState, current: SchedulingPass, request: Request, goes_on: Callable[[], bool]
) -> float | None:
    pending = cluster.pending.get(request.lease_id)
    with cluster.trial():
        if pending is not None:
            cluster.apply(Cancelled(request.lease_id, current.now))
            cluster.apply(Queued(request, pending.queued_at, pending.sequence, current.now))
        extra = () if pending else (request,)
        return estimate_starts(cluster, current, extra, goes_on, (request.lease_id,))[request.lease_id].at


def _variants(
    cluster: ClusterState,
    current: SchedulingPass,
    request: Request,
    least_gpus: int,
    teams: Collection[str],
) -> Iterator[tuple[str, Request]]:
    """Yield the request with one change each, in words."""
    # A step down that people have a use for: half of the GPUs, or half of the time.
    if (fewer := request.gpus // 2) >= max(least_gpus, 1):
        noun = "GPU" if fewer == 1 else "GPUs"
        yield f"{fewer} {noun} instead of {request.gpus}", replace(request, gpus=fewer)
    if request.gpu_types:
        yield "GPUs of any type", replace(request, gpu_types=())
    if not request.preemptible:
        yield "a preemptible job", replace(request, preemptible=True)
    runtime_s = cluster.runtimes.runtime_of(request)
    if current.order.backfill or current.order.uses_runtimes:
        half_s = UNKNOWN_RUNTIME_S if runtime_s is None else runtime_s / 2
        yield f"an expected runtime of {half_s:.0f} s", replace(request, expected_runtime_s=half_s)
    if cluster.ledger is not None:
        others = [
            team.name
            for team in cluster.teams.teams
            if team.name not in (request.team, UNNAMED)
            and (team.max_priority is None or request.priority <= team.max_priority)
        ]
        for team in [name for name in others if not teams or name in teams][:MAX_TEAMS]:
            yield f"team {team}", replace(request, team=team)
