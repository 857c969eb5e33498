"""Watch over the jobs of a lease: the log of rank 0, renewals, limits, and how they ended."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager

from resource_manager.airflow import shared_manager
from resource_manager.airflow.task_trigger import base
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger
from resource_manager.airflow.task_trigger.events import EndState, TaskEnd
from resource_manager.airflow.task_trigger.member_watch import MemberWatch
from resource_manager.airflow.task_trigger.notes import TaskNotes
from resource_manager.airflow.task_trigger.plan import TaskPlan
from resource_manager.airflow.use_meter import UseMeter, gpus_of
from resource_manager.airflow.version_compat import AirflowException
from resource_manager.airflow.wait_log import DeadlineLog
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError
from resource_manager.jobs.gang_job import DoneWhen
from resource_manager.jobs.job_preemption import is_taken
from resource_manager.jobs.launchers import LauncherError, LauncherUnreachableError
from resource_manager.jobs.running_job import RunningJob
from resource_manager.manager.results import Allocation, Renewal
from resource_manager.manager.use_results import IdleWarning

LOOK_EVERY_S = 10.0
"""Longest time between two looks at jobs whose place tells of changes."""

LOOK_S = 5.0
"""Longest time that the members' answers are waited for before lease, timeout and states are checked."""

MAX_STEP_S = LOOK_S + 1.0
"""Most of the time between two checks that is silence of a server: this process may have been stopped."""

TAIL_LINES = 20
"""Last lines of a member's output in the task's log, if the job failed."""

MAX_TAILS = 8
"""Most members whose last lines are in the task's log."""


class JobWatch:
    """Watch over the jobs of a lease, which were started at `started_at`; it is renewed in `renewal_due_s`.

    Their end is that of all members, or with `done_when="rank0"` that of rank 0. If a member fails, or its
    server is unreachable for too long, the others are ended first: SIGTERM, after `stale_grace_s` SIGKILL.
    """

    def __init__(
        self,
        trigger: TaskBoundTrigger,
        plan: TaskPlan,
        notes: TaskNotes,
        jobs: Sequence[RunningJob],
        started_at: float,
        renewal_due_s: float,
    ) -> None:
        self.jobs = tuple(jobs)
        self._trigger, self._plan, self._notes = trigger, plan, notes
        self._log, self._shared = trigger.log, trigger.shared
        self._started_at = started_at
        self._clock = asyncio.get_running_loop().time
        self._measured_at = self._checked_at = self._clock()
        self._renew_at = self._measured_at + renewal_due_s
        self._changed = asyncio.Event()
        self._renewal: asyncio.Task[None] | None = None
        self._noted_offset = 0
        self._use = UseMeter()
        self._idle = IdleWarning(self._log.warning)
        self._warned_of = ""
        self._deadline = DeadlineLog(self._log)
        self._watches = [MemberWatch(job, self._log, copies_log=job.rank == 0) for job in self.jobs]

    async def recall(self) -> None:
        """Resume the log where an earlier triggerer stopped; repeats at most `ttl_s` / 3 of output."""
        first = self._watches[0]
        first.offset, first.last_line = await self._notes.log_place(first.job.key)
        self._noted_offset = first.offset or -1
        await self._note()

    async def until_over(self) -> TaskEnd | Allocation:
        """Return the end of the jobs, or the lease once it is preempted; raises `LeaseNotFoundError`."""
        with ExitStack() as watching:
            watching.enter_context(self._shared.watching(self.jobs[0].task_id, self._changed))
            for watch in self._watches:
                watching.enter_context(watch.place.watching(watch.job.key, self._changed))
            while True:
                self._changed.clear()
                await self._look_at_all()
                end = await self._ended() or await self._out_of_reach() or await self._gpu_failed()
                if end is None:
                    await self.renew_if_due()
                    end = self._over_time()
                if end is not None:
                    known = {"fencing_token": self.jobs[0].fencing_token, "gpu_usage": self._use.summary()}
                    return end.model_copy(update=known)
                if (taken := self._taken()) is not None:
                    return taken
                await self._measure_if_due()
                await self._warn_of_maintenance()
                await self._shared.until_set(self._changed, self._pause_s())

    def _pause_s(self) -> float:
        """Return the time until the next look, unless something changes before."""
        if any(watch.look or not (watch.has_ended or watch.place.is_standing) for watch in self._watches):
            return base.POLL_S
        until_s = [LOOK_EVERY_S, self._renew_at - self._clock()]
        if self._plan.timeout_s is not None:
            until_s.append(self._started_at + self._plan.timeout_s - time.time())
        return max(min(until_s), 0.01)

    async def copy_rest(self) -> str:
        """Copy the output that is not in the log yet, of jobs that have ended; return its last line."""
        await self._look_at_all()
        return self._watches[0].last_line

    async def renew_if_due(self) -> None:
        """Have the lease renewed in time for the next third of its life; raises `LeaseNotFoundError`."""
        if self._renewal is not None and self._renewal.done():
            renewal, self._renewal = self._renewal, None
            try:
                renewal.result()
            except LeaseNotFoundError:
                raise
            except (ResourceManagerError, AirflowException) as error:
                self._log.warning("the lease could not be renewed, trying again: %s", error)
            await self._note()
        now, job = self._clock(), self.jobs[0]
        if self._renewal is not None or now < self._renew_at:
            return
        self._renew_at = now + base.renewal_pause_s(self._plan.ttl_s / 3)
        saved = [watch.status.checkpoint_at for watch in self._watches]
        # A gang goes on from the oldest of its members' checkpoints.
        saved_at = min((at for at in saved if at is not None), default=None) if all(saved) else None
        due: Renewal = {
            "task_id": job.task_id,
            "fencing_token": job.fencing_token,
            "checkpoint_at": saved_at,
            "by": self._trigger.identity.by,
        }
        self._renewal = asyncio.create_task(self._shared.renew(due, self._plan.ttl_s))
        self._renewal.add_done_callback(lambda _: self._changed.set())

    async def close(self) -> None:
        """Close the connections to the servers, after the calls that they carry out."""
        if self._renewal is not None:
            self._renewal.cancel()
        for watch in self._watches:
            await watch.close()

    @contextmanager
    def _may_be_unknown(self, what: str) -> Iterator[None]:
        """Go on without what is read inside if the manager does not answer."""
        try:
            yield
        except (ResourceManagerError, AirflowException) as error:
            self._log.debug("%s: %s", what, error)

    async def _measure_if_due(self) -> None:
        """Add what the lease's GPUs do now, every `USE_EVERY_S`."""
        now, lease_id = self._clock(), self.jobs[0].task_id
        if now - self._measured_at < shared_manager.USE_EVERY_S:
            return
        self._measured_at = now
        with self._may_be_unknown("the use of the GPUs is not known"):
            gpus = gpus_of(await self._shared.gpus([job.server for job in self.jobs]), lease_id)
            self._use.add(gpus)
            self._idle.see(gpus, lease_id)

    async def _warn_of_maintenance(self) -> None:
        """Say in the task's log, once a window, that the job still runs in it."""
        window = None
        with self._may_be_unknown("the maintenance windows are not known"):
            window = (await self._shared.under_maintenance()).get(self.jobs[0].task_id)
        if window is not None and self._warned_of != window["from"]:
            why = f": {window['reason']}" if window["reason"] else ""
            self._log.warning(
                "the job still runs, but its servers are under maintenance from %s until %s%s",
                window["from"],
                window["until"],
                why,
            )
            self._warned_of = window["from"]

    def _over_time(self) -> TaskEnd | None:
        limit_s = self._plan.timeout_s
        if limit_s is None or time.time() - self._started_at <= limit_s:
            return None
        return TaskEnd(state=EndState.TIMED_OUT)

    def _known(self) -> Allocation | None:
        """Return the lease as last told; None if it is another by now, which the next renewal finds out."""
        lease = None
        with self._may_be_unknown("it is unknown whether the lease is preempted"):
            lease = self._shared.known(self.jobs[0].task_id)
        return lease if lease is not None and lease["fencing_token"] == self.jobs[0].fencing_token else None

    def _taken(self) -> Allocation | None:
        """Return the lease if it is being preempted."""
        lease = self._known()
        if lease is not None:
            self._deadline.see(lease)
        return lease if lease is not None and not lease["quarantined"] and self.is_taken(lease) else None

    def is_taken(self, lease: Allocation) -> bool:
        """Return whether the jobs have to end for a preemption of their lease."""
        return is_taken(lease, lambda: [watch.status.preempted for watch in self._watches])

    async def _look_at_all(self) -> None:
        """Look at all members that run, for at most `LOOK_S`: a server may be slow to answer."""
        for watch in self._watches:
            watch.begin_look()
        if looks := [watch.look for watch in self._watches if watch.look is not None]:
            await asyncio.wait(looks, timeout=LOOK_S)
        for watch in self._watches:
            watch.end_look()

    async def _ended(self) -> TaskEnd | None:
        """Return the jobs' end, once they have ended; the other members are ended before."""
        first = self._watches[0]
        succeeded = [watch for watch in self._watches if watch.has_ended and not watch.has_failed]
        is_done = first in succeeded and self._plan.done_when is DoneWhen.RANK0
        if is_done or len(succeeded) == len(self._watches):
            await self._terminate_others()
        elif not any(watch.has_failed for watch in self._watches):
            return None
        elif len(self._watches) > 1:
            return await self._failed()
        return TaskEnd(state=EndState.JOB_ENDED, exit_code=first.status.exit_code, last_line=first.last_line)

    async def _failed(self) -> TaskEnd:
        """End the other members after one has failed; return the failure that came first, with its output."""
        await self._look_at_all()  # another member may have failed before this one
        failed = [watch for watch in self._watches if watch.has_failed]
        cause = min(failed, key=_order_of_failure)
        self._log.error("rank %s on %s failed; ending the others", cause.job.rank, cause.job.server)
        await self._terminate_others()
        # Rank 0's output is in the log already.
        others = [watch for watch in self._watches if watch is not cause and watch.job.rank != 0]
        shown = [watch for watch in (cause, *others) if not watch.is_silent][:MAX_TAILS]
        tails = await asyncio.gather(*(watch.tail(TAIL_LINES) for watch in shown))
        return TaskEnd(
            state=EndState.JOB_ENDED,
            exit_code=cause.status.exit_code,
            last_line=tails[0][-1] if tails[0] else "",
            rank=cause.job.rank,
            server=cause.job.server,
            tails={watch.job.rank: tail for watch, tail in zip(shown, tails, strict=True)},
        )

    async def _out_of_reach(self) -> TaskEnd | None:
        """Return the end by members out of reach for too long; those within reach are ended before."""
        now = self._clock()
        passed_s, self._checked_at = min(now - self._checked_at, MAX_STEP_S), now
        for watch in self._watches:
            watch.silent_s = watch.silent_s + passed_s if watch.is_silent else 0.0
        late = [watch for watch in self._watches if watch.silent_s > self._plan.unreachable_s]
        for watch in late:
            watch.give_up_output()
        lost = [watch for watch in late if not watch.has_ended]
        if not lost:
            return None
        first = lost[0]
        why = first.problem or f"{first.job.server} does not answer"
        if len(self._watches) == 1:
            return TaskEnd(state=EndState.JOB_UNREACHABLE, detail=why)
        await self._terminate_others()
        return TaskEnd(
            state=EndState.JOB_UNREACHABLE, detail=why, rank=first.job.rank, server=first.job.server
        )

    async def _gpu_failed(self) -> TaskEnd | None:
        """Return the end by a GPU that the job cannot go on with; all members are ended before."""
        lease = self._known()
        if lease is None or not lease["gpu_failed"]:
            return None
        self._log.error("a GPU of this job failed (%s); ending it", lease["gpu_failed"])
        await self._terminate_others()
        return TaskEnd(state=EndState.GPU_FAILED, detail=lease["gpu_failed"])

    async def _terminate_others(self) -> None:
        """End the members that run, and renew the lease until they have ended or cannot be reached."""
        running = [watch for watch in self._watches if not watch.has_ended]
        tasks = [asyncio.create_task(self._terminate(watch)) for watch in running]
        while tasks:
            done, _ = await asyncio.wait(tasks, timeout=base.POLL_S)
            tasks = [task for task in tasks if task not in done]
            await self.renew_if_due()

    async def _terminate(self, watch: MemberWatch) -> None:
        try:
            if watch.look is not None:
                await asyncio.wait([watch.look], timeout=LOOK_S)
                if not watch.look.done():
                    raise LauncherUnreachableError("its server does not answer")
            await watch.terminate(self._plan.stale_grace_s)
        except LauncherError as error:
            self._log.warning("rank %s on %s may still run: %s", watch.job.rank, watch.job.server, str(error))

    async def _note(self) -> None:
        first = self._watches[0]
        if first.offset != self._noted_offset:
            await self._notes.keep_log_place(first.job.key, first.offset, first.last_line)
            self._noted_offset = first.offset


def _order_of_failure(watch: MemberWatch) -> tuple[bool, float, int]:
    """Return a key by which the cause of a gang's failure comes first.

    A job that vanished without an exit code, as with its server, has no time of its end.
    """
    status = watch.status
    ended_at = math.inf if status.ended_at is None else status.ended_at
    return status.exit_code is not None, ended_at, watch.job.rank
