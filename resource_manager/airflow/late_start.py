"""Jobs that would begin too late to end before a maintenance window."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.results import Allocation


def window_ahead(windows: Iterable[WindowView], allocation: Allocation) -> WindowView | None:
    """Return the window that the job would run into if it began now, or None.

    The grant counted the stated runtime from itself, and the job may begin a while later. A runtime that is
    not stated keeps a job from beginning in an open window only.
    """
    runtime_s = allocation["expected_runtime_s"] or 0.0
    servers = {member["server_name"] for member in allocation["members"]}
    for window in windows:
        is_ahead = window["is_open"] or window["begins_in_s"] < runtime_s
        if is_ahead and servers.intersection(window["servers"]):
            return window
    return None


def describe_late_start(window: WindowView) -> str:
    """Return why the task waits again."""
    return (
        "the job begins too late to end before the maintenance "
        f"from {window['from']} until {window['until']}; waiting again"
    )
