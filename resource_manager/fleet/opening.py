"""A manager on a store that also answers from what the servers report."""

from __future__ import annotations

from resource_manager.lazy import lazy_module
from resource_manager.manager.manager import GPUResourceManager
from resource_manager.manager.queries import AgentReports
from resource_manager.settings import Settings

# Most commands ask for no report, and reading them takes a tenth of a second to import.
server_use = lazy_module("resource_manager.fleet.server_use")

REPORTS = AgentReports(
    lambda *asked: server_use.use_of(*asked), lambda *asked: server_use.measures_of(*asked)
)


def open_manager(settings: Settings, *, by: str | None = None) -> GPUResourceManager:
    """Return the manager of these settings, which `by` asks."""
    manager = GPUResourceManager(settings, by=by)
    manager.read_reports_by(REPORTS)
    return manager
