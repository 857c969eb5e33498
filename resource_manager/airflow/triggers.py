"""Triggers that wait for a grant, for free GPUs, for the end of a lease, and for the end of a job."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict
from enum import StrEnum
from typing import Any

from airflow.triggers.base import BaseTrigger, TriggerEvent

from resource_manager.airflow.hook import DEFAULT_CONNECTION, is_outage
from resource_manager.airflow.member_watch import MemberWatch
from resource_manager.airflow.shared_manager import SharedManager
from resource_manager.airflow.task_state import is_wanted, note, noted
from resource_manager.airflow.use_meter import GPU_USAGE, IdleWarning, UseMeter, gpus_of
from resource_manager.airflow.version_compat import AirflowException, in_thread
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
from resource_manager.jobs.gang_job import MAX_AT_ONCE, DoneWhen, GangJob
from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError
from resource_manager.jobs.preempting import grace_of
from resource_manager.jobs.running_job import RunningJob
from resource_manager.jobs.task_identity import TaskIdentity
from resource_manager.manager.commit.asking import asked_by

POLL_S = 1.0
OUTAGE_POLL_S = 5.0
GPU_POLL_S = 5.0
MIN_DEFERRAL_S = 5.0
"""Shortest time before a trigger fires: Airflow's scheduler fails a task that resumes before the scheduler
has read that the task was deferred (apache/airflow issues 71580 and 72716)."""

LOOK_S = 5.0
"""Longest time that the members' answers are waited for before lease, timeout and states are checked."""

MEASURE_EVERY_S = 10.0
"""Time between two readings of what the job's GPUs do."""

TAIL_LINES = 20
"""Last lines of a member's output in the task's log, if the job failed."""

MAX_TAILS = 8
"""Most members whose last lines are in the task's log."""

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
    GPU_FAILED = "gpu_failed"
    PREEMPTED = "preempted"


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

    The wait began `before_s` after the request's arrival. The event has the `state` (GRANTED, REQUEST_LOST or
    MAX_WAIT_EXCEEDED), and `waited_s` and `reasons` of the wait for the task's own log.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        gpu_conn_id: str = DEFAULT_CONNECTION,
        max_wait_s: float | None = None,
        before_s: float = 0.0,
    ) -> None:
        super().__init__(
            identity=dict(identity), gpu_conn_id=gpu_conn_id, max_wait_s=max_wait_s, before_s=before_s
        )
        self.identity = TaskIdentity(**identity)
        self.gpu_conn_id = gpu_conn_id
        self.max_wait_s = max_wait_s
        self.before_s = before_s

    async def run(self) -> AsyncIterator[TriggerEvent]:
        shared = SharedManager.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        log, waited_s = WaitLog(), 0.0
        while True:
            try:
                status = await shared.status_of(self.identity.lease_id)
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
                await asyncio.sleep(OUTAGE_POLL_S)
                continue
            if status is None or status["state"] != "WAITING":
                if status is not None and status["queued_at"] is not None:
                    waited_s = max(status["granted_at"] - status["queued_at"] - self.before_s, 0.0)
                state = TriggerState.REQUEST_LOST if status is None else TriggerState.GRANTED
                yield await self._state_event(state, waited_s=waited_s, reasons=log.reasons)
                return
            waited_s = max(status["waited_s"] - self.before_s, 0.0)
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
        shared = SharedManager.of(self.gpu_conn_id)
        clock = asyncio.get_running_loop().time
        log = WaitLog()
        while True:
            try:
                answer = await shared.call(lambda manager: manager.explain(**self.arguments))
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
        shared = SharedManager.of(self.gpu_conn_id)
        while True:
            try:
                status = await shared.status_of(self.identity.lease_id)
                if status is None or status.get("fencing_token") != self.fencing_token:
                    yield await self._state_event(TriggerState.LEASE_ENDED)
                    return
            except (ResourceManagerError, AirflowException) as error:
                self.log.warning("the GPU manager does not answer; still waiting: %s", error)
            await asyncio.sleep(OUTAGE_POLL_S)


class PauseTrigger(_Trigger):
    """Fire after a pause."""

    def __init__(self, pause_s: float) -> None:
        super().__init__(pause_s=pause_s)
        self.pause_s = pause_s

    async def run(self) -> AsyncIterator[TriggerEvent]:
        await asyncio.sleep(self.pause_s)
        yield await self._event()


class AnswerTrigger(_Trigger):
    """Fire with the given event once the manager answers."""

    def __init__(self, event: Mapping[str, Any], gpu_conn_id: str = DEFAULT_CONNECTION) -> None:
        super().__init__(event=dict(event), gpu_conn_id=gpu_conn_id)
        self.event = dict(event)
        self.gpu_conn_id = gpu_conn_id

    async def run(self) -> AsyncIterator[TriggerEvent]:
        while not await self._is_answered():
            await asyncio.sleep(OUTAGE_POLL_S)
        yield await self._event(**self.event)

    async def _is_answered(self) -> bool:
        try:
            await SharedManager.of(self.gpu_conn_id).status_of("")
        except (ResourceManagerError, AirflowException) as error:
            return not is_outage(error)  # the task fails by any other error itself
        return True


class JobTrigger(_Trigger):
    """Watch the jobs of a lease: write the output of rank 0 to the task's log, renew, fire at the end.

    The end is that of all members, or with `done_when="rank0"` that of rank 0. If a member fails, or its
    server is unreachable for `unreachable_s`, the others are ended first: SIGTERM, after `stale_grace_s`
    SIGKILL.
    """

    def __init__(
        self,
        identity: Mapping[str, Any],
        jobs: Sequence[Mapping[str, Any]],
        ttl_s: float,
        gpu_conn_id: str = DEFAULT_CONNECTION,
        unreachable_s: float = 600.0,
        timeout_s: float | None = None,
        started_at: float | None = None,
        done_when: str = DoneWhen.ALL.value,
        stale_grace_s: float = 60.0,
    ) -> None:
        if started_at is None:  # serialized, so that a triggerer restart does not restart the timeout
            started_at = time.time()
        super().__init__(
            identity=dict(identity),
            jobs=[dict(job) for job in jobs],
            ttl_s=ttl_s,
            gpu_conn_id=gpu_conn_id,
            unreachable_s=unreachable_s,
            timeout_s=timeout_s,
            started_at=started_at,
            done_when=done_when,
            stale_grace_s=stale_grace_s,
        )
        self.identity = TaskIdentity(**identity)
        self.jobs = tuple(map(RunningJob.from_dict, jobs))
        self.ttl_s = ttl_s
        self.gpu_conn_id = gpu_conn_id
        self.unreachable_s = unreachable_s
        self.timeout_s = timeout_s
        self.started_at = started_at
        self.done_when = DoneWhen(done_when)
        self.stale_grace_s = stale_grace_s
        self._noted_offset = 0
        self._renewed_at = 0.0
        self._gpus_seen_at = 0.0
        self._watches: list[MemberWatch] = []
        self._threads: ThreadPoolExecutor | None = None
        self._measured_at = 0.0
        self._use = UseMeter()
        self._idle = IdleWarning(self.log)
        self._warned_of = ""

    async def run(self) -> AsyncIterator[TriggerEvent]:
        clock = asyncio.get_running_loop().time
        self._renewed_at = self._measured_at = clock()
        if len(self.jobs) > 1:  # a server that is cut off must not occupy the threads of all triggers
            self._threads = ThreadPoolExecutor(min(len(self.jobs), MAX_AT_ONCE), "gpu-gang")
        self._watches = [
            MemberWatch(job, self.log, self._threads, copies_log=job.rank == 0) for job in self.jobs
        ]
        await self._recall()
        while True:
            await self._look()
            try:
                event = await self._ended() or await self._out_of_reach() or await self._gpu_failed()
                if event is None:
                    await self._renew_if_due()
                    event = self._over_time() or await self._taken()
            except LeaseNotFoundError:
                event = {"state": TriggerState.LEASE_LOST.value}
            if event is not None:
                usage = self._use.summary()
                yield await self._event(
                    **event,
                    fencing_token=self.jobs[0].fencing_token,
                    **({} if usage is None else {GPU_USAGE: usage}),
                )
                return
            await self._measure_if_due()
            await self._warn_of_maintenance()
            await asyncio.sleep(POLL_S)

    async def _measure_if_due(self) -> None:
        """Add what the lease's GPUs do now, every `MEASURE_EVERY_S`."""
        now, lease_id = asyncio.get_running_loop().time(), self.jobs[0].task_id
        if now - self._measured_at <= MEASURE_EVERY_S:
            return
        self._measured_at = now
        servers = [job.server for job in self.jobs]
        try:
            gpus = await SharedManager.of(self.gpu_conn_id).call(
                lambda manager: gpus_of(manager, servers, lease_id)
            )
        except (ResourceManagerError, AirflowException) as error:
            self.log.debug("the use of the GPUs is not known: %s", error)
        else:
            self._use.add(gpus)
            self._idle.see(gpus, lease_id)

    async def _warn_of_maintenance(self) -> None:
        """Say in the task's log, once a window, that the job still runs in it."""
        try:
            windows = await SharedManager.of(self.gpu_conn_id).under_maintenance()
        except (ResourceManagerError, AirflowException) as error:
            self.log.debug("the maintenance windows are not known: %s", error)
            return
        window = windows.get(self.jobs[0].task_id)
        if window is not None and self._warned_of != window["from"]:
            why = f": {window['reason']}" if window["reason"] else ""
            self.log.warning(
                "the job still runs, but its servers are under maintenance from %s until %s%s",
                window["from"],
                window["until"],
                why,
            )
            self._warned_of = window["from"]

    def _over_time(self) -> dict[str, Any] | None:
        if self.timeout_s is None or time.time() - self.started_at <= self.timeout_s:
            return None
        return {"state": TriggerState.TIMED_OUT.value}

    async def _taken(self) -> dict[str, Any] | None:
        """Return the event of a preemption: the job is told, and the operator ends it and waits again."""
        job = self.jobs[0]
        try:
            preempting = await SharedManager.of(self.gpu_conn_id).preempting()
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("it is unknown whether the lease is preempted: %s", error)
            return None
        taken = preempting.get((job.task_id, job.fencing_token))
        if taken is None:
            return None
        await self._tell(taken)
        return {"state": TriggerState.PREEMPTED.value}

    async def _tell(self, taken: Mapping[str, Any]) -> None:
        """Let the job's grace begin now, as Airflow may resume the operator late; the operator repeats it."""
        grace_s = grace_of(taken)
        self.log.warning("the lease is preempted; the job has %.1f s to save what it did", grace_s)
        tell = in_thread(GangJob(self.jobs).preempt, grace_s, taken["preempt_signal"], 0.0)
        try:
            await asyncio.wait_for(tell, LOOK_S)
        except TimeoutError:
            self.log.warning("its server does not answer; the job is told later")

    async def _look(self) -> None:
        """Look at all members that run, for at most `LOOK_S`: a server may be slow to answer."""
        for watch in self._watches:
            watch.begin_look()
        if looks := [watch.look for watch in self._watches if watch.look is not None]:
            await asyncio.wait(looks, timeout=LOOK_S)
        for watch in self._watches:
            watch.end_look()

    async def _ended(self) -> dict[str, Any] | None:
        """Return the event of the job's end, once it has ended; the other members are ended before."""
        first = self._watches[0]
        succeeded = [watch for watch in self._watches if watch.has_ended and not watch.has_failed]
        is_done = first in succeeded and self.done_when is DoneWhen.RANK0
        if is_done or len(succeeded) == len(self._watches):
            await self._terminate_others()
            return {
                "state": TriggerState.JOB_ENDED.value,
                "exit_code": first.status.exit_code,
                "last_line": first.last_line,
            }
        if not any(watch.has_failed for watch in self._watches):
            return None
        if len(self._watches) == 1:
            return {
                "state": TriggerState.JOB_ENDED.value,
                "exit_code": first.status.exit_code,
                "last_line": first.last_line,
            }
        await self._look()  # another member may have failed before this one
        failed = [watch for watch in self._watches if watch.has_failed]
        cause = min(failed, key=_order_of_failure)
        self.log.error("rank %s on %s failed; ending the others", cause.job.rank, cause.job.server)
        await self._terminate_others()
        # Rank 0's output is in the log already.
        others = [watch for watch in self._watches if watch is not cause and watch.job.rank != 0]
        shown = [watch for watch in (cause, *others) if not watch.is_silent][:MAX_TAILS]
        tails = await asyncio.gather(*(watch.tail(TAIL_LINES) for watch in shown))
        lines = tails[0]
        return {
            "state": TriggerState.JOB_ENDED.value,
            "exit_code": cause.status.exit_code,
            "last_line": lines[-1] if lines else "",
            "rank": cause.job.rank,
            "server": cause.job.server,
            "tails": {str(watch.job.rank): tail for watch, tail in zip(shown, tails, strict=True)},
        }

    async def _out_of_reach(self) -> dict[str, Any] | None:
        """Return the event of members out of reach for too long; those within reach are ended before."""
        now = asyncio.get_running_loop().time()
        lost = [
            watch
            for watch in self._watches
            if not watch.has_ended and watch.is_silent and now - watch.reached_at > self.unreachable_s
        ]
        if not lost:
            return None
        event = {
            "state": TriggerState.JOB_UNREACHABLE.value,
            "detail": lost[0].problem or f"{lost[0].job.server} does not answer",
        }
        if len(self._watches) == 1:
            return event
        await self._terminate_others()
        return {**event, "rank": lost[0].job.rank, "server": lost[0].job.server}

    async def _gpu_failed(self) -> dict[str, Any] | None:
        """Return the event of a GPU that the job cannot go on with; all members are ended before."""
        now, job = asyncio.get_running_loop().time(), self.jobs[0]
        if now - self._gpus_seen_at < GPU_POLL_S:
            return None
        self._gpus_seen_at = now
        try:
            status = await SharedManager.of(self.gpu_conn_id).status_of(job.task_id)
        except (ResourceManagerError, AirflowException):
            return None  # the renewal says that the manager does not answer
        if status is None or status.get("fencing_token") != job.fencing_token:
            return None
        reason = status.get("gpu_failed")
        if not reason:
            return None
        self.log.error("a GPU of this job failed (%s); ending it", reason)
        await self._terminate_others()
        return {"state": TriggerState.GPU_FAILED.value, "detail": reason}

    async def _terminate_others(self) -> None:
        """End the members that run, and renew the lease until they have ended or cannot be reached."""
        running = [watch for watch in self._watches if not watch.has_ended]
        tasks = [asyncio.create_task(self._terminate(watch)) for watch in running]
        while tasks:
            done, _ = await asyncio.wait(tasks, timeout=POLL_S)
            tasks = [task for task in tasks if task not in done]
            await self._renew_if_due()

    async def _terminate(self, watch: MemberWatch) -> None:
        try:
            if watch.look is not None:
                await asyncio.wait([watch.look], timeout=LOOK_S)
                if not watch.look.done():
                    raise LauncherUnreachableError("its server does not answer")
            await watch.terminate(self.stale_grace_s)
        except LauncherError as error:
            self.log.warning("rank %s on %s may still run: %s", watch.job.rank, watch.job.server, str(error))

    async def _recall(self) -> None:
        """Resume the log where an earlier triggerer stopped; repeats at most `ttl_s` / 3 of output."""
        try:
            place = await noted(self.identity, LOG_PLACE)
        except Exception as error:  # only the log depends on it
            self.log.warning("the job's output may appear twice in this log: %s", error)
            return
        first = self._watches[0]
        if place is not None and place["job"] == first.job.key:
            first.offset = self._noted_offset = place["offset"]
            first.last_line = place["last_line"]

    async def _note(self) -> None:
        first = self._watches[0]
        if first.offset == self._noted_offset:
            return
        try:
            await note(self.identity, LOG_PLACE, log_place(first.job, first.offset, first.last_line))
        except Exception as error:
            self.log.warning("log position not saved; a triggerer restart will repeat output: %s", error)
        else:
            self._noted_offset = first.offset

    async def cleanup(self) -> None:
        for watch in self._watches:
            await watch.close()
        if self._threads is not None:
            self._threads.shutdown(wait=False)

    async def _renew_if_due(self) -> None:
        """Renew the lease every third of its life; if it is gone, stop the jobs and raise.

        Its GPUs may be allocated to another task then: raises `LeaseNotFoundError`.
        """
        now, job = asyncio.get_running_loop().time(), self.jobs[0]
        if now - self._renewed_at <= self.ttl_s / 3:
            return
        self._renewed_at = now
        saved = [watch.status.checkpoint_at for watch in self._watches]
        # A gang goes on from the oldest of its members' checkpoints.
        saved_at = min((at for at in saved if at is not None), default=None) if all(saved) else None
        try:
            with asked_by(self.identity.by):
                await SharedManager.of(self.gpu_conn_id).call(
                    lambda manager: manager.renew(
                        job.task_id, fencing_token=job.fencing_token, checkpoint_at=saved_at
                    )
                )
        except LeaseNotFoundError:
            self.log.error("the lease was ended by another client; stopping the job")
            stopped = await in_thread(GangJob(self.jobs).stop)
            for problem in stopped.left.values():
                self.log.error("a job without a lease may still run: %s", problem)
            raise
        except (ResourceManagerError, AirflowException) as error:
            self.log.warning("the lease could not be renewed, trying again: %s", error)
        await self._note()

    async def on_kill(self) -> None:
        await end_unless_wanted(self)


async def end_unless_wanted(trigger: GrantTrigger | JobTrigger) -> None:
    """End the job and lease of a task that a user ended; keep those of a cleared or moved task.

    Airflow also cancels a trigger that another triggerer took over, so the task's state is read first.
    """
    identity = trigger.identity
    if await in_thread(is_wanted, identity):
        return
    shared = SharedManager.of(trigger.gpu_conn_id)
    entry = await shared.call(lambda manager: manager.status_of(identity.lease_id))
    if entry is not None and TaskIdentity.from_labels(entry["labels"]) == identity:
        manager = await shared.call(lambda manager: manager)
        with asked_by(identity.by):
            done = await in_thread(reconcile.end, manager, entry)  # stopping a job takes seconds
        trigger.log.info("the task was ended in Airflow; %s: %s", done.action, done.detail)


def _order_of_failure(watch: MemberWatch) -> tuple[bool, float, int]:
    """Return a key by which the cause of a gang's failure comes first.

    A job that vanished without an exit code, as with its server, has no time of its end.
    """
    status = watch.status
    ended_at = math.inf if status.ended_at is None else status.ended_at
    return status.exit_code is not None, ended_at, watch.job.rank


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
