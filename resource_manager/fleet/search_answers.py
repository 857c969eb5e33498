"""Search of a server by its agent, for jobs of leases that a restored state does not know."""

from __future__ import annotations

from collections.abc import Iterator

from resource_manager.agent.report_format import Report
from resource_manager.core.changes import Change
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.node_state import NodeState
from resource_manager.core.search import is_searchable, searched, without_lease
from resource_manager.fleet.transitions import is_of


def opened_by(state: NodeState, report: Report, settings: ClusterSettings, now: float) -> Iterator[Change]:
    """Yield what the report changes of a server that waits for its search; it opens if all jobs are known."""
    if state.drained is not None and is_searchable(state.drained, settings, now):
        is_complete = report.jobs is not None and report.jobs.complete
        yield from searched(state.drained, unknown_jobs(state, report), now, is_complete=is_complete)


def unknown_jobs(state: NodeState, report: Report) -> set[str]:
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
