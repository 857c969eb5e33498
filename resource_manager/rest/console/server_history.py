"""History of one server: when its GPUs were closed and opened, and when its agent came and went."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import islice
from typing import Any

from resource_manager.manager.results import Recorded
from resource_manager.manager.wording import by_whom

KINDS = {
    "gpuclosed": "GPU {gpu_id} closed",
    "gpuopened": "GPU {gpu_id} opened",
    "agentseen": "watched by its agent",
    "agentlost": "its agent is silent: no new leases",
    "drained": "drained",
    "resumed": "resumed",
}
"""Text of each kind of change that is about the health of a server."""

MAX_SHOWN = 50


def health_history(newest_first: Iterable[Recorded], server: str) -> list[Recorded]:
    """Return the server's last changes of these kinds, the newest first, among these changes."""
    found = (change for change in newest_first if change["change"] in KINDS and change["node"] == server)
    return list(islice(found, MAX_SHOWN))


def describe_change(change: Mapping[str, Any]) -> str:
    """Return one of these changes as a phrase."""
    text = "marked as failed" if change.get("failed") else KINDS[change["change"]].format_map(change)
    return by_whom(f"{text}: {change['reason']}" if change.get("reason") else text, change)
