"""What waits in the triggerer: for a grant, and for the end of a job."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import asdict, dataclass
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.launchers import (
    JobState,
    JobStatus,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    open_launcher,
)
from resource_manager.provider.identity import TaskIdentity
from resource_manager.provider.task_state import is_wanted
from resource_manager.provider.watch import Watch

POLL_S = 1.0
REPORT_EVERY_S = 60.0
"""How often a waiting task says where it stands, if nothing moved."""


class GrantTrigger(BaseTrigger):
    """Fires when the lease is granted, was lost, or was not granted within `max_wait_s`."""

    def __init__(
        self, identity: dict[str, Any], gpu_conn_id: str | None = None, max_wait_s: float | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.identity = TaskIdentity(**identity)
        self.gpu_conn_id = gpu_conn_id
        self.max_wait_s = max_wait_s

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "identity": asdict(self.identity),
                "gpu_conn_id": self.gpu_conn_id,
                "max_wait_s": self.max_wait_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        watch = Watch.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        reported, reported_at = "", float("-inf")
        while True:
            try:
                status = await watch.status_of(self.identity.lease_id)
            except ResourceManagerError as error:
                self.log.warning("the GPU manager does not answer, still waiting: %s", error)
                await asyncio.sleep(10 * POLL_S)
                continue
            if status is None or status["state"] != "WAITING":
                yield TriggerEvent({"state": "LOST" if status is None else status["state"]})
                return
            standing = describe_waiting(status)
            if standing != reported or clock() - reported_at > REPORT_EVERY_S:
                self.log.info("%s", standing)
                reported, reported_at = standing, clock()
            if self.max_wait_s is not None and status["waited_s"] >= self.max_wait_s:
                yield TriggerEvent({"state": "TOO LATE"})
                return
            await asyncio.sleep(POLL_S)

    async def on_kill(self) -> None:
        if await asyncio.to_thread(is_wanted, self.identity):
            return
        watch = Watch.of(self.gpu_conn_id)
        lease_id = self.identity.lease_id
        if not await watch.call(lambda manager: manager.cancel(lease_id, reason="ended in Airflow")):
            await watch.call(lambda manager: manager.release_resources(lease_id, outcome="CANCELLED"))
        self.log.info("gave up the place in the queue: the task was ended in Airflow")


def describe_waiting(status: dict[str, Any]) -> str:
    """Where a waiting task stands, why it waits, and until when roughly."""
    return f"waiting for GPUs: position {status['position']}, {status['reason']}"


@dataclass(frozen=True, slots=True)
class RunningJob:
    """Where to find a lease's job: plain values, so that a trigger can carry them."""

    key: str
    fencing_token: int
    launcher: str
    address: str = ""
    conn_id: str | None = None
    ttl_s: float = 120.0

    def open(self) -> Launcher:
        """The launcher that runs it; raises `LauncherError`."""
        return open_launcher(self.launcher, self.address, self.conn_id)


class JobTrigger(BaseTrigger):
    """Watches a job: writes its output to the task's log, keeps the lease alive, fires when it ended."""

    def __init__(
        self,
        identity: dict[str, Any],
        job: dict[str, Any],
        gpu_conn_id: str | None = None,
        unreachable_s: float = 600.0,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.identity = TaskIdentity(**identity)
        self.job = RunningJob(**job)
        self.gpu_conn_id = gpu_conn_id
        self.unreachable_s = unreachable_s
        self._offset = 0
        self._last_line = ""

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return (
            f"{type(self).__module__}.{type(self).__qualname__}",
            {
                "identity": asdict(self.identity),
                "job": asdict(self.job),
                "gpu_conn_id": self.gpu_conn_id,
                "unreachable_s": self.unreachable_s,
            },
        )

    async def run(self) -> AsyncIterator[TriggerEvent]:
        clock = asyncio.get_running_loop().time
        launcher = await asyncio.to_thread(self.job.open)
        renewed_at = reached_at = clock()
        while True:
            try:
                status = await asyncio.to_thread(launcher.status, self.job.key)
                await self._copy_log(launcher)
                reached_at = clock()
            except LauncherUnreachableError as error:
                self.log.warning("the job cannot be seen, it may still run: %s", error)
                if clock() - reached_at > self.unreachable_s:
                    yield TriggerEvent({"state": "unreachable", "detail": str(error)})
                    return
            else:
                if status.state is not JobState.RUNNING:
                    yield TriggerEvent(self._ended(status))
                    return
            if clock() - renewed_at > self.job.ttl_s / 3:
                if not await self._renew(launcher):
                    yield TriggerEvent({"state": "lease lost"})
                    return
                renewed_at = clock()
            await asyncio.sleep(POLL_S)

    def _ended(self, status: JobStatus) -> dict[str, Any]:
        return {"state": str(status.state), "exit_code": status.exit_code, "last_line": self._last_line}

    async def _copy_log(self, launcher: Launcher) -> None:
        while True:
            text, offset = await asyncio.to_thread(launcher.logs, self.job.key, self._offset)
            if offset == self._offset:
                return
            self._offset = offset
            for line in text.splitlines():
                self.log.info("%s", line)
                self._last_line = line if line.strip() else self._last_line

    async def _renew(self, launcher: Launcher) -> bool:
        """Keeps the lease; where it is gone, ends the job, since its GPUs may be someone else's now."""
        lease_id, token = self.identity.lease_id, self.job.fencing_token
        try:
            await Watch.of(self.gpu_conn_id).call(
                lambda manager: manager.renew(lease_id, fencing_token=token)
            )
        except LeaseNotFoundError:
            self.log.error("the lease was ended by someone else; stopping the job")
            await asyncio.to_thread(launcher.stop, self.job.key)
            return False
        except ResourceManagerError as error:
            self.log.warning("the lease could not be renewed, trying again: %s", error)
        return True

    async def on_kill(self) -> None:
        if await asyncio.to_thread(is_wanted, self.identity):
            return
        try:
            launcher = await asyncio.to_thread(self.job.open)
            await asyncio.to_thread(launcher.stop, self.job.key)
        except LauncherError as error:
            self.log.warning("the job could not be stopped; its GPUs stay held until it is gone: %s", error)
            return
        lease_id, token = self.identity.lease_id, self.job.fencing_token
        await Watch.of(self.gpu_conn_id).call(
            lambda manager: manager.release_resources(lease_id, fencing_token=token, outcome="CANCELLED")
        )
        self.log.info("stopped the job and released its GPUs: the task was ended in Airflow")
