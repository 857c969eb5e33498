"""Jobs that would begin too late to end before a maintenance window."""

from __future__ import annotations

from collections.abc import Iterable

from resource_manager.manager.cluster_results import WindowView
from resource_manager.manager.results import Allocation


def late_start(windows: Iterable[WindowView], allocation: Allocation) -> str:
    """Return why the task waits again, empty if its job may begin now and runs into no window.

    The grant counted the stated runtime from itself, and the job may begin a while later. A runtime that is
    not stated keeps a job from beginning in an open window only. A limit that is shorter counts instead.
    """
    stated_s = allocation["expected_runtime_s"] or 0.0
    ends_s = (stated_s, allocation["max_runtime_s"], allocation["requeue_after_s"])
    runtime_s = min(each for each in ends_s if each is not None)
    servers = {member["server_name"] for member in allocation["members"]}
    for window in windows:
        is_ahead = window["is_open"] or window["begins_in_s"] < runtime_s
        if is_ahead and servers.intersection(window["servers"]):
            when = f"from {window['from']} until {window['until']}"
            return f"the job begins too late to end before the maintenance {when}; waiting again"
    return ""
