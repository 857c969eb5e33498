"""Explanation of a request that is not made."""

from __future__ import annotations

from resource_manager.manager.demand import Demand
from resource_manager.manager.results import Explanation
from resource_manager.rest.service import Service


def what_if(service: Service, demand: Demand) -> Explanation:
    """Return the manager's explanation of a request."""
    return service.manager.explain(demand)
