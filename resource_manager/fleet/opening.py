"""A manager on a store that also answers from what the servers report."""

from __future__ import annotations

from resource_manager.fleet.measured_hours import measures_of
from resource_manager.fleet.server_use import use_of
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.queries import ServerReports
from resource_manager.settings import Settings

REPORTS = ServerReports(use_of, measures_of)


def open_manager(settings: Settings, *, by: str | None = None) -> GPUResourceManager:
    """Return the manager of these settings, which `by` asks."""
    manager = GPUResourceManager(settings, by=by)
    manager.read_reports_by(REPORTS)
    return manager
