"""Triggers that wait for a grant, for free GPUs, for the end of a lease, and for the end of a job."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Mapping
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from airflow.sdk.exceptions import AirflowException
from airflow.triggers.base import BaseTrigger, TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION
from resource_manager.airflow.shared_manager import SharedManager
from resource_manager.airflow.task_state import is_wanted, note, noted
from resource_manager.airflow.wait_log import WaitLog, describe_vacancy, describe_waiting
from resource_manager.core.refusal import RefusalKind
from resource_manager.errors import (
    InvalidRequestError,
    LeaseNotFoundError,
    NeverFitsError,
    ResourceManagerError,
)
from resource_manager.jobs import reconcile
from resource_manager.jobs.airflow_instance import instance_id
from resource_manager.jobs.launchers import JobState, JobStatus, Launcher, LauncherUnreachableError
from resource_manager.jobs.reconcile import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity

POLL_S = 1.0
OUTAGE_POLL_S = 5.0
MIN_DEFERRAL_S = 5.0
"""Shortest time before a trigger fires: Airflow's scheduler fails a task that resumes before the scheduler
has read that the task was deferred (apache/airflow issues 71580 and 72716)."""

READ_S = 5.0
"""Longest time that a job's output is read before its lease, timeout and state are checked again."""

LOG_PLACE = "job_log_place"
"""XCom with a `log_place`: the part of the job's output that is in the task's log."""


class TriggerState(StrEnum):
    """Reason why a trigger fired; sent as a plain string in the `state` of its event."""

    GRANTED = "granted"
    REQUEST_LOST = "request_lost"
    MAX_WAIT_EXCEEDED = "max_wait_exceeded"
    LEASE_ENDED = "lease_ended"
    LEASE_LOST = "lease_lost"
    JOB_ENDED = "job_ended"
    JOB_UNREACHABLE = "job_unreachable"
    TIMED_OUT = "timed_out"


class _Trigger(BaseTrigger):
    """Base that keeps its arguments, which are plain values, for `serialize`."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._arguments = arguments
        self._began_at = time.monotonic()

    async def _event(self, **payload: Any) -> TriggerEvent:
        """Return an event, after `MIN_DEFERRAL_S` at the earliest."""
        await asyncio.sleep(max(self._began_at + MIN_DEFERRAL_S - time.monotonic(), 0.0))
        return TriggerEvent(payload)

    async def _state_event(self, state: TriggerState, **payload: Any) -> TriggerEvent:
        return await self._event(state=state.value, **payload)

    def serialize(self) -> tuple[str, dict[str, Any]]:
        return f"{type(self).__module__}.{type(self).__qualname__}", self._arguments


class GrantTrigger(_Trigger):
    """Fire when the lease is granted, the request is gone, or it was not granted within `max_wait_s`.

    The event has the `state` (GRANTED, REQUEST_LOST or MAX_WAIT_EXCEEDED), and `waited_s` and `reasons` of
    the wait for the task's own log.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        gpu_conn_id: str = DEFAULT_CONNECTION,
        max_wait_s: float | None = None,
    ) -> None:
        super().__init__(identity=dict(identity), gpu_conn_id=gpu_conn_id, max_wait_s=max_wait_s)
        self.identity = TaskIdentity(**identity)
        self.gpu_conn_id = gpu_conn_id
        self.max_wait_s = max_wait_s

    async def run(self) -> AsyncIterator[TriggerEvent]:
        watch = SharedManager.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        log, waited_s = WaitLog(), 0.0
        while True:
            try:
                status = await watch.status_of(self.identity.lease_id)
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
                await asyncio.sleep(OUTAGE_POLL_S)
                continue
            if status is None or status["state"] != "WAITING":
                if status is not None and status["queued_at"] is not None:
                    waited_s = status["granted_at"] - status["queued_at"]
                state = TriggerState.REQUEST_LOST if status is None else TriggerState.GRANTED
                yield await self._state_event(state, waited_s=waited_s, reasons=log.reasons)
                return
            waited_s = status["waited_s"]
            line = describe_waiting(status)
            if log.due(status["kind"], status["reason"], line, clock()):
                self.log.info("%s", line)
            if self.max_wait_s is not None and waited_s >= self.max_wait_s:
                state = TriggerState.MAX_WAIT_EXCEEDED
                yield await self._state_event(state, waited_s=waited_s, reasons=log.reasons)
                return
            await asyncio.sleep(POLL_S)

    async def on_kill(self) -> None:
        await end_unless_wanted(self)


class FreeCapacityTrigger(_Trigger):
    """Fire when the request would be granted at once, or no server can ever fit it; allocate nothing.

    The event has the `server_name`, None with a `detail` if no server can ever fit the request, and the
    `reasons` of the wait.
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
        watch = SharedManager.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        log = WaitLog()
        while True:
            try:
                answer = await watch.call(lambda manager: manager.explain(**self.arguments))
                if answer["would_be_granted"]:
                    yield await self._event(server_name=answer["server_name"], reasons=log.reasons)
                    return
                if answer["kind"] == RefusalKind.NEVER_FITS:
                    raise NeverFitsError(answer["reason"])
                line = describe_vacancy(answer)
                if log.due(answer["kind"], answer["reason"], line, clock()):
                    self.log.info("%s", line)
            except InvalidRequestError as error:  # the inventory may have changed since the task asked
                yield await self._event(server_name=None, detail=str(error), reasons=log.reasons)
                return
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
            await asyncio.sleep(self.poke_interval_s)


class LeaseEndTrigger(_Trigger):
    """Fire when the lease with this fencing token has ended, for any reason."""

    def __init__(
        self, identity: Mapping[str, Any], fencing_token: int, gpu_conn_id: str = DEFAULT_CONNECTION
    ) -> None:
        super().__init__(identity=dict(identity), fencing_token=fencing_token, gpu_conn_id=gpu_conn_id)
        self.identity = TaskIdentity(**identity)
        self.fencing_token = fencing_token
        self.gpu_conn_id = gpu_conn_id

    async def run(self) -> AsyncIterator[TriggerEvent]:
        watch = SharedManager.of(self.gpu_conn_id)
        while True:
            try:
                status = await watch.status_of(self.identity.lease_id)
                if status is None or status.get("fencing_token") != self.fencing_token:
                    yield await self._state_event(TriggerState.LEASE_ENDED)
                    return
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
            await asyncio.sleep(OUTAGE_POLL_S)


class JobTrigger(_Trigger):
    """Watch a job: write its output to the task's log, renew its lease, fire when it has ended."""

    def __init__(
        self,
        identity: Mapping[str, Any],
        job: Mapping[str, Any],
        ttl_s: float,
        gpu_conn_id: str = DEFAULT_CONNECTION,
        unreachable_s: float = 600.0,
        timeout_s: float | None = None,
        started_at: float | None = None,
    ) -> None:
        if started_at is None:  # serialized, so that a triggerer restart does not restart the timeout
            started_at = time.time()
        super().__init__(
            identity=dict(identity),
            job=dict(job),
            ttl_s=ttl_s,
            gpu_conn_id=gpu_conn_id,
            unreachable_s=unreachable_s,
            timeout_s=timeout_s,
            started_at=started_at,
        )
        self.identity = TaskIdentity(**identity)
        self.job = RunningJob(**job)
        self.ttl_s = ttl_s
        self.gpu_conn_id = gpu_conn_id
        self.unreachable_s = unreachable_s
        self.timeout_s = timeout_s
        self.started_at = started_at
        self._offset = 0
        self._noted_offset = 0
        self._last_line = ""
        self._launcher: Launcher | None = None

    async def run(self) -> AsyncIterator[TriggerEvent]:
        clock = asyncio.get_running_loop().time
        renewed_at = reached_at = clock()
        await self._recall()
        while True:
            try:
                status = await self._look()
                reached_at = clock()
                if status.state is not JobState.RUNNING:
                    yield await self._state_event(
                        TriggerState.JOB_ENDED, exit_code=status.exit_code, last_line=self._last_line
                    )
                    return
            except LauncherUnreachableError as error:
                self.log.warning("the job's state is unknown, it may still run: %s", error)
                if clock() - reached_at > self.unreachable_s:
                    yield await self._state_event(TriggerState.JOB_UNREACHABLE, detail=str(error))
                    return
            if clock() - renewed_at > self.ttl_s / 3:
                renewed_at = clock()
                if not await self._renew():
                    yield await self._state_event(TriggerState.LEASE_LOST)
                    return
                await self._note()
            if self.timeout_s is not None and time.time() - self.started_at > self.timeout_s:
                yield await self._state_event(TriggerState.TIMED_OUT)
                return
            await asyncio.sleep(POLL_S)

    async def _look(self) -> JobStatus:
        """Copy the job's new output to the log and return its state: RUNNING until all output is copied.

        Returns after `READ_S` in any case, so that a job that prints faster than this reads has its lease
        renewed.
        """
        if self._launcher is None:
            self._launcher = await asyncio.to_thread(self.job.open)
        status = await asyncio.to_thread(self._launcher.status, self.job.key)
        clock = asyncio.get_running_loop().time
        until = clock() + READ_S
        while clock() < until:
            text, offset = await asyncio.to_thread(self._launcher.logs, self.job.key, self._offset)
            if offset == self._offset:
                return status
            self._offset = offset
            for line in text.splitlines():
                self.log.info("%s", line)
                self._last_line = line if line.strip() else self._last_line
                await asyncio.sleep(0)  # lets other triggers run between the lines of a long output
        return JobStatus(JobState.RUNNING)

    async def _recall(self) -> None:
        """Resume the log where an earlier triggerer stopped; repeats at most `ttl_s` / 3 of output."""
        try:
            place = await noted(self.identity, LOG_PLACE)
        except Exception as error:  # only the log depends on it
            self.log.warning("the job's output may appear twice in this log: %s", error)
            return
        if place is not None and place["job"] == self.job.key:
            self._offset = self._noted_offset = place["offset"]
            self._last_line = place["last_line"]

    async def _note(self) -> None:
        if self._offset == self._noted_offset:
            return
        try:
            await note(self.identity, LOG_PLACE, log_place(self.job, self._offset, self._last_line))
        except Exception as error:
            self.log.warning("log position not saved; a triggerer restart will repeat output: %s", error)
        else:
            self._noted_offset = self._offset

    async def cleanup(self) -> None:
        if self._launcher is not None:
            await asyncio.to_thread(self._launcher.close)

    async def _renew(self) -> bool:
        """Renew the lease; if it is gone, stop the job, whose GPUs may be allocated to another task.

        Returns False if the lease is gone.
        """
        job = self.job
        try:
            await SharedManager.of(self.gpu_conn_id).call(
                lambda manager: manager.renew(job.task_id, fencing_token=job.fencing_token)
            )
        except LeaseNotFoundError:
            self.log.error("the lease was ended by another client; stopping the job")
            if self._launcher is not None:
                await asyncio.to_thread(self._launcher.stop, job.key)
            return False
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("the lease could not be renewed, trying again: %s", error)
        return True

    async def on_kill(self) -> None:
        await end_unless_wanted(self)


async def end_unless_wanted(trigger: GrantTrigger | JobTrigger) -> None:
    """End the job and lease of a task that a user ended; keep those of a cleared or moved task.

    Airflow also cancels a trigger that another triggerer took over, so the task's state is read first.
    """
    identity = trigger.identity
    if await asyncio.to_thread(is_wanted, identity):
        return
    watch = SharedManager.of(trigger.gpu_conn_id)
    entry = await watch.call(lambda manager: manager.status_of(identity.lease_id))
    if entry is not None and TaskIdentity.from_labels(entry["labels"]) == identity:
        manager = await watch.call(lambda manager: manager)
        done = await asyncio.to_thread(reconcile.end, manager, entry)  # stopping a job takes seconds
        trigger.log.info("the task was ended in Airflow; %s: %s", done.action, done.detail)


def log_place(job: RunningJob, offset: int = 0, last_line: str = "") -> dict[str, Any]:
    """Return the log position: output copied up to `offset`, and the last non-empty line before it."""
    return {"job": job.key, "offset": offset, "last_line": last_line}


def identity_of(context: Any) -> tuple[TaskIdentity, dict[str, Any]]:
    """Return the running task's identity, as an object and as plain data for a trigger.

    Raises `AirflowException`.
    """
    try:
        identity = TaskIdentity.of(context["ti"], instance_id())
    except ResourceManagerError as error:
        raise AirflowException(str(error)) from error
    return identity, asdict(identity)
