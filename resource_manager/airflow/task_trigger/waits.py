"""Triggers that wait for a grant, for free GPUs, for the end of a lease, and for the manager to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from airflow.triggers.base import TriggerEvent

from resource_manager import errors
from resource_manager.airflow import shared_manager
from resource_manager.airflow.task_trigger import base
from resource_manager.airflow.task_trigger.base import PlainTrigger, TaskBoundTrigger
from resource_manager.airflow.task_trigger.events import Event, GrantEvent, GrantState, Vacancy
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.wait_log import DeadlineLog, WaitLog, describe_vacancy, describe_waiting
from resource_manager.core.refusal import RefusalKind
from resource_manager.jobs.gang_job import GangJob
from resource_manager.manager.agent_jobs import ask_agents_through
from resource_manager.manager.results import Allocation, QueueEntry


class GrantWait:
    """Wait for the grant of one request, with its lines in the log of a trigger and its reasons."""

    def __init__(self, trigger: TaskBoundTrigger, max_wait_s: float | None) -> None:
        self._trigger = trigger
        self._log = WaitLog()
        self._deadline = DeadlineLog(trigger.log)
        self._max_wait_s = max_wait_s
        self.before_s = 0.0
        """From the arrival of the request to the begin of this wait."""
        self.waited_s = 0.0
        self.fencing_token = 0
        """Of the lease, once it is granted."""

    @property
    def reasons(self) -> list[str]:
        return self._log.reasons

    async def until_over(self) -> GrantState:
        """Return how the wait ended."""
        trigger, lease_id = self._trigger, self._trigger.identity.lease_id
        changed, is_new = asyncio.Event(), True
        with trigger.shared.watching(lease_id, changed):
            while True:
                changed.clear()
                try:
                    if is_new:
                        await trigger.shared.catch_up(lease_id)
                        is_new = False
                    lease = trigger.shared.known(lease_id)
                    entry = await trigger.shared.waiting(lease_id, changed) if lease is None else None
                except (errors.ResourceManagerError, AirflowException) as error:
                    trigger.log.warning("the GPU manager does not answer; still waiting: %s", error)
                    await asyncio.sleep(base.OUTAGE_POLL_S)
                    continue
                if lease is not None:
                    self.fencing_token = lease["fencing_token"]
                    self.until_granted(lease)
                    return GrantState.GRANTED
                if entry is not None and self._is_too_long(entry):
                    return GrantState.MAX_WAIT_EXCEEDED
                if changed.is_set():
                    continue
                if not trigger.shared.is_waiting(lease_id):
                    return GrantState.REQUEST_LOST
                await trigger.shared.until_set(changed, self._pause_s(is_known=entry is not None))

    def in_short(self) -> dict[str, Any]:
        """Return the wait as it is in the event of the task's end."""
        return {"waited_s": self.waited_s, "reasons": self.reasons}

    def until_granted(self, lease: Allocation) -> dict[str, Any]:
        """Return the wait for a lease, which may be granted before anybody looked; empty if none was seen."""
        if lease["queued_at"] is not None:
            self.waited_s = max(lease["granted_at"] - lease["queued_at"] - self.before_s, 0.0)
        return self.in_short() if self.waited_s else {}

    def _is_too_long(self, entry: QueueEntry) -> bool:
        """Say in the log why the request waits; return whether it has for longer than it may."""
        self.waited_s = max(entry["waited_s"] - self.before_s, 0.0)
        line = describe_waiting(entry)
        if self._log.due(entry["kind"], entry["reason"], line, asyncio.get_running_loop().time()):
            self._trigger.log.info("%s", line)
        self._deadline.see(entry)
        return self._max_wait_s is not None and self.waited_s >= self._max_wait_s

    def _pause_s(self, *, is_known: bool) -> float:
        """Return the time until the next look at why the request waits, and whether for too long."""
        pause_s = shared_manager.REASONS_EVERY_S if is_known else shared_manager.NEW_REASON_S
        if is_known and self._max_wait_s is not None:
            pause_s = min(pause_s, max(self._max_wait_s - self.waited_s, 0.01))
        return pause_s


@dataclass(eq=False, repr=False)
class GrantTrigger(TaskBoundTrigger):
    """Fire a `GrantEvent` when the lease is granted, the request is gone, or `max_wait_s` is over."""

    max_wait_s: float | None = None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        wait = GrantWait(self, self.max_wait_s)
        state = await wait.until_over()
        event = GrantEvent(state=state, waited_s=wait.waited_s, reasons=wait.reasons)
        is_granted = state is GrantState.GRANTED
        yield await (self._hand_over(wait.fencing_token, event) if is_granted else self._fire(event))

    async def on_kill(self) -> None:
        await self.end_unless_wanted()


@dataclass(eq=False, repr=False)
class FreeCapacityTrigger(PlainTrigger):
    """Fire a `Vacancy` when the request would be granted at once, or no server can ever fit it.

    It allocates nothing. A priority that `is_weight`, Airflow's own, is cut to what the cluster allows.
    """

    arguments: dict[str, Any]
    poke_interval_s: float = 5.0
    is_weight: bool = False

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield await self._fire(await self._vacancy())

    async def _vacancy(self) -> Event:
        clock = asyncio.get_running_loop().time
        log = WaitLog()
        while True:
            try:
                answer = await self.shared.explain(self.arguments)
                if answer["would_be_granted"]:
                    return Vacancy(server_name=answer["server_name"], reasons=log.reasons)
                if answer["kind"] == RefusalKind.NEVER_FITS:
                    raise errors.NeverFitsError(answer["reason"])
                line = describe_vacancy(answer)
                if log.due(answer["kind"], answer["reason"], line, clock()):
                    self.log.info("%s", line)
            except errors.NoServersError as error:
                self.log.warning("still waiting: %s", error)
            except errors.InvalidRequestError as error:  # the cluster may have changed since the task asked
                if self.is_weight and isinstance(error, errors.PriorityError):
                    self.arguments = {**self.arguments, "priority": error.most}
                    continue
                return Vacancy(detail=str(error), reasons=log.reasons)
            except (errors.ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
            await asyncio.sleep(self.poke_interval_s)


@dataclass(eq=False, repr=False)
class LeaseEndTrigger(TaskBoundTrigger):
    """Fire when the lease with this fencing token has ended, or its job is seen to be gone at its place."""

    fencing_token: int
    _is_read = False

    async def run(self) -> AsyncIterator[TriggerEvent]:
        ask_agents_through(self.shared.service)
        changed = asyncio.Event()
        thread = ThreadPoolExecutor(1, "gpu-look")  # a silent server may occupy it for as long as it likes
        with self.shared.watching(self.identity.lease_id, changed):
            while await self._is_there(changed, thread):
                await self.shared.until_set(changed, base.OUTAGE_POLL_S)
        yield await self._fire({})

    async def _is_there(self, changed: asyncio.Event, thread: ThreadPoolExecutor) -> bool:
        lease_id = self.identity.lease_id
        changed.clear()
        try:
            if not self._is_read:
                await self.shared.catch_up(lease_id)
                self._is_read = True
            status = self.shared.known(lease_id)
            if status is None or status["fencing_token"] != self.fencing_token:
                return False
            gang = GangJob.of(status)
            return gang is None or not await self.begin_launcher(gang.is_gone, threads=thread)
        except (errors.ResourceManagerError, AirflowException) as error:
            self.log.warning("it is unknown whether the lease has ended; still waiting: %s", error)
            return True


@dataclass(eq=False, repr=False)
class AnswerTrigger(PlainTrigger):
    """Fire with the given event once the manager answers, after `pause_s` at the earliest."""

    event: dict[str, Any]
    pause_s: float = 0.0

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(self.pause_s)
        while not await self._is_answered():
            await asyncio.sleep(base.OUTAGE_POLL_S)
        yield await self._fire(self.event)

    async def _is_answered(self) -> bool:
        try:
            await self.shared.call(lambda manager: manager.preempting())
        except (errors.ResourceManagerError, AirflowException) as error:
            return not errors.is_outage(error)  # the task fails by any other error itself
        return True
