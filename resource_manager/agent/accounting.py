"""Report of a manager's GPU-hours, with what the servers measured."""

from __future__ import annotations

from collections.abc import Mapping

from resource_manager.agent.receiving import Record
from resource_manager.core.cluster import ClusterState
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.report import Accounts, Report, ReportQuery, load_prices
from resource_manager.scheduling.gpu_hours import Measure


def accounts_of(manager: GPUResourceManager) -> Accounts:
    """Return the account of the manager's kept history."""
    return Accounts(manager, manager.store.now())


def measures_of(manager: GPUResourceManager) -> Mapping[int, Measure]:
    """Return what the servers measured of the leases that they run, by fencing token.

    A lease of several servers has the mean of theirs. What is known is since when each computes nothing.
    """

    def look(cluster: ClusterState, now: float) -> tuple[list[str], dict[int, float], float]:
        granted = {lease.fencing_token: lease.granted_at for lease in cluster.leases.values()}
        return [state.name for state in cluster.nodes if state.watched], granted, now

    servers, granted, now = manager.look(look)
    busy: dict[int, list[float]] = {}
    for text in manager.store.reports.records(servers).values() if servers else ():
        record = Record.from_json(text)
        for token, use in record.leases.items() if record is not None else ():
            age_s = now - granted.get(token, now)
            if use.samples and age_s > 0:
                idle_s = 0.0 if use.idle_since is None else now - use.idle_since
                busy.setdefault(token, []).append(1 - min(max(idle_s / age_s, 0.0), 1.0))
    return {token: Measure(sum(shares) / len(shares)) for token, shares in busy.items()}


def report_of(manager: GPUResourceManager, query: ReportQuery) -> Report:
    """Return the report of the manager's kept history, by its price list."""
    prices = load_prices(manager.settings.prices)
    return accounts_of(manager).report(query, measures=measures_of(manager), prices=prices)
