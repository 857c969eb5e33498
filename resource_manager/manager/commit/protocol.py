"""The commit protocol: decide on the replica without the lock first, under the lock after conflicts."""

from __future__ import annotations

import json
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, Protocol, TypeVar, cast

from resource_manager.core import lease_limits
from resource_manager.core.changes import (
    Change,
    Expired,
    MembersReleased,
    Preempting,
    Quarantined,
    Queued,
    Released,
    Renewed,
)
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.cluster_settings import ClusterSettings
from resource_manager.core.maintenance import preemptor_in_words
from resource_manager.core.name_lookup import name_in
from resource_manager.core.refusal import Grounds, misconfigured, recovering
from resource_manager.errors import (
    NO_SERVERS,
    InvalidRequestError,
    LockedError,
    LockTimeoutError,
    NewerFormatError,
    RepeatedError,
    ResourceManagerError,
    StaleStateError,
    StateUnconfirmedError,
    StoreFullError,
)
from resource_manager.manager.commit.asking import Step, asking
from resource_manager.manager.commit.group import Groups, Operation, Reader, Repeatable
from resource_manager.manager.commit.job_ends import ends_of_jobs
from resource_manager.manager.commit.recovery import Recovery
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.commit.rules import RuleBook
from resource_manager.scheduling import allocator, lease_steps
from resource_manager.scheduling.accounting.decayed_use import uses_after
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store
from resource_manager.storage.jobs import JobRow, merged
from resource_manager.storage.locks import Lock, Meanwhile, nothing
from resource_manager.storage.once import Once

logger = logging.getLogger(__name__)

T = TypeVar("T")

TRIES_WITHOUT_LOCK = 4
"""Conflicts after which an operation waits for the lock."""

MAX_DECISION_S = 0.01
"""Time after which a group is committed as far as it is decided: the others of it are the next group."""

LOOK_AGAIN_S = 0.1
"""For so long a refused operation is decided again while processes wait for the lock. Its caller would come
back at once, which costs more than another look."""


class Observer(Protocol):
    """A receiver of measurements; must be quick and must not raise."""

    def measured(self, name: str, value: float) -> None:
        """Receive a value of `lock_wait_s`, `commit_s`, `commit_conflicts` (1 each) or `clock_jump_s`."""


class Transactions:
    """Runner of steps against a store; thread-safe.

    Pending requests are scheduled, whenever leases expire, by policy and order of the state's settings. `by`
    asks where nobody says who does.
    """

    def __init__(
        self, store: Store, lock_timeout_s: float, by: str = "", observer: Observer | None = None
    ) -> None:
        self.store = store
        self.by = by
        self.observer = observer
        self.read_elsewhere: Callable[[Reader[Any]], Any] | None = None
        """Answers reads of the newest state with another replica: so they delay no decision."""
        self.distrusted: Grounds | None = None
        """The reason for which this process grants nothing on the state as it is; None if it trusts it."""
        self._rules = RuleBook()
        self._lock_timeout_s = lock_timeout_s
        self._recovery = Recovery(store)
        self._replica = Replica(store)
        self._groups = Groups(self._lead)
        self._contended = False

    # ---- used by steps ----

    def deciding(self, cluster: ClusterState, now: float) -> SchedulingPass:
        """Return the circumstances of a decision now; nothing is granted while this process knows why not."""
        suspended = self.distrusted
        if self._recovery.suspends_grants:
            suspended = self._in_recovery(cluster, now) or suspended
        return self._rules.of(cluster).at(now, suspended)

    def explaining(self, cluster: ClusterState, now: float) -> SchedulingPass:
        """Return the circumstances for a reader, who also learns of a window that no decision has met yet.

        Another reason is that the cluster has no servers.
        """
        suspended = self._in_recovery(cluster, now) or self.misconfigured(cluster)
        return self._rules.of(cluster).at(now, suspended)

    def resuming(self, cluster: ClusterState, now: float) -> SchedulingPass:
        """Return the circumstances once grants resume, for an outlook on what starts then."""
        return self._rules.of(cluster).at(now + max(self._recovery.remaining_s(now), 0.0))

    def _in_recovery(self, cluster: ClusterState, now: float) -> Grounds | None:
        window = self._recovery.window(cluster, now)
        return None if window is None else recovering(window)

    def misconfigured(self, cluster: ClusterState) -> Grounds | None:
        """Return why this process can grant nothing in that state; None if it can."""
        if self.distrusted is not None:
            return self.distrusted
        return self._rules.of(cluster).refusal if cluster.nodes else misconfigured(NO_SERVERS)

    def with_dispatch(self, cluster: ClusterState, changes: Sequence[Change], now: float) -> list[Change]:
        """Return the changes and the grants to pending requests that they allow; none for no changes."""
        if not changes:  # what time alone allows is nobody's doing
            return []
        return allocator.with_dispatch(cluster, changes, self.deciding(cluster, now))

    # ---- changing and reading ----

    def run(
        self,
        step: Step,
        reader: Reader[T],
        *,
        exclusive: bool = False,
        once: Repeatable[T] | None = None,
        refused: Callable[[ClusterState], bool] | None = None,
        lease_id: str | None = None,
        max_age_s: float = 0.0,
        jobs: Sequence[JobRow] = (),
    ) -> T:
        """Decide, commit and return the answer of `reader` on the state right after.

        `exclusive` keeps a step out of groups that cannot be applied on trial (an inventory). With `once`
        the changes are made only if none were made under that key. A step without changes that `refused`
        confirms is decided again for `LOOK_AGAIN_S` under contention; that there are none may be decided on a
        state of `max_age_s` ago. A step about `lease_id` alone, whose fencing token the caller has, is
        carried out on a state that a newer version wrote, too. `jobs` are stored with the changes.
        Raises the step's errors,
        `LockTimeoutError`, `StoreError`, and `IdempotencyKeyError`.
        """
        who = asking()
        by, step = (self.by, step) if who is None else (who.by, who.noting(step))
        operation = Operation(step, reader, by, once, refused, max_age_s, jobs)
        try:
            if once is not None and (reference := self.store.recall(once.key)) is not None:
                return self._answer_again(once, reference)
            self._groups.carry_out(operation, self._lock_timeout_s, exclusive=exclusive)
            if isinstance(operation.error, NewerFormatError):
                raise operation.error
        except NewerFormatError:
            if lease_id is None:
                raise
            return self._run_on_known(operation, lease_id)
        if who is not None and operation.error is None:
            who.changes += operation.changes
        if once is None:
            return _answer(operation)
        if operation.stored is not None:
            return self._answer_again(once, once.key.reference_in(operation.stored))
        # Without an effect it may have been decided after the same request, sent a moment earlier.
        if not operation.changes and (reference := self.store.recall(once.key)) is not None:
            return self._answer_again(once, reference)
        return _answer(operation)

    def _run_on_known(self, operation: Operation[T], lease_id: str) -> T:
        """Commit what an operation does to one lease, on what is known of a state that a newer version wrote.

        Nothing is granted for it, and nothing else ends.
        """
        once, deadline = operation.once, time.monotonic() + self._lock_timeout_s
        of_lease = Renewed | Released | MembersReleased | Quarantined
        with self._groups.mutex, self._locked(deadline) as lock:
            cluster, now = self.store.refresh_known(), self.store.now()
            operation.decide(cluster, now)
            if operation.error is not None:
                raise operation.error
            changes: list[Change] = [
                change
                for change in operation.changes
                if (isinstance(change, of_lease) and change.lease_id == lease_id)
                or (isinstance(change, Queued) and change.request.lease_id == lease_id)  # it was preempted
            ]
            keys = [] if once is None else [(once.key, json.dumps(once.refer(changes)))]
            try:
                uses = uses_after(cluster, changes)
                rows = merged([*operation.jobs, *ends_of_jobs(cluster, changes)]) if changes else []
                self.store.commit(
                    cluster.version, changes, now=now, lock=lock, once=keys, uses=uses, jobs=rows
                )
            except RepeatedError as error:
                assert once is not None
                return once.answer(cluster, now, json.loads(once.key.reference_in(error.stored)))
        for change in changes:
            cluster.apply(change)
        return operation.reader(cluster, now)

    def expire_and_schedule(self) -> list[Change]:
        """Expire leases that are due and grant pending requests that fit; return the changes."""
        operation = _Expirations(self)
        self._groups.carry_out(operation, self._lock_timeout_s)
        _answer(operation)
        self._recovery.watch(self.store.now())
        return operation.changes

    def read(self, reader: Reader[T], max_age_s: float = 0.0) -> T:
        """Return the answer of `reader` on the state as of now, or of at most `max_age_s` ago."""
        if self.read_elsewhere is not None and not max_age_s:
            return cast(T, self.read_elsewhere(reader))
        with self._groups.mutex, self._replica:
            return reader(self._replica.as_of(max_age_s), self.store.now())

    def explain(self, reader: Reader[T]) -> T:
        """Return the answer of a reader that takes long, on a state no older than this process's last change.

        Where a service has another replica for readers it delays no decision.
        """
        if self.read_elsewhere is not None:
            return cast(T, self.read_elsewhere(reader))
        with self._groups.mutex, self._replica:
            return reader(self._replica.as_of(math.inf), self.store.now())

    def known(self) -> ClusterState | None:
        """Return the replica as it is, None before the first read; see `peek_replica`."""
        return self._replica.cluster

    def peek_replica(self, reader: Reader[T]) -> T:
        """Return the answer of `reader` on the replica as it is, for values that only an inventory changes.

        After `InvalidRequestError` call it again on a refreshed replica: nodes may have been added.
        """
        cluster = self._replica.cluster
        if cluster is not None:
            try:
                return reader(cluster, self.store.now())
            except InvalidRequestError:
                pass
        return self.read(reader)

    def initialise(self, first: Snapshot, settings: ClusterSettings) -> bool:
        """Write that state with these settings to an empty store; return False if it is not empty."""
        with self._groups.mutex, self._replica:
            self._replica.refresh()
            if self._replica.is_stored:
                return False
            done = self.store.initialise(replace(first, settings=settings))
            self._replica.drop()
            return done

    def replace(self, snapshot: Snapshot, once: Once | None = None) -> None:
        """Replace the state by that one, under the lock, if it was not done under that idempotency key.

        Raises `LockTimeoutError` and `IdempotencyKeyError`.
        """
        deadline = time.monotonic() + self._lock_timeout_s
        with self._groups.mutex, self._locked(deadline) as lock:
            try:
                self.store.replace(snapshot, lock=lock, once=[] if once is None else [(once, "null")])
            except RepeatedError as error:
                assert once is not None
                once.reference_in(error.stored)
            self._replica.drop()

    def _answer_again(self, once: Repeatable[T], reference: str) -> T:
        return self.read(lambda cluster, now: once.answer(cluster, now, json.loads(reference)))

    # ---- one group of operations ----

    def _lead(self, group: list[Operation[Any]], deadline: float) -> None:
        """Commit the group; where the store is full, each operation for itself."""
        parts = deque([group])
        with self._replica:
            while parts:
                part = parts.popleft()
                try:
                    self._commit_group(part, deadline)
                except StoreFullError as error:
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
                    with self._locked(deadline, self._replica.refresh) as lock:
                        if not lock.is_fresh:
                            self._replica.refresh()
                        group += self._groups.newcomers()
                        decided = self._attempt(group, lock)
                return self._finish(decided)
            except StateUnconfirmedError as error:
                self._recovery.begin(error)
            except RepeatedError as error:
                for operation in group:
                    if operation.once is not None and operation.once.key is error.key:
                        operation.stored = error.stored
                        operation.changes = []
                        operation.done = True
                group[:] = [operation for operation in group if not operation.done]
                if not group:
                    return None
            except StaleStateError as error:
                self._measured("commit_conflicts", 1)
                if conflicts >= TRIES_WITHOUT_LOCK:  # the lock ran out while this process was paused
                    if time.monotonic() >= deadline:
                        raise
                elif isinstance(error, LockedError):
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
                (operation.once.key, json.dumps(operation.once.refer(operation.changes)))
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
                operation.finish(cluster, now)
        self._recovery.extended()
        self.store.tidy_up(cluster)

    def _decide(self, cluster: ClusterState, group: list[Operation[Any]]) -> list[Operation[Any]]:
        """Decide each operation on top of those before it, for a while; return them in that order."""
        now, ends_at = self._time_checked(cluster), time.monotonic() + MAX_DECISION_S
        decided = self._led_by_expirations(cluster, group, now)
        if len(decided) == 1:
            decided[0].decide(cluster, now)
            return decided
        with cluster.trial():
            for count, operation in enumerate(decided, 1):
                operation.decide(cluster, now)
                if time.monotonic() > ends_at:
                    return decided[:count]
                if operation is not decided[-1]:  # the last needs no trial, and an inventory allows none
                    for change in operation.changes:
                        cluster.apply(change)
        return decided

    def _time_checked(self, cluster: ClusterState) -> float:
        """Return the time on the store's clock, after a look at whether it jumped."""
        now, jump = self.store.now(), self.store.clock_jump
        new_jump = self._recovery.note_jump(cluster, now, jump)
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
        own = [operation for operation in group if isinstance(operation, _Expirations)]
        if due:
            _log(cluster, due)
            own = own or [_Expirations(self)]
        if not own:
            return group
        own[0].due = due
        return [*own, *(operation for operation in group if operation not in own)]

    @contextmanager
    def _locked(self, deadline: float, meanwhile: Meanwhile = nothing) -> Iterator[Lock]:
        """Hold the store's lock; raises `LockTimeoutError` at the deadline."""
        started = time.monotonic()
        lock = self.store.lock(self._replica.cluster if self._replica.is_stored else None)
        if not lock.acquire(max(deadline - started, 0.0), meanwhile):
            raise LockTimeoutError(self._lock_timeout_s)
        self._contended = lock.waited
        self._measured("lock_wait_s", time.monotonic() - started)
        try:
            yield lock
        finally:
            try:
                lock.release()
            except ResourceManagerError as error:  # harmless: the commit is decided
                logger.warning("the lock could not be released and will expire: %s", error)

    def _measured(self, name: str, value: float) -> None:
        if self.observer is not None:
            self.observer.measured(name, value)


def _log(cluster: ClusterState, due: Sequence[Change]) -> None:
    for change in due:
        if isinstance(change, Preempting) and not change.preemptor:
            logger.warning("its preemption is taken back: %s", name_in(cluster, change.lease_id))
        elif isinstance(change, Preempting):
            winner = name_in(cluster, preemptor_in_words(change.preemptor))
            why = lease_limits.in_words(change.preemptor, winner)
            logger.warning("%s: %s", why, name_in(cluster, change.lease_id))
    late = [name_in(cluster, each.lease_id) for each in due if isinstance(each, Expired | Quarantined)]
    if late:
        logger.warning("not renewed in time: %s", ", ".join(late))


def _answer(operation: Operation[T]) -> T:
    if operation.error is not None:
        raise operation.error
    return operation.answer  # type: ignore[return-value]


class _Expirations(Operation[None]):
    """The operation that ends what is due; the leases are named before a trial, which hides the heap."""

    __slots__ = ("due",)

    def __init__(self, transactions: Transactions) -> None:
        super().__init__(
            lambda cluster, now: allocator.with_dispatch(
                cluster, self.due, transactions.deciding(cluster, now)
            ),
            lambda cluster, now: None,
            by="",
        )
        self.due: Sequence[Change] = ()
