"""Search of a server for jobs of leases that a restored state does not know."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from resource_manager.agent.reports import Report
from resource_manager.agent.transitions import is_of, token_of
from resource_manager.core.changes import Change, Resumed
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.node_state import NodeState
from resource_manager.core.search import is_unsearched, reason_before


def opened_by(state: NodeState, report: Report, settings: ClusterSettings, now: float) -> Iterator[Change]:
    """Yield the change that ends a server's wait for its search, if the report shows all of its jobs.

    A report counts once the recovery window is over, in which owners of unknown leases stop their jobs.
    """
    drained = state.drained
    if drained is None or not is_unsearched(drained) or now - drained.at < settings.confirmation_window_s:
        return
    if report.jobs is None or not report.jobs.complete or unknown_jobs(state, report):
        return
    if before := reason_before(drained):
        yield replace(drained, at=now, reason=before, by="")
    else:
        yield Resumed(state.name, now)


def unknown_jobs(state: NodeState, report: Report) -> list[str]:
    """Return the jobs and processes with the mark of a lease that the server does not have in the state."""
    known = {(lease.lease_id, lease.fencing_token) for lease in state.leases.values()}
    known |= {(ended.lease_id, ended.fencing_token) for ended in state.cleaning.values()}
    tokens = {token for _, token in known}
    keys = [] if report.jobs is None else report.jobs.keys
    found = [key for key in keys if token_of(key) not in tokens]
    for gpu in report.gpus:
        for process in gpu.processes or ():
            is_marked = process.job is not None or process.lease_id is not None
            if is_marked and not any(is_of(process, *lease) for lease in known):
                found.append(process.job or process.lease_id or "")
    return sorted(set(found))
