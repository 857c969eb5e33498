"""Groups: operations of concurrent threads that one of them, the leader, carries out together."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from resource_manager.core.changes import Change
from resource_manager.core.cluster import ClusterState
from resource_manager.errors import LockTimeoutError
from resource_manager.storage.once import Once

T = TypeVar("T")

Step = Callable[[ClusterState, float], list[Change]]
"""(state, now) -> the changes to make; it may raise, and must not change the state."""

Reader = Callable[[ClusterState, float], T]
"""(state, now) -> an answer; it must not change the state."""


@dataclass(frozen=True, slots=True)
class Repeatable(Generic[T]):
    """An idempotency key with what a repeat needs: the store keeps `refer(changes)`, a value of JSON.

    `answer` returns the answer to the repeat from that reference and the state as of now.
    """

    key: Once
    refer: Callable[[Sequence[Change]], Any]
    answer: Callable[[ClusterState, float, Any], T]


class Operation(Generic[T]):
    """One caller's step, its changes, and the answer that its reader gave on the state right after them.

    `stored` is what the store had under its idempotency key, if the change had been made before.
    """

    __slots__ = ("answer", "changes", "done", "error", "once", "reader", "step", "stored")

    def __init__(self, step: Step, reader: Reader[T], once: Repeatable[T] | None = None) -> None:
        self.step = step
        self.reader = reader
        self.once = once
        self.stored: str | None = None
        self.changes: list[Change] = []
        self.answer: T | None = None
        self.error: Exception | None = None
        self.done = False

    def decide(self, cluster: ClusterState, now: float) -> None:
        """Call the step; its error is the caller's, not the group's."""
        self.error = None
        self.changes = []
        try:
            self.changes = self.step(cluster, now)
        except Exception as error:
            self.error = error

    def finish(self, cluster: ClusterState, now: float) -> None:
        """Apply the committed changes to the replica and call the reader."""
        for change in self.changes:
            cluster.apply(change)
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
    """The operations that arrived, and the mutex that makes one thread the leader of all of them.

    `lead` carries a group out: it marks each operation done, with its answer or error.
    """

    def __init__(self, lead: Callable[[list[Operation[Any]], float], None]) -> None:
        self.mutex = threading.Lock()
        self._lead = lead
        self._arrived: deque[Operation[Any]] = deque()

    def carry_out(self, operation: Operation[T], timeout_s: float, *, exclusive: bool = False) -> None:
        """Return when the operation is done, by this thread or another; raises `LockTimeoutError`.

        `exclusive` keeps a step out of groups that cannot be applied on trial (an inventory).
        """
        deadline = time.monotonic() + timeout_s
        try:
            if not exclusive:
                self._arrived.append(operation)
            if not self.mutex.acquire(timeout=timeout_s):
                try:
                    self._arrived.remove(operation)
                except ValueError:
                    self.mutex.acquire()  # another thread is deciding this operation: its answer counts
                else:
                    raise LockTimeoutError(timeout_s)
            try:
                if not operation.done:
                    self._carry_out_group(operation, [operation] if exclusive else self._take(), deadline)
            finally:
                self.mutex.release()
        except BaseException:
            # This thread is being stopped: without a caller, no other thread may carry out its operation.
            with suppress(ValueError):
                self._arrived.remove(operation)
            raise

    def _take(self) -> list[Operation[Any]]:
        group = []
        while self._arrived:
            group.append(self._arrived.popleft())
        return group

    def _carry_out_group(self, mine: Operation[Any], group: list[Operation[Any]], deadline: float) -> None:
        try:
            self._lead(group, deadline)
        except Exception as error:
            for operation in group:
                if not operation.done:
                    operation.fail(error)
        except BaseException:
            # This thread is being stopped; the others' operations were not carried out: they come again.
            left = [operation for operation in group if operation is not mine and not operation.done]
            self._arrived.extendleft(reversed(left))
            raise
