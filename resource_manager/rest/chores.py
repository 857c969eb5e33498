"""Work that a service does regularly, beside what it is asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from resource_manager.errors import ResourceManagerError

logger = logging.getLogger(__name__)

SILENCE_EVERY_S = 5.0
"""Time between two looks at whether agents are silent."""


def regularly(
    name: str, interval_s: float, work: Callable[[], object], stop: threading.Event
) -> threading.Thread:
    """Start a thread that does this work every `interval_s`, also without requests, and once at the end."""

    def run() -> None:
        stopped = False
        while not stopped:
            stopped = stop.wait(interval_s)
            try:
                work()
            except Exception as error:  # such as a bug: leases must expire all the same
                is_known = isinstance(error, ResourceManagerError | OSError)
                logger.warning("%s failed: %s", name, error, exc_info=not is_known)

    thread = threading.Thread(target=run, name=f"gpu-manager-{name}", daemon=True)
    thread.start()
    return thread
