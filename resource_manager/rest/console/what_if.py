"""Explanation of a request that is not made."""

from __future__ import annotations

from typing import Any

from resource_manager.api.service import Service
from resource_manager.task_identity import probe_id


def what_if(here: Service, demand: dict[str, Any]) -> dict[str, Any]:
    """Return the manager's explanation of a request, on the service's own replica of the state."""
    request = here.manager.build_request(probe_id(), **demand)
    return here.watch.look(lambda cluster, now: here.manager.explanation_in(cluster, now, request))
