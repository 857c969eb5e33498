"""Work that a service does regularly, beside what it is asked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from resource_manager.errors import ResourceManagerError
from resource_manager.manager.queue_view import MAX_AGE_S
from resource_manager.manager.state_marks import CHECK_EVERY_S
from resource_manager.rest.service import Service
from resource_manager.rest.webhooks import SEND_EVERY_S, NoticeSender

logger = logging.getLogger(__name__)

EXPIRE_EVERY_S = 10.0
"""Time between two looks for leases that expire: clients leave them to the service, and may only wait."""

SILENCE_EVERY_S = 5.0
"""Time between two looks at whether agents are silent."""

Chore = tuple[str, float, Callable[[], object]]
"""Work that is done regularly: its name, the seconds between, what to call."""


def begin_chores(
    service: Service, notice_key: str, stop: threading.Event, further: Iterable[Chore] = ()
) -> list[threading.Thread]:
    """Start what every service does, and the further chores; notices are signed with that key, if any."""
    notices = NoticeSender(service.manager, service.watch, notice_key)
    chores: list[Chore] = [
        ("expiry", EXPIRE_EVERY_S, service.manager.expire_and_schedule),
        ("deadlines", MAX_AGE_S, service.manager.check_deadlines),
        ("silence of agents", SILENCE_EVERY_S, service.receiver.note_silence),
        ("marks of the state", CHECK_EVERY_S, service.receiver.marks.check),
        ("notices", SEND_EVERY_S, notices.send),
        *further,
    ]
    return [regularly(name, interval_s, work, stop) for name, interval_s, work in chores]


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
