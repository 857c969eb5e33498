"""Watch over the job of one member of a lease, for the trigger that watches them all."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

from resource_manager.airflow.task_trigger.place_watch import PlaceWatch
from resource_manager.airflow.version_compat import in_thread
from resource_manager.jobs.launchers import (
    JobState,
    JobStatus,
    Launcher,
    LauncherError,
    LauncherUnreachableError,
    NoAnswerError,
)
from resource_manager.jobs.running_job import RunningJob

T = TypeVar("T")

READ_S = 5.0
"""Longest time that a job's output is read before its lease, timeout and state are checked again."""


class MemberWatch:
    """State of a member's job when it was last reached; with `copies_log` its output goes to the trigger's.

    Its launcher is used by one thread at a time, of those of its place.
    """

    def __init__(self, job: RunningJob, log: Any, *, copies_log: bool) -> None:
        self.job = job
        self.place = PlaceWatch.of(job.place)
        self.status = JobStatus(JobState.RUNNING)
        self.silent_s = 0.0
        """For so long the server has not answered, as far as this process ran."""
        self.problem = ""
        self.offset = 0
        self.last_line = ""
        self.look: asyncio.Task[None] | None = None
        self._unread_end: JobStatus | None = None
        self._log = log
        self._copies_log = copies_log
        self._launcher: Launcher | None = None
        self._pending: asyncio.Future[Any] | None = None

    @property
    def has_ended(self) -> bool:
        return self.status.state is not JobState.RUNNING

    @property
    def has_failed(self) -> bool:
        """Return whether the job ended with another exit code than 0, or vanished without one."""
        return self.has_ended and self.status.exit_code != 0

    @property
    def is_silent(self) -> bool:
        """Return whether the server did not answer, or has not answered yet."""
        return bool(self.problem) or self.look is not None

    def begin_look(self) -> None:
        """Look at the job in a task of its own, unless it has ended or is being looked at."""
        if self.look is None and not self.has_ended:
            self.look = asyncio.create_task(self._look_once())

    def end_look(self) -> None:
        """Take the end of the look, if it is over; raises what is not an unreachable server."""
        if self.look is not None and self.look.done():
            look, self.look = self.look, None
            look.result()

    async def _look_once(self) -> None:
        try:
            if self._copies_log:
                status = await self._copy_log()
            else:
                status = await self._call(lambda launcher: launcher.status(self.job.key))
        except LauncherUnreachableError as error:
            self.problem = str(error)
            self._log.warning("the job's state is unknown, it may still run: %s", error)
            return
        self.status, self.problem = status, ""

    async def _copy_log(self) -> JobStatus:
        """Copy the job's new output to the log; return its status, for which all output is there.

        A job that prints faster than this reads is taken for running after `READ_S`, and its lease renewed.
        """
        clock = asyncio.get_running_loop().time
        until = clock() + READ_S
        while clock() < until:
            try:
                output = await self._call(lambda launcher: launcher.logs(self.job.key, self.offset))
            except NoAnswerError:
                raise
            except LauncherUnreachableError as error:
                status = await self._call(lambda launcher: launcher.status(self.job.key))
                if status.state is not JobState.RUNNING:
                    self._unread_end = status
                    raise  # its end is taken with all that it said, as long as that may come
                self._log.warning("the job runs, but its output does not come: %s", error)
                return status
            is_over = output.is_all or output.offset == self.offset
            self.offset = output.offset
            for line in output.text.splitlines():
                self._log.info("%s", line)
                self.last_line = line if line.strip() else self.last_line
                await asyncio.sleep(0)  # lets other triggers run between the lines of a long output
            if is_over:
                return output.status
        return JobStatus(JobState.RUNNING)

    def give_up_output(self) -> None:
        """Take the end of a job whose output does not come, if it is known to have ended."""
        if self._unread_end is not None:
            self._log.error("the job has ended, and the rest of its output is not here: %s", self.problem)
            self.status, self.problem, self.last_line = self._unread_end, "", ""

    async def tail(self, lines: int, width: int = 500) -> list[str]:
        """Return the last lines of the output, each cut to `width` characters; none if it cannot be read."""
        try:
            text = await self._call(lambda launcher: launcher.tail(self.job.key))
        except LauncherError:
            return []
        return [line[:width] for line in text.splitlines() if line.strip()][-lines:]

    async def terminate(self, grace_s: float) -> None:
        """End the job, whose log stays; raises `LauncherError`."""
        await self._call(lambda launcher: launcher.terminate(self.job.key, grace_s))

    async def close(self) -> None:
        """Close the launcher after the call that it carries out: a thread outlives its cancelled trigger."""
        if self.look is not None:
            self.look.cancel()
        if self._pending is not None:
            await asyncio.wait([self._pending])
        if self._launcher is not None:
            await in_thread(self._launcher.close, executor=self.place.threads)

    async def _call(self, act: Callable[[Launcher], T]) -> T:
        def call() -> T:
            if self._launcher is None:
                self._launcher = self.job.open()
            return act(self._launcher)

        self._pending = asyncio.ensure_future(in_thread(call, executor=self.place.threads))
        return await asyncio.shield(self._pending)
