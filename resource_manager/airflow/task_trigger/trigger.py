"""Trigger of `GPUTrainingOperator`: it carries the task from its request to the result of its job."""

from __future__ import annotations

import asyncio
import shlex
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from airflow.triggers.base import TriggerEvent

from resource_manager.airflow.late_start import late_start
from resource_manager.airflow.task_results import drop_unwanted, keep_end, kept_end
from resource_manager.airflow.task_trigger import base
from resource_manager.airflow.task_trigger.base import TaskBoundTrigger
from resource_manager.airflow.task_trigger.events import EndState, GrantState, TaskEnd
from resource_manager.airflow.task_trigger.job_watch import JobWatch
from resource_manager.airflow.task_trigger.notes import ALLOCATION, TaskNotes
from resource_manager.airflow.task_trigger.plan import TaskPlan
from resource_manager.airflow.task_trigger.task_lease import TaskLease
from resource_manager.airflow.task_trigger.waits import GrantWait
from resource_manager.airflow.version_compat import AirflowException, AirflowFailException, in_thread
from resource_manager.core.changes import Outcome
from resource_manager.core.identifiers import as_reason
from resource_manager.errors import LeaseNotFoundError, ResourceManagerError, StoreUnavailableError, is_outage
from resource_manager.jobs.gang_environment import is_gang
from resource_manager.jobs.gang_job import GangJob
from resource_manager.jobs.job_preemption import STEP_S, grace_of, is_time_over, waits_again
from resource_manager.jobs.launchers import AlreadyEndedError, Job, LauncherError, LauncherUnreachableError
from resource_manager.manager.agent_jobs import ask_agents_through
from resource_manager.manager.plurals import counted, numbered_gpus
from resource_manager.manager.recorded_changes import LEASE_GONE
from resource_manager.manager.results import QueueEntry, Submission
from resource_manager.scheduling.preemption.requeueing import restarts_of

START_PAUSE_S = 10.0
"""Pause before the second attempt to start a gang; it doubles before each further one."""

UNREACHABLE_PAUSE_S = 30.0
"""Pause before another attempt to end a preempted job whose server did not answer."""

BY_SIGNAL = (None, 137, 143)
"""Exit codes of a job that SIGKILL or SIGTERM ended; one whose whole group was killed has none."""

GPUS_STAY_ALLOCATED = "its GPUs stay allocated until the job is known to be gone"

Step = Callable[[], Awaitable["Step | TaskEnd"]]
"""Method of a `TaskTrigger` for one state of its task; returns that of the next, or the task's end."""


@dataclass(eq=False, repr=False)
class TaskTrigger(TaskBoundTrigger):
    """Wait for the grant, start the job, watch it, end it, release its GPUs; then fire a `TaskEnd`.

    Two of them may run at once for one task, as when a triggerer was thought dead: each step may be taken
    again by another, since a job is found by its key, and a lease is ended by its fencing token. Leases up to
    `after_token` were ended before the task asked.
    """

    plan: dict[str, Any]
    after_token: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        with base.failing_alone(f"plan of {self.identity.lease_id}"):
            self._plan = TaskPlan.from_dict(self.plan)
        self._notes = TaskNotes(self.identity, self.log)
        self._lease = TaskLease(self, self._plan)
        self._watch: JobWatch | None = None
        self._waited: dict[str, Any] = {}

    async def run(self) -> AsyncIterator[TriggerEvent]:
        ask_agents_through(self.shared.service)
        await self._notes.recall()
        step: Step | TaskEnd = self._wait
        try:
            while not isinstance(step, TaskEnd):
                step = await step()
        except AirflowFailException as error:
            step = TaskEnd(state=EndState.NEVER_FITS, detail=str(error))
        except (ResourceManagerError, AirflowException) as error:
            step = TaskEnd(state=EndState.FAILED, detail=str(error))
        yield await self._fire(step.model_copy(update=self._waited))

    async def cleanup(self) -> None:
        await self.await_launcher()
        if self._watch is not None:
            await self._watch.close()

    async def on_kill(self) -> None:
        await self.end_unless_wanted()
        await in_thread(drop_unwanted, self.identity)  # an end whose event never fires

    # ---- steps ----

    async def _wait(self) -> Step | TaskEnd:
        """Wait for the grant; the lease, its job, or the task's end may be there already."""
        if (end := await self._known_end()) is not None:
            return partial(self._finish, end)
        wait = GrantWait(self, self._plan.max_wait_s)
        # What was read for all may be of an earlier wait, but for the first.
        status: Submission | TaskEnd | None = None
        if not self._waited:
            status = await self._lease.pending(self._notes.attempt)
        status = status or await self._request()
        while not isinstance(status, TaskEnd) and status["state"] == "WAITING":
            wait.before_s = await self._before_s(status)
            state = await wait.until_over()
            self._waited = wait.in_short()
            if state is GrantState.MAX_WAIT_EXCEEDED and await self._lease.cancel(status):
                return TaskEnd(state=EndState.MAX_WAIT_EXCEEDED)
            status = await self._request()
        if isinstance(status, TaskEnd):
            return partial(self._finish, status)
        self._lease.allocation = status
        if not self._waited and restarts_of(status["labels"]) == self._notes.restarts:
            wait.before_s = self._notes.before_s
            self._waited = wait.until_granted(status)
        if status["state"] == "ERROR":  # it was not renewed for a while, but its task continues
            self._lease.allocation = await self._lease.renew()
        return self._start if self._lease.allocation["preempted_by"] is None else self._save_and_stop

    async def _start(self) -> Step | TaskEnd:
        """Store where the job will be, and start it unless it runs."""
        lease = self._lease
        gang, started_at = GangJob.of(lease.allocation), self._notes.started_at(lease.token)
        if gang is not None and started_at is not None:  # by an earlier trigger: a server may be out of reach
            await self._watch_jobs(gang, started_at)
            return self._run
        try:
            if await self._gives_back(gang):
                return self._wait
            if gang is None:
                launcher = self._plan.job.launcher_for(lease.allocation)
                planned = GangJob.planned(lease.allocation, launcher, self._plan.job.conn_id)
                prepared = await lease.launch(planned.prepare, self._jobs(planned))
                if prepared.failed:
                    error = next(iter(prepared.failed.values()))
                    if isinstance(error, AlreadyEndedError) or is_outage(error):
                        raise error
                    return await self._not_started(error, tuple(prepared.failed))
                await lease.place(prepared.places)
                if lease.allocation["preempted_by"] is not None:
                    return self._save_and_stop
                gang = GangJob.of(lease.allocation)
                assert gang is not None  # it was placed just now
            await self._notes.share(ALLOCATION, lease.allocation)
            self._say_where(gang)
            if await lease.launch(gang.start, self._jobs(gang)):
                started_at = time.time()
                await self._notes.keep(started_at=started_at, started_token=lease.token)
            else:
                self.log.info("the job was started by an earlier execution; watching it")
        except AlreadyEndedError as error:
            self.log.warning("%s; looking who stopped it", error)
            await lease.wait_for_stopper()
            await lease.release(Outcome.CANCELLED)
            return self._wait
        except LauncherError as error:
            if not is_outage(error) and not await lease.outlasts(error):
                return await self._not_started(error)
            self.log.warning("the job does not start yet; trying again: %s", error)
            await asyncio.sleep(base.OUTAGE_POLL_S)
            return self._wait
        except LeaseNotFoundError:
            self.log.warning("the lease was ended before its job started")
            return self._wait
        await self._watch_jobs(gang, started_at)
        return self._run

    async def _run(self) -> Step | TaskEnd:
        """Watch the job until it has ended, or has to."""
        watch = self._watch
        assert watch is not None
        try:
            end = await watch.until_over()
        except LeaseNotFoundError:
            return await self._lost()
        if not isinstance(end, TaskEnd):
            self._lease.allocation = end
            return self._save_and_stop
        if not end.has_succeeded and end.state is not EndState.JOB_UNREACHABLE:
            entry = await self._lease.newest()
            if entry is not None and not self._lease.is_still(entry):
                return self._wait  # another process ended the job
            if entry is not None and entry["state"] != "WAITING" and watch.is_taken(entry):
                self._lease.allocation = entry
                return self._save_and_stop
        if end.state is EndState.JOB_UNREACHABLE and end.rank is None:
            return end.model_copy(update={"detail": f"{end.detail}; {GPUS_STAY_ALLOCATED}"})
        return partial(self._finish, end)

    async def _save_and_stop(self) -> Step | TaskEnd:
        """End the job of a lease that is being preempted; its request waits again, or a limit ends the task.

        A job that still ends with exit code 0 has succeeded. One that cannot be known to be gone keeps its
        GPUs, and is tried again later.
        """
        lease = self._lease.allocation
        gang, grace_s = GangJob.of(lease), grace_of(lease)
        why = lease["reason"] or "not preempted any more, but its job was told"
        self.log.warning("the lease is %s; its job has %.1f s to save what it did", why, grace_s)
        try:
            if gang is not None:
                wait_s = 0.0
                while True:
                    done = await self._lease.launch(gang.preempt, grace_s, lease["preempt_signal"], wait_s)
                    for error in done.left.values():
                        raise error
                    if done.is_over:
                        break
                    # Quarantined if they were told late; the GPUs stay allocated either way.
                    await self._lease.renew()
                    wait_s = min(grace_s, STEP_S)
                last_line = await self._copy_rest(gang)
                if done.has_succeeded or done.has_failed:
                    codes = [status.exit_code for status in done.statuses.values()]
                    end = TaskEnd(
                        state=EndState.JOB_ENDED,
                        fencing_token=lease["fencing_token"],
                        exit_code=next((code for code in codes if code != 0), 0),
                        last_line=last_line,
                    )
                    return partial(self._finish, end)
            await self._lease.queue_again(gang)
            if not waits_again(lease):
                state = EndState.TIMED_OUT if is_time_over(lease) else EndState.IDLE
                return TaskEnd(state=state, detail=f"the job was ended, {lease['reason']}")
        except LauncherError as error:
            self.log.error("the job may still run: %s; %s", error, GPUS_STAY_ALLOCATED)
            await asyncio.sleep(UNREACHABLE_PAUSE_S)
        except LeaseNotFoundError:
            self.log.info("another process has ended the job and queued the request again")
        return self._wait

    async def _finish(self, end: TaskEnd) -> TaskEnd:
        """Keep the end, remove what is left of the job, and release the GPUs."""
        try:
            end = await in_thread(keep_end, self.identity, end)
        except StoreUnavailableError as error:  # the GPUs do not wait for it
            self.log.warning("the end is not kept; if its event is lost, the job runs again: %s", error)
        if end.state is EndState.JOB_ENDED and end.exit_code in BY_SIGNAL:
            await self._lease.wait_for_stopper()
        entry = await self._lease.newest()
        was_gone = entry is None
        if entry is not None and entry["state"] != "WAITING":
            self._lease.allocation = entry
            if self._lease.token == end.fencing_token:
                outcome = Outcome.SUCCESS if end.has_succeeded else Outcome.FAILED
                is_lost = end.state is EndState.JOB_UNREACHABLE  # it was waited for already
                patience_s = 0.0 if is_lost else self._plan.unreachable_s
                why = await self._lease.release(outcome, patience_s, reason=end.reason)
                if why and end.has_succeeded:  # it would be done a second time
                    self.log.warning("the job has succeeded; %s", why)
                elif why:
                    end = TaskEnd(state=EndState.FAILED, detail=why)
                was_gone = self._lease.was_gone
        if was_gone:  # as after a user ended the task: the listener may have dropped an end before this one
            await in_thread(drop_unwanted, self.identity)
        if was_gone and end.state is EndState.JOB_ENDED and not end.has_succeeded:
            who = await self._lease.ended_by()
            if not who.endswith(f": {end.reason}"):  # else another trigger of this task did
                end = end.model_copy(update={"detail": who})
        return end

    # ---- what the steps are made of ----

    async def _request(self) -> Submission | TaskEnd:
        """Return the task's lease or pending request, or its end if another trigger has ended it."""
        status = await self._lease.newest()
        if status is None and (end := await self._known_end()) is not None:  # kept before the release
            return end
        return await self._lease.request(status, self._notes.attempt)

    async def _known_end(self) -> TaskEnd | None:
        """Return the end that a trigger of this task has kept, which then is this one's."""
        end = await self.outlast(lambda: in_thread(kept_end, self.identity))
        return None if end is None or end.fencing_token <= self.after_token else end

    async def _before_s(self, status: QueueEntry) -> float:
        """Return the time from the request's arrival to this wait: that of jobs that were preempted."""
        restarts = restarts_of(status["labels"])
        if restarts != self._notes.restarts:
            await self._notes.keep(restarts=restarts, before_s=status["waited_s"])
        return self._notes.before_s

    def _jobs(self, gang: GangJob) -> list[Job]:
        """Return what the members of the lease run."""
        return [self._plan.job.job(job, self._lease.allocation) for job in gang.jobs]

    async def _gives_back(self, gang: GangJob | None) -> bool:
        """Queue the request again if its job would run into maintenance; return False if it may begin.

        It may have begun before. Raises `LauncherError` if that is unknown.
        """
        why = late_start(await self.ask(lambda manager: manager.maintenance()), self._lease.allocation)
        if not why or (gang is not None and not await self._lease.launch(gang.is_absent)):
            return False
        self.log.warning("%s", why)
        await self._lease.queue_again(gang, Outcome.NOT_STARTED)
        return True

    def _say_where(self, gang: GangJob) -> None:
        lease = self._lease.allocation
        has_ranks = is_gang(lease)
        for member, job in zip(lease["members"], gang.jobs, strict=True):
            self.log.info(
                "%sallocated %s and %s of %s; job %s",
                f"rank {job.rank}: " if has_ranks else "",
                numbered_gpus(member["gpu_ids"]),
                counted(member["cpu_count"], "CPU"),
                member["server_name"],
                job.key,
            )
        if has_ranks:
            name = shlex.quote(lease["task_id"])
            self.log.info(
                "this log is of rank 0; of others, while the job runs: gpu-manager logs -f --rank N %s", name
            )

    async def _not_started(self, error: LauncherError, failed_nodes: Sequence[str] = ()) -> Step | TaskEnd:
        """End the try; a gang that can be stopped and released starts again after a pause instead.

        The next lease avoids the servers on which the job is known not to have started. What a server out of
        reach may still run stays quarantined.
        """
        lease = self._lease.allocation
        starts_again = is_gang(lease)
        if lease["job_places"] and not starts_again and isinstance(error, LauncherUnreachableError):
            return TaskEnd(state=EndState.JOB_UNREACHABLE, detail=f"{error}; {GPUS_STAY_ALLOCATED}")
        nodes = failed_nodes or ([error.server] if error.server else [])
        why: dict[str, Any] = {"reason": as_reason(error), "failed_nodes": nodes}
        if kept := await self._lease.release(Outcome.FAILED, **why):
            return TaskEnd(state=EndState.FAILED, detail=kept)
        attempt, attempts = self._notes.attempt, self._plan.start_attempts
        if not starts_again or attempt >= attempts:
            detail = str(error)
            if starts_again:
                detail = f"the gang did not start in {attempt} attempts (start_attempts): {error}"
            return TaskEnd(state=EndState.NOT_STARTED, detail=detail)
        pause_s = START_PAUSE_S * 2 ** (attempt - 1)
        self.log.warning(
            "start %s of %s failed, queueing again in %g s: %s", attempt, attempts, pause_s, error
        )
        await self._notes.keep(attempt=attempt + 1)
        await asyncio.sleep(pause_s)
        return self._wait

    async def _watch_jobs(self, gang: GangJob, started_at: float | None = None) -> JobWatch:
        """Watch the jobs of the lease, which were started at that time or, if it is None, before."""
        if self._watch is not None:
            await self._watch.close()
        started_at = started_at or self._lease.allocation["granted_at"]
        due_s = self._lease.renewal_due_s
        self._watch = JobWatch(self, self._plan, self._notes, gang.jobs, started_at, due_s)
        await self._watch.recall()
        return self._watch

    async def _copy_rest(self, gang: GangJob) -> str:
        """Copy the rest of the jobs' output to the log; return its last line."""
        watch = self._watch
        if watch is None or watch.jobs[0].fencing_token != self._lease.token:
            watch = await self._watch_jobs(gang)
        return await watch.copy_rest()

    async def _lost(self) -> Step | TaskEnd:
        """Find out why the lease is gone; its GPUs may be another task's, so its job is stopped first."""
        if (end := await self._known_end()) is not None:  # another trigger of this task released it
            return partial(self._finish, end)
        self.log.error("%s; stopping the job", LEASE_GONE)
        gang = GangJob.of(self._lease.allocation)
        stopped = None if gang is None else await self._lease.launch(gang.stop)
        for problem in () if stopped is None else stopped.left.values():
            self.log.error("a job without a lease may still run: %s", problem)
        entry = await self._lease.newest()
        if entry is not None:
            if entry["state"] == "WAITING" or not self._lease.is_still(entry):
                return self._wait
            if entry["preempted_by"] is not None:
                return self._wait
            if entry["revoked"]:
                await self._lease.release(Outcome.CANCELLED)
        who = await self._lease.ended_by() if entry is None else ""
        return TaskEnd(state=EndState.LEASE_LOST, detail=who)
