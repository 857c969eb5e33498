"""Groups: operations of concurrent threads that one of them, the leader, carries out together."""

from __future__ import annotations

import json
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState
from resource_manager.errors import LockTimeoutError
from resource_manager.manager.commit.asking import Step, with_by
from resource_manager.storage.jobs import JobRow
from resource_manager.storage.once import Once

T = TypeVar("T")

Reader = Callable[[ClusterState, float], T]
"""(state, now) -> an answer; it must not change the state."""


@dataclass(frozen=True, slots=True)
class Repeatable(Generic[T]):
    """An idempotency key with what a repeat needs: the store keeps what `refer` returns, a value of JSON.

    `refer` is given the changes, and the state and time on which they were decided. `answer` returns the
    answer to the repeat from that reference and the state as of now.
    """

    key: Once
    refer: Callable[[Sequence[Change], ClusterState, float], Any]
    answer: Callable[[ClusterState, float, Any], T]


@dataclass(eq=False, slots=True)
class Operation(Generic[T]):
    """One caller's step, its changes, and the answer that its reader gave on the state right after them.

    `by` names who asked for it, nobody if empty. `reference` is what the store keeps under its idempotency
    key, as JSON; `stored` is what it had there if the change had been made before. `may_retry` says of a step
    without changes if it may be decided again in a later group; a state of at most `max_age_s` is new enough
    to decide that there are none. `jobs` are stored with its changes, if it makes any. `turn` wakes the
    caller, who sleeps on it; `gone` tells that the caller is not there any more.
    """

    step: Step
    reader: Reader[T]
    by: str
    once: Repeatable[T] | None = None
    may_retry: Callable[[ClusterState], bool] | None = None
    max_age_s: float = 0.0
    jobs: Sequence[JobRow] = ()
    asked_at: float = field(default_factory=time.monotonic, init=False)
    reference: str = field(default="", init=False)
    stored: str | None = field(default=None, init=False)
    changes: list[Change] = field(default_factory=list, init=False)
    answer: T | None = field(default=None, init=False)
    error: Exception | None = field(default=None, init=False)
    done: bool = field(default=False, init=False)
    gone: bool = field(default=False, init=False)
    turn: threading.Lock | None = field(default=None, init=False)

    def decide(self, cluster: ClusterState, now: float) -> None:
        """Call the step; its error is the caller's, not the group's."""
        self.error = None
        self.changes = []
        try:
            changes = self.step(cluster, now)
            if self.by:
                changes = with_by(changes, self.by, cluster.sequence)
            if self.once is not None and changes:
                self.reference = json.dumps(self.once.refer(changes, cluster, now))
        except Exception as error:
            self.error = error
        else:
            self.changes = changes

    def is_refused(self, cluster: ClusterState) -> bool:
        """Return True if the step made no change, and another decision might."""
        if self.changes or self.error is not None or self.may_retry is None:
            return False
        return self.may_retry(cluster)

    def finish(self, cluster: ClusterState, now: float) -> None:
        """Apply the committed changes to the replica and call the reader."""
        cluster.apply(*self.changes)
        if self.error is None:
            try:
                self.answer = self.reader(cluster, now)
            except Exception as error:
                self.error = error
        self.done = True

    def fail(self, error: Exception) -> None:
        """End without effect."""
        self.error = error
        self.done = True


class Groups:
    """The operations that arrived, and the mutex of the thread that leads: it carries out all of them.

    `lead` carries a group out: it marks each operation done, with its answer or error; what it leaves comes
    again, before all newcomers. The first to arrive leads; the others sleep until their operation is done, or
    until it is their turn to lead.
    """

    def __init__(self, lead: Callable[[list[Operation[Any]], float], None]) -> None:
        self.mutex = threading.Lock()
        self._lead = lead
        self._guard = threading.Lock()
        self._arrived: deque[Operation[Any]] = deque()
        self._leader: Operation[Any] | None = None
        self._group: list[Operation[Any]] = []
        self._is_open = False

    def carry_out(self, operation: Operation[T], timeout_s: float, *, exclusive: bool = False) -> None:
        """Return when the operation is done, by this thread or another; raises `LockTimeoutError`.

        `exclusive` keeps a step out of groups that cannot be applied on trial (an inventory).
        """
        deadline = time.monotonic() + timeout_s
        try:
            if not exclusive:
                self._arrive(operation)
                if operation.turn and not operation.turn.acquire(timeout=timeout_s):
                    if self._leave(operation):
                        raise LockTimeoutError(timeout_s)
                    operation.turn.acquire()  # another thread is deciding this operation: its answer counts
            while not operation.done:
                if not self.mutex.acquire(timeout=max(deadline - time.monotonic(), 0.0)):
                    raise LockTimeoutError(timeout_s)
                try:
                    self._carry_out_group(operation, exclusive, deadline)
                finally:
                    self.mutex.release()
        finally:
            # Also if this thread is being stopped: without a caller, nobody may carry out its operation.
            operation.gone = True
            self._leave(operation)

    def newcomers(self) -> list[Operation[Any]]:
        """Take what has arrived meanwhile into the group that is carried out, unless it is exclusive.

        A leader that had to wait for the store's lock decides for all who came during the wait.
        """
        with self._guard:
            came = list(self._arrived) if self._is_open else []
            self._group += came
            if came:
                self._arrived.clear()
        return came

    def _arrive(self, operation: Operation[Any]) -> None:
        with self._guard:
            self._arrived.append(operation)
            if self._leader is None:
                self._leader = operation
            else:
                operation.turn = threading.Lock()
                operation.turn.acquire()

    def _leave(self, operation: Operation[Any]) -> bool:
        """Return whether nobody had taken the operation; if its thread leads, the next one does."""
        with self._guard:
            was_waiting = operation in self._arrived
            if was_waiting:
                self._arrived.remove(operation)
            if self._leader is operation:
                self._leader = self._arrived[0] if self._arrived else None
                if self._leader is not None and self._leader.turn is not None:
                    self._leader.turn.release()
        return was_waiting

    def _carry_out_group(self, mine: Operation[Any], exclusive: bool, deadline: float) -> None:
        self._group, self._is_open = [mine] if exclusive else [], not exclusive
        self.newcomers()
        try:
            self._lead(list(self._group), deadline)
        except Exception as error:
            for operation in self._group:
                if not operation.done:
                    operation.fail(error)
        finally:
            left = [operation for operation in self._group if not operation.done and not operation.gone]
            if left and not exclusive:  # to be decided again, or this thread is being stopped
                with self._guard:
                    self._arrived.extendleft(reversed(left))
            for operation in self._group:
                if operation.done and operation is not mine and operation.turn is not None:
                    operation.turn.release()
