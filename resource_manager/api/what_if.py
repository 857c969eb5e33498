"""What would become of a request."""

from __future__ import annotations

import uuid
from typing import Any

from resource_manager.api.service import Service

PROBE_PREFIX = "what-if"
"""How the task ids of requests begin that only ask."""


def what_if(here: Service, demand: dict[str, Any]) -> dict[str, Any]:
    """The manager's explanation, of the service's own reading of the state."""
    task_id = f"{PROBE_PREFIX}-{uuid.uuid4().hex[:12]}"
    request = here.manager.build_request(task_id, **demand)
    return here.watch.look(lambda cluster, now: here.manager.explanation_in(cluster, now, request))
