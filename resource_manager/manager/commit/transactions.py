"""Transactions on one replica of the state: optimistic first, under the lock after conflicts.

Operations of concurrent threads of one process are committed as a group: one thread decides all of them in
order of arrival, each on top of the changes before it, and commits once.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import replace
from typing import Any, Generic, Protocol, TypeVar

from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.errors import (
    InvalidRequestError,
    LockedError,
    LockTimeoutError,
    ResourceManagerError,
    StaleStateError,
    StateUnconfirmedError,
    StoreFullError,
)
from resource_manager.manager.runtime_learner import RuntimeLearner
from resource_manager.scheduling import allocator
from resource_manager.scheduling.policies import Policy, nothing_fits
from resource_manager.scheduling.queue_order import QueueDiscipline
from resource_manager.storage import Store
from resource_manager.storage.redis.lock import Lock

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES_WITHOUT_LOCK = 4
"""Conflicts after which an operation waits for the lock."""

Step = Callable[[ClusterState, float], list[Change]]
"""(state, now) -> the changes to make; it may raise, and must not change the state."""


class Observer(Protocol):
    """A receiver of measurements; must be quick and must not raise."""

    def committed(self, changes: Sequence[Change], cluster: ClusterState) -> None:
        """Receive changes that took effect; `cluster` is the state after them."""

    def measured(self, name: str, value: float) -> None:
        """Receive a value of `lock_wait_s`, `commit_s` or `commit_conflicts` (1 each)."""


class _Operation(Generic[T]):
    """One caller's step, its changes and its result."""

    __slots__ = ("changes", "done", "error", "reader", "result", "step")

    def __init__(self, step: Step, reader: Callable[[ClusterState], T]) -> None:
        self.step = step
        self.reader = reader
        self.changes: list[Change] = []
        self.result: T | None = None
        self.error: Exception | None = None
        self.done = False

    def decide(self, cluster: ClusterState, now: float) -> None:
        self.error = None
        self.changes = []
        try:
            self.changes = self.step(cluster, now)
        except Exception as error:  # any error is the caller's, not the group's
            self.error = error

    def finish(self, cluster: ClusterState) -> None:
        """Apply the committed changes to the replica and call the reader."""
        for change in self.changes:
            cluster.apply(change)
        if self.error is None:
            try:
                self.result = self.reader(cluster)
            except Exception as error:
                self.error = error


class Transactions:
    """Runner of steps against a store; thread-safe.

    `policy` and `order` schedule pending requests whenever leases expire; `first_state` is written if the
    store holds no state.
    """

    def __init__(
        self,
        store: Store,
        policy: Policy,
        order: QueueDiscipline,
        first_state: Callable[[], Snapshot],
        lock_timeout_s: float,
        observer: Observer | None = None,
    ) -> None:
        self.store = store
        self.learner = RuntimeLearner(store)
        self.order = replace(order, runtime_of=self.learner.runtime_of)
        self.observer = observer
        self.replica: ClusterState | None = None
        self.usual_policy = policy
        self._first_state = first_state
        self._lock_timeout_s = lock_timeout_s
        self._queue: deque[_Operation[Any]] = deque()
        self._mutex = threading.Lock()
        self._refreshed_at = float("-inf")
        self._grants_suspended_until = float("-inf")

    # ---- used by steps ----

    @property
    def policy(self) -> Policy:
        """The placement policy; nothing fits during the recovery window of a restarted store."""
        return nothing_fits if time.monotonic() < self._grants_suspended_until else self.usual_policy

    def resumes_in_s(self, now: float) -> float:
        """Return the seconds until grants resume after a restart of the store; 0 or less if not paused."""
        return max(self._grants_suspended_until - time.monotonic(), self.store.suspended_until - now)

    def with_dispatch(self, cluster: ClusterState, changes: Sequence[Change], now: float) -> list[Change]:
        """Return the changes and the grants to pending requests that they allow."""
        return allocator.with_dispatch(cluster, changes, self.policy, self.order, now)

    # ---- changing and reading ----

    def run(
        self, step: Step, reader: Callable[[ClusterState], T], *, exclusive: bool = False
    ) -> tuple[list[Change], T]:
        """Decide, commit and call `reader` on the state right after; return the changes and its result.

        The changes include the expirations that were due. `exclusive` keeps a step out of groups that cannot
        be applied on trial (an inventory). Raises the step's errors, `LockTimeoutError` and `StoreError`.
        """
        operation = _Operation(step, reader)
        deadline = time.monotonic() + self._lock_timeout_s
        try:
            if not exclusive:
                self._queue.append(operation)
            if not self._mutex.acquire(timeout=self._lock_timeout_s):
                try:
                    self._queue.remove(operation)
                except ValueError:
                    self._mutex.acquire()  # another thread is deciding this operation: its result counts
                else:
                    raise LockTimeoutError(self._lock_timeout_s)
            try:
                if not operation.done:
                    with self._drop_replica_on_interrupt():
                        self._lead(operation, [operation] if exclusive else self._group(), deadline)
            finally:
                self._mutex.release()
        except BaseException:
            # This thread is being stopped: without a caller, no other thread may carry out its operation.
            with suppress(ValueError):
                self._queue.remove(operation)
            raise
        if operation.error is not None:
            raise operation.error
        return operation.changes, operation.result  # type: ignore[return-value]

    def read(self, reader: Callable[[ClusterState, float], T], max_age_s: float = 0.0) -> T:
        """Return the result of `reader` on the state as of now, or of at most `max_age_s` ago."""
        with self._mutex, self._drop_replica_on_interrupt():
            cluster = self.replica
            if cluster is None or time.monotonic() - self._refreshed_at >= max_age_s:
                cluster = self._refresh()
            return reader(cluster, self.store.now())

    def peek_replica(self, reader: Callable[[ClusterState], T]) -> T:
        """Return the result of `reader` on the replica as it is, for values that only an inventory changes.

        After `InvalidRequestError` call it again on a refreshed replica: nodes may have been added.
        """
        if self.replica is not None:
            with suppress(InvalidRequestError):
                return reader(self.replica)
        return self.read(lambda cluster, now: reader(cluster))

    def replace(self, snapshot: Snapshot) -> None:
        """Replace the state by that one, under the lock; raises `LockTimeoutError`."""
        with self._mutex:
            lock = self._lock(time.monotonic() + self._lock_timeout_s)
            try:
                self.store.replace(snapshot, lock_token=lock.token)
                self.replica = None
            finally:
                _release_quietly(lock)

    @contextmanager
    def _drop_replica_on_interrupt(self) -> Iterator[None]:
        """Drop the replica if this thread is stopped inside, perhaps in the middle of a change to it."""
        try:
            yield
        except Exception:
            raise
        except BaseException:
            self.replica = None
            raise

    # ---- one group of operations ----

    def _group(self) -> list[_Operation[Any]]:
        group = []
        while self._queue:
            group.append(self._queue.popleft())
        return group

    def _lead(self, mine: _Operation[Any], group: list[_Operation[Any]], deadline: float) -> None:
        try:
            self._commit_group(group, deadline)
        except Exception as error:
            for operation in group:
                if not operation.done:
                    operation.error = error
        except BaseException:
            # This thread is being stopped; the other operations were not carried out: queue them again.
            self._queue.extendleft(operation for operation in reversed(group) if operation is not mine)
            raise
        for operation in group:
            operation.done = True

    def _commit_group(self, group: list[_Operation[Any]], deadline: float) -> None:
        for _ in range(TRIES_WITHOUT_LOCK):
            try:
                return self._attempt(group, None)
            except LockedError:
                self._measured("commit_conflicts", 1)
                break
            except StaleStateError as error:
                self._measured("commit_conflicts", 1)
                self._catch_up(error)
        while True:
            lock = self._lock(deadline)
            try:
                self._refresh()
                return self._attempt(group, lock.token)
            except StaleStateError:  # the lock ran out while this process was paused
                self._measured("commit_conflicts", 1)
                if time.monotonic() >= deadline:
                    raise
            finally:
                _release_quietly(lock)

    def _attempt(self, group: list[_Operation[Any]], lock_token: str | None) -> None:
        cluster = self.replica
        fresh = lock_token is not None or cluster is None
        if cluster is None:
            cluster = self._refresh()
        if self.order.backfill and cluster.pending:
            self.learner.catch_up(cluster)
        whole = self._decide(cluster, group)
        if not fresh and any(not operation.changes for operation in group):
            # A refusal or an error decided on an old replica may be wrong: decide again on a fresh one.
            cluster = self._refresh()
            whole = self._decide(cluster, group)
        changes = [change for operation in whole for change in operation.changes]
        if changes:
            try:
                self._commit(cluster, changes, lock_token)
            except StateUnconfirmedError as error:
                if time.monotonic() < self._grants_suspended_until:
                    raise
                self._grants_suspended_until = time.monotonic() + error.remaining_s
                logger.warning("%s", error)
                self._attempt(group, lock_token)
                return
            except StoreFullError:
                if len(group) == 1:
                    raise
                self._one_by_one(group, lock_token)
                return
        for operation in whole:
            operation.finish(cluster)
        if changes and self.observer is not None:
            self.observer.committed(changes, cluster)
        if whole[0] is not group[0]:
            group[0].changes = whole[0].changes + group[0].changes

    def _one_by_one(self, group: list[_Operation[Any]], lock_token: str | None) -> None:
        """Commit operations that need no memory of a full store and refuse the others; empties the group."""
        while group:
            try:
                self._attempt(group[:1], lock_token)
            except StoreFullError as error:
                group[0].error = error
            group.pop(0).done = True

    def _decide(self, cluster: ClusterState, group: list[_Operation[Any]]) -> list[_Operation[Any]]:
        """Decide each operation on top of those before it; return them, led by the expirations if any."""
        now = self.store.now()
        over = allocator.expire(cluster, now)
        if over:
            logger.warning("not renewed in time: %s", ", ".join(f"{change.lease_id!r}" for change in over))
            expiry = _Operation(
                lambda cluster, now: self.with_dispatch(cluster, over, now), lambda cluster: None
            )
            group = [expiry, *group]
        with cluster.trial() if len(group) > 1 else nullcontext():
            for operation in group:
                operation.decide(cluster, now)
                if operation is not group[-1]:  # the last needs no trial, and an inventory allows none
                    for change in operation.changes:
                        cluster.apply(change)
        return group

    def _commit(self, cluster: ClusterState, changes: list[Change], lock_token: str | None) -> None:
        started = time.monotonic()
        self.store.commit(cluster.version, changes, now=self.store.now(), lock_token=lock_token)
        self._refreshed_at = time.monotonic()
        self._measured("commit_s", self._refreshed_at - started)

    def _catch_up(self, error: StaleStateError) -> None:
        """Bring the replica up to date, by the missed changes in the store's refusal if it has them."""
        if self.replica is None or not error.missed:
            self._refresh()
            return
        for change in error.missed:
            self.replica.apply(change)

    def _refresh(self) -> ClusterState:
        replica = self.store.refresh(self.replica)
        if replica is None:
            self.store.initialise(self._first_state())
            replica = self.store.refresh(None)
            if replica is None:
                raise StaleStateError(0, None, "the state vanished while it was being initialised; retry")
        self.replica = replica
        self._refreshed_at = time.monotonic()
        return replica

    def _lock(self, deadline: float) -> Lock:
        started = time.monotonic()
        lock = self.store.lock()
        if not lock.acquire(max(deadline - started, 0.0)):
            raise LockTimeoutError(self._lock_timeout_s)
        self._measured("lock_wait_s", time.monotonic() - started)
        return lock

    def _measured(self, name: str, value: float) -> None:
        if self.observer is not None:
            self.observer.measured(name, value)


def _release_quietly(lock: Lock) -> None:
    """Release the lock; a lost or unreachable lock does no harm once the commit is decided."""
    try:
        lock.release()
    except ResourceManagerError as error:
        logger.warning("the lock could not be released and will expire: %s", error)
