"""REST interface."""

from resource_manager.rest.api import about, agents, leases, servers, views  # each adds its operations
from resource_manager.rest.api.operations import routes

__all__ = ["about", "agents", "leases", "routes", "servers", "views"]
