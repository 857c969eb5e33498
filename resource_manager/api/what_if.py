"""What would become of a request, and when those that wait should start."""

from __future__ import annotations

import math
import uuid
from typing import Any

from resource_manager import estimates
from resource_manager.api.service import Service
from resource_manager.cluster import ClusterState
from resource_manager.models import Request

PROBE_PREFIX = "what-if"
"""How the task ids of requests begin that only ask."""


def what_if(here: Service, demand: dict[str, Any]) -> dict[str, Any]:
    """The manager's explanation, and when the request should start if it queued now."""
    task_id = f"{PROBE_PREFIX}-{uuid.uuid4().hex[:12]}"
    answer = here.manager.explain(task_id, **demand)
    if answer["could_ever_fit"]:
        request = here.manager.build_request(task_id, **demand)
        start = estimated_starts(here, request).get(task_id, estimates.UNKNOWN)
        answer["estimated_start"] = estimate_view(start)
    return answer


def estimated_starts(here: Service, *extra: Request) -> dict[str, estimates.Start]:
    """When all that wait should start, and the extra requests behind them."""

    def look(cluster: ClusterState, now: float) -> dict[str, estimates.Start]:
        runtime_of = here.watch.trends.runtime_of
        return estimates.estimate_starts(
            cluster, here.manager.policy, here.manager.order, now, runtime_of, extra
        )

    return here.watch.look(look)


def estimate_view(start: estimates.Start) -> dict[str, Any]:
    """Seconds since the epoch (None: cannot be told), the server, and how sure: good, fair or poor."""
    at = None if start.at is None or math.isinf(start.at) else start.at
    return {"at": at, "server_name": start.node, "confidence": str(start.confidence)}
