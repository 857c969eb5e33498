"""Trigger around that of an operator under a lease."""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import AsyncIterator, Mapping
from contextlib import suppress
from importlib import import_module
from typing import Any

from airflow.triggers.base import BaseTaskEndEvent, BaseTrigger, TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.in_worker import STOP_S
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger
from resource_manager.core.changes import Outcome
from resource_manager.errors import ResourceManagerError


class LeaseKeepingTrigger(TaskBoundTrigger):
    """Run an operator's own trigger, and renew the lease meanwhile; fire its `event`, or the `error` instead.

    The worker and this trigger each renew for `handover_s` before the other takes over. An event that ends
    the task releases the lease first. A GPU that fails is such an error, too, and so is a lease that is lost
    or may not be renewed: what the operator's trigger watches is ended then, as when a user ends the task.
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
            identity,
            gpu_conn_id,
            fencing_token=fencing_token,
            ttl_s=ttl_s,
            classpath=classpath,
            arguments=dict(arguments),
        )
        self.fencing_token = fencing_token
        self.ttl_s = ttl_s
        module, _, name = classpath.rpartition(".")
        self.own: BaseTrigger = getattr(import_module(module), name)(**arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.own.task_instance, self.own.trigger_id = self.task_instance, self.trigger_id
        lease_id, token = self.identity.lease_id, self.fencing_token
        first = asyncio.ensure_future(anext(aiter(self.own.run())))
        error: dict[str, Any] = {}
        try:
            while not first.done():
                lease = await self.ask(lambda manager: manager.renew(lease_id, fencing_token=token))
                if why := lease["gpu_failed"]:
                    error = {"error": f"one of its GPUs failed: {why}"}
                    break
                await asyncio.wait([first], timeout=self.ttl_s / 4)
            else:
                event = first.result()
        except ResourceManagerError as failure:
            error = {"error": f"its lease could not be renewed: {failure}"}
        except Exception as failure:
            error = {"error": "Trigger failure", "traceback": traceback.format_exception(failure)}
        finally:
            first.cancel()
        if error and "traceback" not in error:
            self.log.error("%s; ending what it started", error["error"])
            with suppress(Exception):  # the task fails either way
                await asyncio.wait_for(self.on_kill(), STOP_S)
        if error:
            yield await self._hand_over(token, {"fencing_token": token, "error": error})
        elif isinstance(event, BaseTaskEndEvent):
            outcome = Outcome.SUCCESS if event.task_instance_state == "success" else Outcome.FAILED
            await self.ask(lambda manager: manager.release(lease_id, fencing_token=token, outcome=outcome))
            yield event
        else:
            yield await self._hand_over(token, {"fencing_token": token, "event": event.payload})

    async def cleanup(self) -> None:
        await self.own.cleanup()

    async def on_kill(self) -> None:
        if hasattr(self.own, "on_kill"):  # since 3.3
            await self.own.on_kill()
