"""The recovery window: grants and expirations pause until owners could renew their leases.

It begins with a restart of the store, which the store notices, or with a jump of the store's clock, which the
processes that read it notice. Since one machine may be wrong about a jump, its processes pause alone; it
becomes a window for all once a second machine saw the same jump, or at once where no other watches.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Sequence

from resource_manager.core.changes import Change, Renewed
from resource_manager.core.cluster import ClusterState
from resource_manager.core.refusal import RecoveryWindow, window_left
from resource_manager.errors import ResourceManagerError, StateUnconfirmedError, StoreError
from resource_manager.storage import Store
from resource_manager.storage.clock import JUMP_S, ClockJump, ServerClock, boot_id, since_boot
from resource_manager.storage.reports import Sighting

logger = logging.getLogger(__name__)

SIGHTING_EVERY_S = 20.0
"""Interval at which a process that expires leases stores that its machine watches the clock."""

WATCHING_S = 60.0
"""Time for which such a machine counts as watching."""

UNSEEN = Sighting(0.0)


class Recovery:
    """The end of the recovery window as this process knows it; the store has the last word.

    `boot_id` names this machine, `steady` is its clock that never jumps.
    """

    def __init__(self, store: Store) -> None:
        self.boot_id, self.steady = boot_id(), since_boot
        self._store = store
        self._is_compared = False
        self._ends_at = -math.inf
        self._clock_jump_s = 0.0
        self._seen: ClockJump | None = None
        self._seen_at = 0.0
        self._unstored: ClockJump | None = None
        self._extends: ClockJump | None = None
        self._reported_at = self.steady()

    @property
    def suspends_grants(self) -> bool:
        """Return True from a refusal of the store, or a jump of its clock, until the end of the window."""
        return time.monotonic() < self._ends_at

    def remaining_s(self, now: float) -> float:
        """Return the seconds until grants resume; 0 or less outside a window."""
        return max(self._ends_at - time.monotonic(), self._store.suspension.until - now)

    def window(self, cluster: ClusterState, now: float) -> RecoveryWindow | None:
        """Return the window that is open, None outside of one."""
        left_s = self.remaining_s(now)
        if left_s <= 0:
            return None
        jump_s = self._store.suspension.clock_jump_s or self._clock_jump_s
        return window_left(cluster.settings.confirmation_window_s, left_s, jump_s)

    def begin(self, error: StateUnconfirmedError) -> None:
        """Suspend grants for as long as the refusal says; raise it if they are suspended already."""
        if self.suspends_grants:
            raise error
        self._ends_at = time.monotonic() + error.remaining_s
        self._clock_jump_s = error.clock_jump_s
        logger.warning("%s", error)

    # ---- jumps of the clock ----

    def note_jump(self, cluster: ClusterState, now: float) -> ClockJump | None:
        """Suspend grants if the store's clock jumped since the last reading; return a jump that is new.

        The first reading is compared with the last one that a process of this machine stored; raises
        `StoreError` if that cannot be read.
        """
        clock = self._store.clock
        if clock is None:
            return None
        jump = clock.jump
        if not self._is_compared:
            jump = self._jump_before(clock) or jump
        is_new = jump is not self._seen
        if is_new and jump is not None:
            self._suspend_for(jump, cluster)
        if self._unstored is not None:
            self._store_jump(self._unstored, now, clock)
        return jump if is_new else None

    def _suspend_for(self, jump: ClockJump, cluster: ClusterState) -> None:
        self._seen = self._unstored = jump
        self._seen_at = self._store.now()  # `now` may be from before another thread learnt of the jump
        self._ends_at = time.monotonic() + cluster.settings.confirmation_window_s
        self._clock_jump_s = jump.seconds
        logger.warning(
            "the store's clock jumped by %+.1f s: this process grants and expires nothing for %g s",
            jump.seconds,
            cluster.settings.confirmation_window_s,
        )

    def report_watching(self, now: float) -> None:
        """Store that this machine watches the store's clock, if it did not a moment ago."""
        clock = self._store.clock
        if clock is None or self.steady() - self._reported_at < SIGHTING_EVERY_S:
            return
        self._reported_at = self.steady()
        self._report(self._sighting(now, clock))

    def extensions(self, cluster: ClusterState, now: float) -> Sequence[Change]:
        """Return renewals that give leases back what a jump forward, stored by this process, took of them.

        A lease renewed every third of its life could end before its owner comes. One renewed since the jump
        ends too late to be among them. Quarantined, revoked and preempted ones have no life to give back.
        """
        jump = self._extends
        if jump is None:
            return ()
        return [
            Renewed(
                lease.lease_id, lease.fencing_token, now, lease.expires_at + jump.seconds, lease.checkpoint_at
            )
            for lease in cluster.leases.values()
            if not (lease.quarantined or lease.revoked)
            and lease.lease_id not in cluster.preempting
            and lease.expires_at <= now - jump.seconds + lease.request.ttl_s + JUMP_S
        ]

    def note_extended(self) -> None:
        """Note that the extensions were committed."""
        self._extends = None

    def _jump_before(self, clock: ServerClock) -> ClockJump | None:
        """Return the jump since the last stored reading of this machine; store a new one if that is old.

        If the process that stored it is gone, nobody else knows what the clock was before.
        """
        last = self._store.reports.sightings().get(self.boot_id, UNSEEN)
        reading = clock.reading
        jump = reading.jump_since(last.reading)
        if jump is None and reading.at - last.reading.at > SIGHTING_EVERY_S:
            self._report(last._replace(reading=reading))
        self._is_compared = True
        return jump

    def _store_jump(self, jump: ClockJump, now: float, clock: ServerClock) -> None:
        """Store the window for all if another machine saw the jump, or none else watches."""
        try:
            reports = self._store.reports
            reports.put_sighting(self.boot_id, self._sighting(now, clock))
            others = [other for name, other in reports.sightings().items() if name != self.boot_id]
            is_seen = any(jump.is_known(other.jump_s, other.jumped_at) for other in others)
            if is_seen or not any(_is_watching(other, jump, now) for other in others):
                suspension, is_begun = self._store.suspend(jump)
                self._ends_at = time.monotonic() + suspension.until - self._store.now()
                if is_begun:
                    who = "a second machine" if is_seen else "the only machine that watches the clock"
                    logger.warning("grants and expirations pause for all: %s saw the jump", who)
                    self._extends = jump if jump.seconds > 0 else None
        except ResourceManagerError as error:
            logger.warning("the jump of the store's clock is not stored for other processes yet: %s", error)
            return
        self._unstored = None

    def _report(self, sighting: Sighting) -> None:
        try:
            self._store.reports.put_sighting(self.boot_id, sighting)
        except StoreError as error:
            logger.warning("cannot store that this machine watches the store's clock: %s", error)

    def _sighting(self, now: float, clock: ServerClock) -> Sighting:
        jump = (0.0, 0.0) if self._seen is None else (self._seen.seconds, self._seen_at)
        return Sighting(now, *jump, clock.reading)


def _is_watching(other: Sighting, jump: ClockJump, now: float) -> bool:
    """Return whether a machine watched the clock a moment ago, by the clock before the jump or after it."""
    return min(abs(now - other.seen_at), abs(now - jump.seconds - other.seen_at)) < WATCHING_S
