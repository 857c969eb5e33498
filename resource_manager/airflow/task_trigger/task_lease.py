"""Lease of a task in its trigger: what asks manager and launchers for it, and outlasts outages."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, TypeVar

from resource_manager.airflow.task_demand import is_of, submit
from resource_manager.airflow.task_state import is_wanted
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger, renewal_pause_s
from resource_manager.airflow.task_trigger.plan import TaskPlan
from resource_manager.airflow.version_compat import AirflowException, in_thread
from resource_manager.core.changes import Outcome
from resource_manager.core.models import JobPlace
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError, StateLostError
from resource_manager.jobs import reconcile
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.job_preemption import STEP_S, queue_again
from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError
from resource_manager.jobs.reconcile import ActionKind
from resource_manager.manager.commit.asking import asked_by
from resource_manager.manager.lease_service import LeaseService
from resource_manager.manager.recorded_changes import ended_by_others
from resource_manager.manager.results import Allocation, QueueEntry, Submission

T = TypeVar("T")

ATTEMPT_LABEL = "start_attempt"
"""Label of a gang's lease with the number of the attempt to start it, from the second on."""


STOPPER_S = 2.0
"""Longest time between the end of a job that somebody stopped and the release of its lease by them."""


class TaskLease:
    """Lease of a trigger's task; it is renewed while launchers are called."""

    def __init__(self, trigger: TaskBoundTrigger, plan: TaskPlan) -> None:
        self._trigger, self._plan = trigger, plan
        self._held: Allocation | None = None
        self._asked = 1
        """Last attempt for which the task has asked: in its worker for the first; 0 after its own release."""
        self.was_gone = False
        """Whether somebody else ended the lease before its release."""
        self._silent = (0, 0.0)
        """Token of the lease on whose servers the start of the job met one out of reach, and since when."""

    @property
    def allocation(self) -> Allocation:
        """The lease, as it was last read."""
        assert self._held is not None
        return self._held

    @allocation.setter
    def allocation(self, lease: Allocation) -> None:
        self._held = lease

    @property
    def token(self) -> int:
        return self.allocation["fencing_token"]

    @property
    def renewal_due_s(self) -> float:
        """Time until a third of the lease's life has passed since it was granted or renewed.

        It was granted before its task left the worker, which took as long as Airflow needs.
        """
        third_s, lease = self._plan.ttl_s / 3, self._held
        if lease is None or lease["expires_at"] is None:
            return renewal_pause_s(third_s)
        return min(max(lease["expires_at"] - 2 * third_s - time.time(), 0.0), renewal_pause_s(third_s))

    def is_still(self, entry: Submission) -> bool:
        """Return whether it is this lease, neither a later one of the task nor its pending request.

        None is before it was read, as by a trigger that finds the end which another one has kept.
        """
        is_read = self._held is not None
        return is_read and entry["state"] != "WAITING" and entry["fencing_token"] == self.token

    async def request(self, status: Submission | None, attempt: int) -> Submission:
        """Return the task's lease or pending request, which is `status`; ask again if it was lost.

        Raises `AirflowException` if somebody else ended it: the task asked, and is not to come back.
        """
        if status is not None and not (status["state"] == "ERROR" and status["revoked"]):
            self._asked = attempt
            return status
        if not await in_thread(is_wanted, self._trigger.identity):
            raise AirflowException("the task was ended")
        is_gone = status is None and attempt <= self._asked
        if is_gone and (who := await self.ended_by()):
            raise AirflowException(who)
        demand = self._plan.demand
        if attempt > 1:
            labels = {**demand.labels, ATTEMPT_LABEL: str(attempt)}
            demand = demand.model_copy(update={"labels": labels})
        submitted = await self._with_manager(
            submit, demand, self._trigger.identity, is_weight=self._plan.is_weight
        )
        self._asked = attempt
        return submitted

    async def ended_by(self) -> str:
        """Return who ended the lease or request, which is gone; empty if it is unknown."""
        lease_id = self._trigger.identity.lease_id
        return await self._unless_lost(lambda manager: ended_by_others(manager, lease_id)) or ""

    async def wait_for_stopper(self) -> None:
        """Wait a moment for who stopped the job to release the lease: only then it is known who did."""
        ends_at = time.monotonic() + STOPPER_S
        while time.monotonic() < ends_at:
            entry = await self.newest()
            if entry is None or not self.is_still(entry) or entry["state"] == "PREEMPTING":
                return
            await asyncio.sleep(STOPPER_S / 10)

    async def newest(self) -> Submission | None:
        """Return the task's lease or pending request as it is now."""
        identity = self._trigger.identity
        entry = await self._unless_lost(lambda manager: manager.status_of(identity.lease_id))
        return entry if entry is not None and is_of(entry, identity) else None

    async def _unless_lost(self, act: Callable[[LeaseService], T]) -> T | None:
        """Return what the manager answers; None if its store lost the state, which a new request is told."""
        try:
            return await self._trigger.ask(act)
        except StateLostError as error:
            self._trigger.log.error("%s", error)
            return None

    async def pending(self, attempt: int) -> QueueEntry | None:
        """Return the task's pending request as read for all tasks of this triggerer, None if it has none.

        A triggerer that takes over hundreds of tasks asked for each of them before it started a job.
        """
        identity, shared = self._trigger.identity, self._trigger.shared

        async def read() -> QueueEntry | None:
            await shared.catch_up(identity.lease_id)
            return await shared.waiting(identity.lease_id) if shared.is_waiting(identity.lease_id) else None

        entry = await self._trigger.outlast(read)
        if entry is None or not is_of(entry, identity):
            return None
        self._asked = attempt
        return entry

    async def cancel(self, entry: QueueEntry) -> bool:
        """Cancel the pending request; return False if it is gone."""
        lease_id, sequence = entry["task_id"], entry["sequence"]
        return await self._trigger.ask(lambda manager: manager.cancel(lease_id, sequence=sequence))

    async def renew(self) -> Allocation:
        """Renew the lease; raises `LeaseNotFoundError`."""
        return await self._trigger.ask(self._renew)

    def _renew(self, manager: LeaseService) -> Allocation:
        return manager.renew(self.allocation["task_id"], fencing_token=self.token)

    async def outlasts(self, error: LauncherError) -> bool:
        """Renew a lease whose job may run on a server out of reach; False if it has been so for too long."""
        if not (self.allocation["job_places"] and isinstance(error, LauncherUnreachableError)):
            return False
        if self._silent[0] != self.token:
            self._silent = (self.token, time.monotonic())
        if time.monotonic() > self._silent[1] + self._plan.unreachable_s:
            return False
        with suppress(LeaseNotFoundError):  # the next step finds out
            self.allocation = await self.renew()
        return True

    async def place(self, places: Sequence[JobPlace]) -> None:
        """Store where the jobs are about to start; raises `LeaseNotFoundError`."""
        lease_id, token = self.allocation["task_id"], self.token
        self.allocation = await self._trigger.ask(
            lambda manager: manager.place_job(lease_id, places, fencing_token=token)
        )

    async def queue_again(self, gang: GangJob | None, outcome: Outcome = Outcome.PREEMPTED) -> None:
        """End what is left of the jobs, and let the request wait again in its old place."""
        await self._with_manager(queue_again, self.allocation, gang, outcome)

    async def release(self, outcome: Outcome, patience_s: float = 0.0, **why: Any) -> str:
        """End the jobs and the lease; return why the GPUs stay allocated, empty if they do not.

        Where that is because nobody answers for the jobs, it is tried again, at last after `patience_s`.
        """
        ends_at = time.monotonic() + patience_s
        while True:
            done = await self._with_manager(reconcile.end, self.allocation, outcome, **why)
            if done.action is not ActionKind.KEPT or time.monotonic() > ends_at:
                break
            self._trigger.log.warning("%s: %s; trying again", done.name, done.detail)
            with suppress(LeaseNotFoundError):  # the next try finds out
                self.allocation = await self.renew()
            await asyncio.sleep(min(STEP_S, patience_s / 10))
        self.was_gone = done.action is ActionKind.GONE_BEFORE
        if not self.was_gone:
            self._asked = 0
        if done.action is ActionKind.PARTLY_RELEASED:
            self._trigger.log.warning(
                "%s; the GPUs of that member stay allocated until it is gone", done.detail
            )
        if done.action is not ActionKind.KEPT:
            return ""
        return f"{done.name}: {done.detail}; its GPUs stay allocated until it is gone"

    async def launch(self, act: Callable[..., T], *args: Any, **options: Any) -> T:
        """Call launchers in a thread, and renew the lease meanwhile."""
        call = self._trigger.begin_launcher(act, *args, **options)
        due_s = self.renewal_due_s
        while True:
            done, _ = await asyncio.wait({call}, timeout=due_s)
            if done:
                return call.result()
            if self._held is not None:
                # The next step finds out what fails here.
                with suppress(ResourceManagerError, AirflowException), asked_by(self._trigger.identity.by):
                    self._held = await self._trigger.shared.call(self._renew)
            due_s = renewal_pause_s(self._plan.ttl_s / 3)

    async def _with_manager(self, act: Callable[..., T], *args: Any, **options: Any) -> T:
        """Do what asks manager and launchers, as often as it takes until the manager answers."""
        manager = await self._trigger.ask(lambda manager: manager)
        return await self._trigger.outlast(lambda: self.launch(act, manager, *args, **options))
