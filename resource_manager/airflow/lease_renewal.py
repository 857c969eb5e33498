"""Renewal of the lease of a task that works in its own process, which ends before its lease does."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from resource_manager.airflow.task_trigger.base import POLL_S, renewal_pause_s
from resource_manager.airflow.worker_guard import end_this_process, tell_this_process
from resource_manager.errors import LeaseNotFoundError
from resource_manager.jobs.job_preemption import grace_of
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.patience import patiently
from resource_manager.manager.recorded_changes import LEASE_GONE
from resource_manager.manager.results import Allocation

HELD_FOR = 0.75
"""Part of its ttl for which a lease counts as held since its last renewal; then what uses it is ended."""

PATIENCE_S = 120.0
"""Time for which a worker asks again at the begin and the end of its work if the manager does not answer."""


class PreemptionNotice:
    """What a task is told of its lease that is taken, by the `tell` of `kept_alive`."""

    def __init__(self, tell: Callable[[Allocation], float | None]) -> None:
        self.taken_until = math.inf
        """When the task is ended, by the clock of `kept_alive`."""
        self._tell = tell
        self._is_told = False

    def give(self, lease: Allocation, renewed_at: float) -> bool:
        """Tell the task if its lease, renewed then, is taken; return whether it is to be told again soon."""
        if self._is_final():
            return False
        if not self._is_told:
            if not lease["preempted_by"]:
                self.taken_until = math.inf  # it may have been taken back
                return False
            if self.taken_until == math.inf:
                says = f"the lease is {lease['reason']}; this task has"
                print(f"{says} {grace_of(lease):.1f} s to save what it did", flush=True)
        left_s = self._tell(lease)
        if left_s is None:
            self.taken_until = min(self.taken_until, renewed_at + grace_of(lease))
        else:
            self.taken_until, self._is_told = renewed_at + left_s, True
        return not self._is_final()

    def _is_final(self) -> bool:
        return self._is_told and self.taken_until < math.inf


@dataclass(eq=False)
class LeaseRenewal:
    """Renewals of a lease every `every_s` until `over` is set; `end` ends this process if it has to end."""

    ask: Callable[[], Allocation]
    every_s: float
    notice: PreemptionNotice
    clock: Callable[[], float]
    end: Callable[[str], None]

    def __post_init__(self) -> None:
        self.over = threading.Event()
        self._renewed_at = self.clock()
        self._problem = "no answer"

    def renew(self) -> Allocation:
        """Renew the lease, which then lives from the time of this call."""
        asked_at = self.clock()
        lease = self.ask()
        self._renewed_at = asked_at
        return lease

    def keep(self) -> None:
        """Renew the lease until it is lost, one of its GPUs fails, or the grace of its preemption is over."""
        notice, pause_s = self.notice, self.every_s
        while not self.over.wait(min(pause_s, max(notice.taken_until - self.clock(), 0.0))):
            if self.clock() >= notice.taken_until:
                self.end("the lease was taken, and the time to save is over")
                return
            try:
                lease = self.renew()
                if self.over.is_set():
                    return
                if lease["gpu_failed"]:
                    self.end(f"one of its GPUs failed: {lease['gpu_failed']}")
                    return
                again = notice.give(lease, self._renewed_at)
                pause_s = min(self.every_s, POLL_S) if again else self.every_s
            except LeaseNotFoundError:
                if not self.over.is_set():  # otherwise this process itself released the lease meanwhile
                    self.end(LEASE_GONE)
                return
            except Exception as error:  # any failure to renew lets the lease expire
                self._problem, pause_s = str(error), self.every_s / 4

    def end_in_time(self, held_s: float) -> None:
        """End this process once the lease was not renewed for that long.

        In a thread of its own: a renewal may wait for its answer until after the lease has expired.
        """
        while not self.over.wait(max(self._renewed_at + held_s - self.clock(), 0.0)):
            if self.clock() - self._renewed_at >= held_s:
                self.end(f"the lease could not be renewed: {self._problem}")
                return


@contextmanager
def kept_alive(
    manager: LeaseService,
    lease_id: str,
    token: int,
    ttl_s: float,
    *,
    grace_s: float = math.inf,
    ends_in_time: bool = True,
    clock: Callable[[], float] = time.monotonic,
    end: Callable[[str], None] = end_this_process,
    tell: Callable[[Allocation], float | None] = tell_this_process,
) -> Iterator[None]:
    """Renew the lease while the block runs; kill this process and its children before it expires.

    Of a lease that is taken `tell` tells first, by a signal to this process, and returns the seconds until it
    is killed. One that returns infinity is called again until the block is over, and ends what runs itself;
    so is one that returns None, as nothing runs: this process has the grace, unless the taking is taken back.
    Without `ends_in_time` they live on where the manager does not answer, as for a lease that is quarantined
    instead of expiring; they are killed only once the lease is lost or one of its GPUs has failed.
    """
    renewal = LeaseRenewal(
        lambda: manager.renew(lease_id, fencing_token=token),
        renewal_pause_s(ttl_s / 4, grace_s),
        PreemptionNotice(tell),
        clock,
        end,
    )
    patiently(renewal.renew, PATIENCE_S)  # nothing runs yet that would have to end in time
    held_s = HELD_FOR * ttl_s
    guard = threading.Thread(target=renewal.end_in_time, args=(held_s,), name="gpu-lease-end", daemon=True)
    if ends_in_time:
        guard.start()
    threading.Thread(target=renewal.keep, name="gpu-lease", daemon=True).start()
    try:
        yield
    finally:
        renewal.over.set()
        if ends_in_time:
            guard.join()  # it must not kill the process after the block has ended
