"""Commits of groups: decided on the replica without the lock first, under the lock after conflicts."""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from resource_manager import errors
from resource_manager.core import lease_limits
from resource_manager.core.changes import Change, Expired, Preempting, Quarantined
from resource_manager.core.cluster import ClusterState
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.core.name_lookup import name_in
from resource_manager.manager.commit.group import Groups, Operation
from resource_manager.manager.commit.job_ends import ends_of_jobs
from resource_manager.manager.commit.recovery import Recovery
from resource_manager.manager.commit.replica import Replica
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.accounting.decayed_use import uses_after
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store
from resource_manager.storage.jobs import merged
from resource_manager.storage.locks import Lock, Meanwhile, nothing

logger = logging.getLogger(__name__)

TRIES_WITHOUT_LOCK = 4
"""Conflicts after which an operation waits for the lock."""

MAX_DECISION_S = 0.01
"""Time after which a group is committed as far as it is decided: the others of it are the next group."""

LOOK_AGAIN_S = 0.1
"""For so long a refused operation is decided again while processes wait for the lock. Its caller would come
back at once, which costs more than another look."""

Circumstances = Callable[[ClusterState, float], SchedulingPass]


class GroupCommits:
    """The leader of the groups of a store's operations, which `groups` carries out.

    `circumstances` are those of a decision, and `measured` receives measurements.
    """

    def __init__(
        self,
        store: Store,
        replica: Replica,
        recovery: Recovery,
        lock_timeout_s: float,
        circumstances: Circumstances,
        measured: Callable[[str, float], None],
    ) -> None:
        self.store = store
        self.groups = Groups(self._lead)
        self._replica = replica
        self._recovery = recovery
        self._lock_timeout_s = lock_timeout_s
        self._circumstances = circumstances
        self._measured = measured
        self._contended = False

    def _lead(self, group: list[Operation[Any]], deadline: float) -> None:
        """Commit the group; where the store is full, or cannot write one's change, each for itself."""
        parts = deque([group])
        with self._replica:
            while parts:
                part = parts.popleft()
                try:
                    self._commit_group(part, deadline)
                except (errors.StoreFullError, errors.InvalidRequestError) as error:
                    if len(part) > 1:  # some may need no memory
                        parts.extend([operation] for operation in part)
                    else:
                        part[0].fail(error)

    def _commit_group(self, group: list[Operation[Any]], deadline: float) -> None:
        conflicts = TRIES_WITHOUT_LOCK if self._contended else 0
        while True:
            try:
                if conflicts < TRIES_WITHOUT_LOCK:
                    decided = self._attempt(group, None)
                else:
                    if self._replica.cluster is not None:  # a jump back makes the lock of the dead live on
                        self._time_checked(self._replica.cluster)
                    # What others commit is read during the wait too, so that little is left under the lock.
                    with self.locked(deadline, self._replica.refresh) as lock:
                        if not lock.is_fresh:
                            self._replica.refresh()
                        group += self.groups.newcomers()
                        decided = self._attempt(group, lock)
                return self._finish(decided)
            except errors.StateUnconfirmedError as error:
                self._recovery.begin(error)
            except errors.RepeatedError as error:
                for operation in group:
                    if operation.once is not None and operation.once.key is error.key:
                        operation.stored = error.stored
                        operation.changes = []
                        operation.done = True
                group[:] = [operation for operation in group if not operation.done]
                if not group:
                    return None
            except errors.StaleStateError as error:
                self._measured("commit_conflicts", 1)
                if conflicts >= TRIES_WITHOUT_LOCK:  # the lock ran out while this process was paused
                    if time.monotonic() >= deadline:
                        raise
                elif isinstance(error, errors.LockedError):
                    conflicts = TRIES_WITHOUT_LOCK
                else:
                    conflicts += 1
                    self._replica.catch_up(error)

    def _attempt(self, group: list[Operation[Any]], lock: Lock | None) -> list[Operation[Any]]:
        """Decide the group and commit its changes; return what was decided, in that order.

        A group that takes long is cut: what is left of it is not done.
        """
        cluster = self._replica.cluster
        is_fresh = lock is not None or cluster is None
        if cluster is None:
            cluster = self._replica.refresh()
        decided = self._decide(cluster, group)
        age_s = 0.0 if is_fresh else time.monotonic() - self._replica.refreshed_at
        if any(not operation.changes and age_s > operation.max_age_s for operation in decided):
            # A refusal or an error decided on an old replica may be wrong: decide again on a fresh one.
            cluster = self._replica.refresh()
            decided = self._decide(cluster, group)
        changes = [change for operation in decided for change in operation.changes]
        if changes:
            self._replica.require_stored()
            started = time.monotonic()
            once = [
                (operation.once.key, operation.reference)
                for operation in decided
                if operation.once is not None and operation.changes
            ]
            stored = [row for operation in decided if operation.changes for row in operation.jobs]
            self.store.commit(
                cluster.version,
                changes,
                uses=uses_after(cluster, changes),
                jobs=merged([*stored, *ends_of_jobs(cluster, changes)]),
                now=self.store.now(),
                lock=lock,
                once=once,
            )
            self._replica.refreshed_at = time.monotonic()
            self._measured("commit_s", self._replica.refreshed_at - started)
        return decided

    def _finish(self, decided: list[Operation[Any]]) -> None:
        """Apply what was committed to the replica, and answer; the next process may commit meanwhile.

        Under contention a refused operation is left for the next group, unless it is older than
        `LOOK_AGAIN_S`.
        """
        cluster, now = self._replica.cluster, self.store.now()
        assert cluster is not None
        looks_again = self._contended and not self._recovery.suspends_grants
        since = time.monotonic() - LOOK_AGAIN_S
        for operation in decided:
            if not (looks_again and operation.asked_at > since and operation.is_refused(cluster)):
                if isinstance(operation, Expirations):
                    _log(cluster, operation.due)
                operation.finish(cluster, now)
        self._recovery.note_extended()
        self.store.tidy_up(cluster)

    def _decide(self, cluster: ClusterState, group: list[Operation[Any]]) -> list[Operation[Any]]:
        """Decide each operation on top of those before it, for a while; return them in that order.

        One that repeats an earlier one's idempotency key is left for the next group, which finds it stored.
        """
        now, ends_at = self._time_checked(cluster), time.monotonic() + MAX_DECISION_S
        decided = self._led_by_expirations(cluster, group, now)
        if len(decided) == 1:
            decided[0].decide(cluster, now)
            return decided
        decided = _without_repeats(decided)
        with cluster.trial():
            for count, operation in enumerate(decided, 1):
                operation.decide(cluster, now)
                if time.monotonic() > ends_at:
                    return decided[:count]
                if operation is not decided[-1]:  # the last needs no trial, and an inventory allows none
                    cluster.apply(*operation.changes)
        return decided

    def _time_checked(self, cluster: ClusterState) -> float:
        """Return the time on the store's clock, after a look at whether it jumped."""
        now = self.store.now()
        new_jump = self._recovery.note_jump(cluster, now)
        if new_jump is not None:
            self._measured("clock_jump_s", new_jump.seconds)
        return now

    def _led_by_expirations(
        self, cluster: ClusterState, group: list[Operation[Any]], now: float
    ) -> list[Operation[Any]]:
        """Return the group, with an operation in front that expires what is due, if anything is.

        In a recovery window nothing is, and what a jump of the clock took of leases is given back.
        """
        due: Sequence[Change]
        if self._recovery.suspends_grants:
            due = self._recovery.extensions(cluster, now)
        else:
            due = lease_steps.expire(cluster, now)
        own = [operation for operation in group if isinstance(operation, Expirations)]
        if due:
            own = own or [Expirations(self._circumstances)]
        if not own:
            return group
        own[0].due = due
        return [*own, *(operation for operation in group if operation not in own)]

    @contextmanager
    def locked(self, deadline: float, meanwhile: Meanwhile = nothing) -> Iterator[Lock]:
        """Hold the store's lock; raises `LockTimeoutError` at the deadline."""
        started = time.monotonic()
        lock = self.store.lock(self._replica.cluster if self._replica.is_stored else None)
        if not lock.acquire(max(deadline - started, 0.0), meanwhile):
            raise errors.LockTimeoutError(self._lock_timeout_s)
        self._contended = lock.waited
        self._measured("lock_wait_s", time.monotonic() - started)
        try:
            yield lock
        finally:
            try:
                lock.release()
            except errors.ResourceManagerError as error:  # harmless: the commit is decided
                logger.warning("the lock could not be released and will expire: %s", error)


def _without_repeats(group: Sequence[Operation[Any]]) -> list[Operation[Any]]:
    first: dict[tuple[str, str], Operation[Any]] = {}
    return [
        operation
        for operation in group
        if (once := operation.once) is None
        or first.setdefault((once.key.caller, once.key.key), operation) is operation
    ]


def _log(cluster: ClusterState, due: Sequence[Change]) -> None:
    for change in due:
        if isinstance(change, Preempting) and not change.preemptor:
            logger.warning("its preemption is taken back: %s", name_in(cluster, change.lease_id))
        elif isinstance(change, Preempting):
            winner = name_in(cluster, preemptor_in_words(change.preemptor))
            why = lease_limits.in_words(change.preemptor, winner)
            logger.warning("%s: %s", why, name_in(cluster, change.lease_id))
    late: dict[str, list[str]] = {}
    for each in due:
        if isinstance(each, Expired | Quarantined):
            lease = cluster.leases.get(each.lease_id)
            # The worker of a lease that is preempted may die before the end of its grace.
            is_late = lease is not None and lease.preempted_by and each.at >= lease.preempt_until
            why = "its grace is over" if is_late else "not renewed in time"
            late.setdefault(why, []).append(name_in(cluster, each.lease_id))
    for why, leases in late.items():
        logger.warning("%s: %s", why, ", ".join(leases))


class Expirations(Operation[None]):
    """The operation that ends what is due; the leases are named before a trial, which hides the heap."""

    __slots__ = ("due",)

    def __init__(self, circumstances: Circumstances) -> None:
        super().__init__(
            lambda cluster, now: allocator.with_dispatch(cluster, self.due, circumstances(cluster, now)),
            lambda cluster, now: None,
            by="",
        )
        self.due: Sequence[Change] = ()
