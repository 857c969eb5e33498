"""Triggers that wait for a grant, for free GPUs, for the end of a lease, and for the manager to answer."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from typing import Any

from airflow.triggers.base import TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION, is_outage
from resource_manager.airflow.shared_manager import SharedManager
from resource_manager.airflow.task_trigger import base
from resource_manager.airflow.task_trigger.base import PlainTrigger, TaskBoundTrigger
from resource_manager.airflow.task_trigger.events import Event, GrantEvent, GrantState, Vacancy
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.wait_log import WaitLog, describe_vacancy, describe_waiting
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import InvalidRequestError, NeverFitsError, ResourceManagerError
from resource_manager.jobs.gang_job import GangJob


class GrantWait:
    """Wait for the grant of one request, with its lines in the log of a trigger and its reasons.

    It began `before_s` after the request's arrival.
    """

    def __init__(
        self, trigger: TaskBoundTrigger, max_wait_s: float | None = None, before_s: float = 0.0
    ) -> None:
        self._trigger = trigger
        self._log = WaitLog()
        self._max_wait_s = max_wait_s
        self.before_s = before_s
        self.waited_s = 0.0
        self.fencing_token = 0
        """Of the lease, once it is granted."""

    @property
    def reasons(self) -> list[str]:
        return self._log.reasons

    async def until_over(self) -> GrantState:
        """Return how the wait ended."""
        trigger, clock = self._trigger, asyncio.get_running_loop().time
        while True:
            try:
                status = await trigger.shared.status_of(trigger.identity.lease_id)
            except (ResourceManagerError, AirflowException) as error:
                trigger.log.warning("the GPU manager does not answer; still waiting: %s", error)
                await asyncio.sleep(base.OUTAGE_POLL_S)
                continue
            if status is None:
                return GrantState.REQUEST_LOST
            if status["state"] != "WAITING":
                self.fencing_token = status["fencing_token"]
                if status["queued_at"] is not None:
                    self.waited_s = max(status["granted_at"] - status["queued_at"] - self.before_s, 0.0)
                return GrantState.GRANTED
            self.waited_s = max(status["waited_s"] - self.before_s, 0.0)
            line = describe_waiting(status)
            if self._log.due(status["kind"], status["reason"], line, clock()):
                trigger.log.info("%s", line)
            if self._max_wait_s is not None and self.waited_s >= self._max_wait_s:
                return GrantState.MAX_WAIT_EXCEEDED
            await asyncio.sleep(base.POLL_S)


class GrantTrigger(TaskBoundTrigger):
    """Fire a `GrantEvent` when the lease is granted, the request is gone, or `max_wait_s` is over."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        gpu_conn_id: str = DEFAULT_CONNECTION,
        max_wait_s: float | None = None,
    ) -> None:
        super().__init__(identity, gpu_conn_id, max_wait_s=max_wait_s)
        self.max_wait_s = max_wait_s

    async def run(self) -> AsyncIterator[TriggerEvent]:
        wait = GrantWait(self, self.max_wait_s)
        state = await wait.until_over()
        event = GrantEvent(state=state, waited_s=wait.waited_s, reasons=wait.reasons)
        is_granted = state is GrantState.GRANTED
        yield await (self._hand_over(wait.fencing_token, event) if is_granted else self._fire(event))

    async def on_kill(self) -> None:
        await self.end_unless_wanted()


class FreeCapacityTrigger(PlainTrigger):
    """Fire a `Vacancy` when the request would be granted at once, or no server can ever fit it.

    It allocates nothing.
    """

    def __init__(
        self,
        arguments: Mapping[str, Any],
        gpu_conn_id: str = DEFAULT_CONNECTION,
        poke_interval_s: float = 5.0,
    ) -> None:
        super().__init__(arguments=dict(arguments), gpu_conn_id=gpu_conn_id, poke_interval_s=poke_interval_s)
        self.arguments = dict(arguments)
        self.gpu_conn_id = gpu_conn_id
        self.poke_interval_s = poke_interval_s

    async def run(self) -> AsyncIterator[TriggerEvent]:
        yield await self._fire(await self._vacancy())

    async def _vacancy(self) -> Event:
        shared = SharedManager.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        log = WaitLog()
        while True:
            try:
                answer = await shared.call(lambda manager: manager.explain(**self.arguments))
                if answer["would_be_granted"]:
                    return Vacancy(server_name=answer["server_name"], reasons=log.reasons)
                if answer["kind"] == RefusalKind.NEVER_FITS:
                    raise NeverFitsError(answer["reason"])
                line = describe_vacancy(answer)
                if log.due(answer["kind"], answer["reason"], line, clock()):
                    self.log.info("%s", line)
            except InvalidRequestError as error:  # the inventory may have changed since the task asked
                return Vacancy(detail=str(error), reasons=log.reasons)
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
            await asyncio.sleep(self.poke_interval_s)


class LeaseEndTrigger(TaskBoundTrigger):
    """Fire when the lease with this fencing token has ended, or its job is seen to be gone at its place."""

    def __init__(
        self, identity: Mapping[str, Any], fencing_token: int, gpu_conn_id: str = DEFAULT_CONNECTION
    ) -> None:
        super().__init__(identity, gpu_conn_id, fencing_token=fencing_token)
        self.fencing_token = fencing_token

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while await self._is_there():
            await asyncio.sleep(base.OUTAGE_POLL_S)
        yield await self._fire({})

    async def _is_there(self) -> bool:
        try:
            status = await self.shared.status_of(self.identity.lease_id)
            if status is None or status.get("fencing_token") != self.fencing_token:
                return False
            gang = GangJob.of(status)
            return gang is None or not await self.begin_launcher(gang.is_gone)
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("it is unknown whether the lease has ended; still waiting: %s", error)
            return True


class AnswerTrigger(PlainTrigger):
    """Fire with the given event once the manager answers."""

    def __init__(self, event: Mapping[str, Any], gpu_conn_id: str = DEFAULT_CONNECTION) -> None:
        super().__init__(event=dict(event), gpu_conn_id=gpu_conn_id)
        self.event = dict(event)
        self.gpu_conn_id = gpu_conn_id

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while not await self._is_answered():
            await asyncio.sleep(base.OUTAGE_POLL_S)
        yield await self._fire(self.event)

    async def _is_answered(self) -> bool:
        try:
            await SharedManager.of(self.gpu_conn_id).status_of("")
        except (ResourceManagerError, AirflowException) as error:
            return not is_outage(error)  # the task fails by any other error itself
        return True
