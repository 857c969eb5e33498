"""Trigger around that of an operator under a lease."""

from __future__ import annotations

import asyncio
import time
import traceback
from collections.abc import AsyncIterator
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from importlib import import_module
from typing import Any

from airflow.triggers.base import BaseTaskEndEvent, BaseTrigger, TriggerEvent

from resource_manager.airflow.lease_renewal import HELD_FOR
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger, failing_alone, renewal_pause_s
from resource_manager.airflow.use_meter import gpus_of
from resource_manager.airflow.version_compat import task_that_may_ask
from resource_manager.airflow.worker_guard import STOP_S
from resource_manager.core.changes import Outcome
from resource_manager.errors import ResourceManagerError
from resource_manager.manager.use_results import IdleWarning

TIMED_OUT = "Trigger timeout"
"""Airflow's word for a deferral that took longer than it may."""

ENDS_WITHIN = timedelta(minutes=1)
"""Time in which a deferral that timed out ends by itself, with what it watches; then Airflow ends it."""


@dataclass(eq=False, repr=False)
class LeaseKeepingTrigger(TaskBoundTrigger):
    """Run an operator's own trigger, and renew the lease meanwhile; fire its `event`, or the `error` instead.

    The worker and this trigger each renew for `handover_s` before the other takes over. An event that ends
    the task releases the lease first. A GPU that fails is such an error, too, and so is a lease that is lost
    or taken, or cannot be renewed in time: what the operator's trigger watches is ended then, as when a user
    ends the task, and also if that trigger itself fails. A trigger that cannot end it waits on instead, as
    the lease may still be there by then. The time `until` ends the deferral likewise: Airflow would only
    cancel the trigger, and the lease end.
    """

    fencing_token: int
    ttl_s: float
    classpath: str
    arguments: dict[str, Any]
    until: float | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        module, _, name = self.classpath.rpartition(".")
        with failing_alone(f"trigger {self.classpath}"):
            self.own: BaseTrigger = getattr(import_module(module), name)(**self.arguments)

    async def run(self) -> AsyncIterator[TriggerEvent]:
        self.own.task_instance, self.own.trigger_id = self.task_instance, self.trigger_id
        lease_id, token = self.identity.lease_id, self.fencing_token
        first = task_that_may_ask(anext(aiter(self.own.run())))
        keeping = asyncio.ensure_future(self._keep())
        error: dict[str, Any] = {}
        try:
            left_s = None if self.until is None else max(self.until - time.time(), 0.0)
            await asyncio.wait([first, keeping], timeout=left_s, return_when=asyncio.FIRST_COMPLETED)
            if first.done():
                event = first.result()
            else:
                error = {"error": keeping.result() if keeping.done() else TIMED_OUT}
        except Exception as failure:
            error = {"error": "Trigger failure", "traceback": traceback.format_exception(failure)}
        finally:
            first.cancel()
            keeping.cancel()
        if error and ("traceback" not in error or self._can_end):
            await self._end(error["error"])
        if error:
            yield await self._hand_over(token, {"fencing_token": token, "error": error})
        elif isinstance(event, BaseTaskEndEvent):
            outcome = Outcome.SUCCESS if event.task_instance_state == "success" else Outcome.FAILED
            await self.ask(lambda manager: manager.release(lease_id, fencing_token=token, outcome=outcome))
            yield event
        else:
            yield await self._hand_over(token, {"fencing_token": token, "event": event.payload})

    async def _keep(self) -> str:
        """Renew the lease until it cannot be or is taken, or a GPU of it fails; return why."""
        lease_id, token, clock = self.identity.lease_id, self.fencing_token, asyncio.get_running_loop().time
        renewed_at, warning = clock(), IdleWarning(self.log.warning)
        while True:
            asked_at = clock()
            held_until = renewed_at + HELD_FOR * self.ttl_s if self._can_end else None
            try:
                async with asyncio.timeout_at(held_until):
                    lease = await self.ask(lambda manager: manager.renew(lease_id, fencing_token=token))
            except TimeoutError:
                late = f"for {HELD_FOR * self.ttl_s:g} s"
                return f"its lease could not be renewed {late}: the GPU manager does not answer"
            except ResourceManagerError as failure:
                return f"its lease could not be renewed: {failure}"
            if why := lease["gpu_failed"]:
                return f"one of its GPUs failed: {why}"
            if lease["preempted_by"] and self._can_end:
                return f"its lease is {lease['reason']}"
            renewed_at, pause_s = asked_at, renewal_pause_s(self.ttl_s / 4, lease["preempt_grace_s"])
            due_at = clock() + pause_s
            with suppress(Exception):  # a use that is not known warns of nothing
                servers = await self.shared.gpus([member["server_name"] for member in lease["members"]])
                warning.see(gpus_of(servers, lease_id), lease_id)
            await asyncio.sleep(due_at - clock())

    @property
    def _can_end(self) -> bool:
        """Whether the operator's trigger can end what it watches."""
        none = getattr(BaseTrigger, "on_kill", None)  # since 3.3
        return getattr(type(self.own), "on_kill", none) is not none

    async def _end(self, why: str) -> None:
        """End what the operator's trigger watches, if that can."""
        if not self._can_end:
            name = type(self.own).__name__
            self.log.error(
                "%s; end what it started by hand: it may still run, as %s has no on_kill", why, name
            )
            return
        self.log.error("%s; ending what it started", why)
        with suppress(Exception):  # the task fails either way
            async with asyncio.timeout(STOP_S):  # in this task, which may ask Airflow
                await self.on_kill()

    async def cleanup(self) -> None:
        await self.own.cleanup()

    async def on_kill(self) -> None:
        if hasattr(self.own, "on_kill"):  # since 3.3
            await self.own.on_kill()
