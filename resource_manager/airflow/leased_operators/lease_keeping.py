"""Triggers of operators under leases: one around the operator's own, one that waits for an earlier job."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict, dataclass
from importlib import import_module
from typing import Any

from airflow.triggers.base import BaseTaskEndEvent, BaseTrigger, TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.shared_manager import SharedManager
from resource_manager.airflow.task_trigger.base import PlainTrigger
from resource_manager.airflow.version_compat import AirflowException, in_thread
from resource_manager.core.changes import Outcome
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.task_identity import TaskIdentity

LOOK_EVERY_S = 10.0
"""Time between two looks at the server of an earlier try's job."""


@dataclass(frozen=True, slots=True)
class Resumed:
    """Event of `LeaseKeepingTrigger`: that of the operator's trigger, or why it gave none."""

    fencing_token: int
    event: Any = None
    error: dict[str, Any] | None = None


class LeaseKeepingTrigger(PlainTrigger):
    """Run an operator's own trigger, and renew the lease meanwhile; fire a `Resumed` with its event.

    An event that ends the task releases the lease first.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        fencing_token: int,
        ttl_s: float,
        classpath: str,
        arguments: Mapping[str, Any],
        gpu_conn_id: str = DEFAULT_CONNECTION,
    ) -> None:
        super().__init__(
            identity=dict(identity),
            fencing_token=fencing_token,
            ttl_s=ttl_s,
            classpath=classpath,
            arguments=dict(arguments),
            gpu_conn_id=gpu_conn_id,
        )
        self.identity = TaskIdentity(**identity)
        self.fencing_token = fencing_token
        self.ttl_s = ttl_s
        module, _, name = classpath.rpartition(".")
        self.own: BaseTrigger = getattr(import_module(module), name)(**arguments)
        self.gpu_conn_id = gpu_conn_id

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.own.task_instance, self.own.trigger_id = self.task_instance, self.trigger_id
        first = asyncio.ensure_future(anext(aiter(self.own.run())))
        try:
            while not (await asyncio.wait([first], timeout=self.ttl_s / 4))[0]:
                await self._renew()
            event = first.result()
        except LeaseNotFoundError:
            yield await self._resumed()  # the operator finds that its lease is gone
            return
        except Exception as error:
            lines = traceback.format_exception(error)
            yield await self._resumed(error={"error": "Trigger failure", "traceback": lines})
            return
        finally:
            first.cancel()
        if isinstance(event, BaseTaskEndEvent):
            await self._release(Outcome.SUCCESS if event.task_instance_state == "success" else Outcome.FAILED)
            yield event
        else:
            yield await self._resumed(event=event.payload)

    async def _resumed(self, **found: Any) -> TriggerEvent:
        return await self._fire(asdict(Resumed(self.fencing_token, **found)))

    async def _renew(self) -> None:
        """Renew the lease; raises `LeaseNotFoundError` if it was ended."""
        lease_id, token = self.identity.lease_id, self.fencing_token
        try:
            await SharedManager.of(self.gpu_conn_id).call(
                lambda manager: manager.renew(lease_id, fencing_token=token)
            )
        except LeaseNotFoundError:
            self.log.error("the lease was ended by another client")
            raise
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("the lease could not be renewed, trying again: %s", error)

    async def _release(self, outcome: Outcome) -> None:
        lease_id, token = self.identity.lease_id, self.fencing_token
        try:
            await SharedManager.of(self.gpu_conn_id).call(
                lambda manager: manager.release(lease_id, fencing_token=token, outcome=outcome)
            )
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("the lease was not released and will expire: %s", error)

    async def cleanup(self) -> None:
        await self.own.cleanup()

    async def on_kill(self) -> None:
        if hasattr(self.own, "on_kill"):  # since 3.3
            await self.own.on_kill()


class EarlierJobTrigger(PlainTrigger):
    """Fire when the lease of an earlier try has ended, or its job is seen to be gone at its place."""

    def __init__(
        self, identity: Mapping[str, Any], fencing_token: int, gpu_conn_id: str = DEFAULT_CONNECTION
    ) -> None:
        super().__init__(identity=dict(identity), fencing_token=fencing_token, gpu_conn_id=gpu_conn_id)
        self.identity = TaskIdentity(**identity)
        self.fencing_token = fencing_token
        self.gpu_conn_id = gpu_conn_id

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while not await self._is_over():
            await asyncio.sleep(LOOK_EVERY_S)
        yield await self._fire({})

    async def _is_over(self) -> bool:
        try:
            status = await SharedManager.of(self.gpu_conn_id).status_of(self.identity.lease_id)
            if status is None or status.get("fencing_token") != self.fencing_token:
                return True
            gang = GangJob.of(status)
            return gang is not None and await in_thread(gang.is_gone)
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("it is unknown whether the earlier job has ended: %s", error)
            return False
