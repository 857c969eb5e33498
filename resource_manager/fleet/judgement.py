"""Judgement of one report: what it changes, and the record of the server's reports after it."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from resource_manager.agent.report_format import Report, ReportError
from resource_manager.core.changes import Change, GpuCleaned, JobEnd, Outcome, Released
from resource_manager.core.cluster import ClusterState
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.models import Lease
from resource_manager.core.node_state import NodeState
from resource_manager.core.search import is_searchable, searched, without_lease
from resource_manager.fleet.lease_use import IdleRules, LeaseUse, idle_releases, sample_gpus, sample_leases
from resource_manager.fleet.records import Record
from resource_manager.fleet.sightings import gone_in_words, leases_gone, sightings_after
from resource_manager.fleet.silence import SILENT_INTERVALS
from resource_manager.fleet.transitions import is_of, tells_nothing, transitions
from resource_manager.scheduling import lease_steps

DEFAULT_INTERVAL_S = 10.0
MAX_CLOCK_OFFSET_S = 6 * 3600.0
"""Largest difference of a server's clock from the store's; a report with a larger one is old."""


@dataclass(frozen=True, slots=True)
class Judgement:
    """What a report changes, the record after it, and the leases that became idle: how long each may be."""

    changes: list[Change]
    record: Record
    became_idle: dict[str, float]


def judge(
    cluster: ClusterState, report: Report, before: Record | None, elsewhere: Mapping[str, Record], now: float
) -> Judgement:
    """Return what a report says of a state; it changes nothing. Raises `UnknownNodeError`.

    `before` is the record of the server's reports before it, `elsewhere` are those of the servers of other
    members of gangs.
    """
    state = cluster.node(report.server)
    first = _first(report, now)
    known = before or first
    seen, clean = transitions(cluster, report, known.clean, now)
    jobs = sightings_after(state, report, known.jobs)
    # Where a report tells nothing of the GPUs, its server is silent.
    received_at = known.received_at if tells_nothing(state, report) else now
    rules = IdleRules(cluster)
    passed_s = min(max(received_at - known.received_at, 0.0), SILENT_INTERVALS * known.interval_s)
    leases = sample_leases(state, report, known.leases, known.gpus, rules, received_at, passed_s)
    if not known.tells_of(now):  # nobody knows what they did meanwhile
        leases |= {
            token: replace(use, idle_since=now) for token, use in leases.items() if use.idle_since is not None
        }
    record = replace(
        first,
        received_at=received_at,
        clean=clean,
        gpus=sample_gpus(state, report),
        leases=leases,
        jobs=jobs,
        listed_at=now if report.jobs is not None else known.listed_at,
        mps=tuple(report.mps or ()),
    )
    fresh = {name: other.leases for name, other in elsewhere.items() if other.tells_of(now)}
    sightings = {name: other.jobs for name, other in elsewhere.items()}
    changes = [
        *_searched_by(state, report, cluster.settings, now),
        *(_with_use(change, known.leases) for change in seen),
        *_ends(leases_gone(cluster, report, {**sightings, report.server: jobs}), cluster, now),
    ]
    gone = {change.lease_id for change in changes if isinstance(change, Released)}
    idle = idle_releases(cluster, {**fresh, report.server: leases}, now, report.server)
    changes += (change for change in idle if change.lease_id not in gone)
    return Judgement(changes, record, _became_idle(state, record, before, rules))


def cleaned(cluster: ClusterState, report: Report, record: Record, now: float) -> list[Change]:
    """Return which GPUs of leases that have ended the report shows to be clean.

    `record` is that of the server's reports after this one.
    """
    changes, _ = transitions(cluster, report, {}, now)
    return [_with_use(change, record.leases) for change in changes if isinstance(change, GpuCleaned)]


def _searched_by(state: NodeState, report: Report, settings: ClusterSettings, now: float) -> Iterator[Change]:
    """Yield what the report changes of a server that waits for its search; it opens if all jobs are known."""
    if state.drained is not None and is_searchable(state.drained, settings, now):
        is_complete = report.jobs is not None and report.jobs.complete
        yield from searched(state.drained, _unknown_jobs(state, report), now, is_complete=is_complete)


def _unknown_jobs(state: NodeState, report: Report) -> set[str]:
    """Return the jobs and processes with the mark of a lease that the server does not have in the state."""
    known = {(lease.lease_id, lease.fencing_token) for lease in state.leases.values()}
    known |= {(ended.lease_id, ended.fencing_token) for ended in state.cleaning.values()}
    found = without_lease(state, [] if report.jobs is None else report.jobs.keys)
    for gpu in report.gpus:
        for process in gpu.processes or ():
            is_marked = process.job is not None or process.lease_id is not None
            if is_marked and not any(is_of(process, *lease) for lease in known):
                found.add(process.job or process.lease_id or "")
    return found


def _first(report: Report, now: float) -> Record:
    """Return the record of a first report that is received now."""
    interval_s = report.interval_s or DEFAULT_INTERVAL_S
    return Record(
        now,
        interval_s,
        report.at,
        report.boot_id,
        report.uptime_s,
        report.hostname,
        has_place=report.place is not None,
    )


def _became_idle(
    state: NodeState, record: Record, before: Record | None, rules: IdleRules
) -> dict[str, float]:
    """Return the leases that have been idle for longer than they may, and had not at the report before."""
    found: dict[str, float] = {}
    for lease in state.leases.values():
        use = record.leases.get(lease.fencing_token)
        if use is None or use.idle_since is None:
            continue
        limit_s = rules.after_s(lease)
        was_idle = before is not None and before.received_at - use.idle_since >= limit_s
        if record.received_at - use.idle_since >= limit_s and not was_idle:
            found[lease.lease_id] = limit_s
    return found


def check_order(report: Report, before: Record | None, now: float) -> None:
    """Raise `ReportError` for a report that is older than the last one, or of another machine or agent.

    Reports are ordered by the time since the server's start, as its clock may be wrong. Another start counts
    only if it was after the last report: else another machine reports under this name.
    """
    offset_s = report.at - now
    if abs(offset_s) > MAX_CLOCK_OFFSET_S:
        direction = "ahead of" if offset_s > 0 else "before"
        raise ReportError(
            f"report: made {abs(offset_s) / 3600:.0f} h {direction} the store's time: "
            "it is an old one, or the server's clock is wrong"
        )
    if before is None:
        return
    if report.boot_id is None or report.uptime_s is None or before.uptime_s is None:
        if report.at <= before.at:
            raise ReportError("report: older than the last one of this server")
    elif report.boot_id == before.boot_id:
        if report.uptime_s <= before.uptime_s:
            raise ReportError("report: older than the last one of this server")
        if before.has_place and report.place is None and before.tells_of(now):
            raise ReportError(
                f"report: of an agent that runs no jobs, but another one on {report.server} runs jobs and "
                "reports: stop one of them"
            )
    elif before.tells_of(now) and now - report.uptime_s < before.received_at:
        raise ReportError(
            f"report: of {report.hostname or 'another machine'}, but {before.hostname or 'another machine'} "
            f"reports as {report.server}: one server, one agent"
        )


def _with_use(change: Change, uses: Mapping[int, LeaseUse]) -> Change:
    """Return the change with what was measured of the lease, if it tells that a GPU is clean after one."""
    if not isinstance(change, GpuCleaned) or (use := uses.get(change.fencing_token)) is None:
        return change
    energy_kwh = None if use.energy_kwh is None else round(use.energy_kwh / use.gpus, 6)
    return replace(change, busy=None if use.busy is None else round(use.busy, 4), energy_kwh=energy_kwh)


def _ends(gone: Iterable[Lease], cluster: ClusterState, now: float) -> Iterator[Change]:
    """Yield the ends of leases whose jobs are gone."""
    for lease in gone:
        yield from lease_steps.release(
            cluster,
            lease.lease_id,
            now,
            fencing_token=lease.fencing_token,
            outcome=Outcome.CANCELLED if lease.revoked else Outcome.FAILED,
            job_end=JobEnd.ENDED,
            reason=gone_in_words(lease, now),
        )
