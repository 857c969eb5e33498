"""The recovery window: after a restart of the store grants pause until owners could renew their leases."""

from __future__ import annotations

import logging
import time

from resource_manager.errors import StateUnconfirmedError
from resource_manager.storage import Store

logger = logging.getLogger(__name__)


class Recovery:
    """The end of the recovery window as this process knows it; the store has the last word."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._ends_at = float("-inf")

    @property
    def suspends_grants(self) -> bool:
        """Return True from a refusal of the store until the end of the window that it named."""
        return time.monotonic() < self._ends_at

    def remaining_s(self, now: float) -> float:
        """Return the seconds until grants resume; 0 or less outside a window."""
        return max(self._ends_at - time.monotonic(), self._store.suspended_until - now)

    def begin(self, error: StateUnconfirmedError) -> None:
        """Suspend grants for as long as the refusal says; raise it if they are suspended already."""
        if self.suspends_grants:
            raise error
        self._ends_at = time.monotonic() + error.remaining_s
        logger.warning("%s", error)
