"""Steps and readers that are run against a store: with a replica, in groups, once, in a recovery window."""

from __future__ import annotations

import json
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from resource_manager import errors
from resource_manager.core.changes import Change, MembersReleased, Quarantined, Queued, Released, Renewed
from resource_manager.core.cluster import ClusterState, Snapshot
from resource_manager.core.refusal import Grounds, misconfigured, recovering
from resource_manager.manager.commit.asking import Step, asking
from resource_manager.manager.commit.group import Operation, Reader, Repeatable
from resource_manager.manager.commit.group_commits import Expirations, GroupCommits
from resource_manager.manager.commit.job_ends import ends_of_jobs
from resource_manager.manager.commit.recovery import Recovery
from resource_manager.manager.commit.replica import Replica
from resource_manager.manager.commit.rules import RuleBook
from resource_manager.scheduling import allocator
from resource_manager.scheduling.accounting.decayed_use import uses_after
from resource_manager.scheduling.scheduling_pass import SchedulingPass
from resource_manager.storage import Store
from resource_manager.storage.jobs import JobRow, merged
from resource_manager.storage.once import Once

T = TypeVar("T")


Observer = Callable[[str, float], None]
"""Receiver of values of `lock_wait_s`, `commit_s`, `commit_conflicts` (1 each) and `clock_jump_s`.

It must be quick and must not raise.
"""


class Transactions:
    """Runner of steps against a store; thread-safe.

    Pending requests are scheduled, whenever leases expire, by policy and order of the state's settings. `by`
    asks where nobody says who does.
    """

    def __init__(self, store: Store, lock_timeout_s: float, by: str = "") -> None:
        self.store = store
        self.by = by
        self.observer: Observer = lambda name, value: None
        self.read_elsewhere: Callable[[Reader[Any]], Any] | None = None
        """Answers reads of the newest state with another replica: so they delay no decision."""
        self.distrusted: Grounds | None = None
        """The reason for which this process grants nothing on the state as it is; None if it trusts it."""
        self._rules = RuleBook()
        self._lock_timeout_s = lock_timeout_s
        self._recovery = Recovery(store)
        self.begin()
        _open.add(self)

    def begin(self) -> None:
        """Begin without a replica, as in a forked child: no thread there ends what it began in the parent."""
        self._replica = Replica(self.store)
        self._commits = GroupCommits(
            self.store, self._replica, self._recovery, self._lock_timeout_s, self.deciding, self._measured
        )
        self._groups = self._commits.groups

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
        suspended = self._in_recovery(cluster, now) or self._grants_nothing(cluster)
        return self._rules.of(cluster).at(now, suspended)

    def resuming(self, cluster: ClusterState, now: float) -> SchedulingPass:
        """Return the circumstances once grants resume, for an outlook on what starts then."""
        return self._rules.of(cluster).at(now + max(self._recovery.remaining_s(now), 0.0))

    def _in_recovery(self, cluster: ClusterState, now: float) -> Grounds | None:
        window = self._recovery.window(cluster, now)
        return None if window is None else recovering(window)

    def misconfigured(self, cluster: ClusterState) -> Grounds | None:
        """Return why this process can grant nothing in that state, or not all that fits; None if it can."""
        return self._grants_nothing(cluster) or self._rules.refusal(cluster)

    def _grants_nothing(self, cluster: ClusterState) -> Grounds | None:
        return self.distrusted or (None if cluster.nodes else misconfigured(errors.NO_SERVERS))

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
        may_retry: Callable[[ClusterState], bool] | None = None,
        lease_id: str | None = None,
        max_age_s: float = 0.0,
        jobs: Sequence[JobRow] = (),
    ) -> T:
        """Decide, commit and return the answer of `reader` on the state right after.

        `exclusive` keeps a step out of groups that cannot be applied on trial (an inventory). With `once`
        the changes are made only if none were made under that key. A step without changes of which
        `may_retry` is true is decided again for `LOOK_AGAIN_S` under contention; that there are none may be
        decided on a state of `max_age_s` ago. A step about `lease_id` alone, whose fencing token the caller
        has, is carried out on a state that a newer version wrote, too. `jobs` are stored with the changes.
        Raises the step's errors, `LockTimeoutError`, `StoreError`, and `IdempotencyKeyError`.
        """
        by = self.by
        if (who := asking()) is not None:
            by, step = who.by, who.noting(step)
        operation = Operation(step, reader, by, once, may_retry, max_age_s, jobs)
        try:
            if once is not None and (reference := self.store.recall(once.key)) is not None:
                return self._answer_again(once, reference)
            self._groups.carry_out(operation, self._lock_timeout_s, exclusive=exclusive)
            if isinstance(operation.error, errors.NewerFormatError):
                raise operation.error
        except errors.NewerFormatError:
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
        with self._groups.mutex, self._commits.locked(deadline) as lock:
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
            keys = [] if once is None else [(once.key, json.dumps(once.refer(changes, cluster, now)))]
            try:
                uses = uses_after(cluster, changes)
                rows = merged([*operation.jobs, *ends_of_jobs(cluster, changes)]) if changes else []
                self.store.commit(
                    cluster.version, changes, now=now, lock=lock, once=keys, uses=uses, jobs=rows
                )
            except errors.RepeatedError as error:
                assert once is not None
                return once.answer(cluster, now, json.loads(once.key.reference_in(error.stored)))
        cluster.apply(*changes)
        return operation.reader(cluster, now)

    def expire_and_schedule(self) -> list[Change]:
        """Expire leases that are due and grant pending requests that fit; return the changes."""
        operation = Expirations(self.deciding)
        self._groups.carry_out(operation, self._lock_timeout_s)
        _answer(operation)
        self._recovery.report_watching(self.store.now())
        return operation.changes

    def read(self, reader: Reader[T], max_age_s: float = 0.0) -> T:
        """Return the answer of `reader` on the state as of now, or of at most `max_age_s` ago."""
        if self.read_elsewhere is not None and not max_age_s:
            return cast(T, self.read_elsewhere(reader))
        asked_at = time.monotonic()
        with self._groups.mutex, self._replica:
            return reader(self._replica.as_of(asked_at, max_age_s), self.store.now())

    def explain(self, reader: Reader[T]) -> T:
        """Return the answer of a reader that takes long, on a state no older than this process's last change.

        Where a service has another replica for readers it delays no decision.
        """
        return self.read(reader, math.inf if self.read_elsewhere is None else 0.0)

    def lost(self, leases: Sequence[tuple[str, int | None]]) -> list[bool]:
        """Return of each lease, by id and token, whether the state lacks it that took the place of its own.

        This process grants nothing there, but one that starts now does.
        """
        try:
            cluster = self.store.refresh(None)
        except errors.StateReplacedError:
            return [True] * len(leases)
        except errors.StoreError:
            cluster = None
        if cluster is None:
            return [False] * len(leases)
        present = ((cluster.leases.get(lease_id), token) for lease_id, token in leases)
        return [lease is None or token not in (None, lease.fencing_token) for lease, token in present]

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
            except errors.InvalidRequestError:
                pass
        return self.read(reader)

    def initialise(self, first: Snapshot) -> bool:
        """Write that state to an empty store; return False if it is not empty."""
        with self._groups.mutex, self._replica:
            self._replica.refresh()
            if self._replica.is_stored:
                return False
            done = self._replica.initialise(first)
            self._replica.drop()
            return done

    def replace(self, snapshot: Snapshot, once: Once | None = None) -> None:
        """Replace the state by that one, under the lock, if it was not done under that idempotency key.

        Raises `LockTimeoutError` and `IdempotencyKeyError`.
        """
        deadline = time.monotonic() + self._lock_timeout_s
        with self._groups.mutex, self._commits.locked(deadline) as lock:
            try:
                self.store.replace(snapshot, lock=lock, once=[] if once is None else [(once, "null")])
            except errors.RepeatedError as error:
                assert once is not None
                once.reference_in(error.stored)
            self._replica.drop()

    def _answer_again(self, once: Repeatable[T], reference: str) -> T:
        return self.read(lambda cluster, now: once.answer(cluster, now, json.loads(reference)))

    def _measured(self, name: str, value: float) -> None:
        self.observer(name, value)


def _answer(operation: Operation[T]) -> T:
    if operation.error is not None:
        raise operation.error
    return operation.answer  # type: ignore[return-value]


_open: weakref.WeakSet[Transactions] = weakref.WeakSet()


def _in_forked_child() -> None:
    for transactions in list(_open):
        transactions.begin()


os.register_at_fork(after_in_child=_in_forked_child)
