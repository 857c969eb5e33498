"""Report of a manager's GPU-hours, with what the servers measured."""

from __future__ import annotations

from collections.abc import Mapping

from resource_manager.fleet.records import records_of
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.report import Accounts, Report, ReportQuery
from resource_manager.scheduling.accounting.gpu_hours import Measure, measure_of


def accounts_of(manager: GPUResourceManager) -> Accounts:
    """Return the account of the manager's kept history."""
    return Accounts(manager, manager.store.now())


def measures_of(manager: GPUResourceManager) -> Mapping[int, Measure]:
    """Return what the servers measured so far of the leases that they run, by fencing token.

    What they measured of those that have ended is in the history.
    """
    servers = manager.look(lambda cluster, now: [state.name for state in cluster.nodes if state.watched])
    found: dict[int, list[tuple[float, float | None]]] = {}
    for record in records_of(manager.store, servers).values() if servers else ():
        for token, use in record.leases.items():
            if use.busy is not None:
                found.setdefault(token, []).append((use.busy, use.energy_kwh))
    return {token: measure_of(parts) for token, parts in found.items()}


def report_of(manager: GPUResourceManager, query: ReportQuery) -> Report:
    """Return the report of the manager's kept history, by the cluster's prices."""
    return accounts_of(manager).report(query, measures=measures_of(manager), prices=prices_of(manager))


def prices_of(manager: GPUResourceManager) -> Mapping[str, float]:
    """Return the cluster's price of an hour of a GPU by type."""
    return manager.look(lambda cluster, now: cluster.settings.prices)
