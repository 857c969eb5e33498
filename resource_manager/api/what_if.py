"""What would become of a request."""

from __future__ import annotations

from typing import Any

from resource_manager.api.service import Service
from resource_manager.task_identity import probe_id


def what_if(here: Service, demand: dict[str, Any]) -> dict[str, Any]:
    """The manager's explanation, of the service's own reading of the state."""
    request = here.manager.build_request(probe_id(), **demand)
    return here.watch.look(lambda cluster, now: here.manager.explanation_in(cluster, now, request))
