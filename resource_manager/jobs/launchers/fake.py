"""Launcher for tests of DAGs: it records jobs instead of running them, and ends them as the test says."""

from __future__ import annotations

import signal
from dataclasses import dataclass, replace

from resource_manager.core.models import JobPlace
from resource_manager.jobs.launchers.base import (
    TAIL_BYTES,
    AlreadyEndedError,
    Job,
    JobState,
    JobStatus,
    Output,
    check_image,
)
from resource_manager.jobs.launchers.devices import job_environment

ENDED = JobStatus(JobState.FINISHED, 0)


@dataclass(frozen=True, slots=True)
class _Answer:
    """Status and output of the jobs whose command line contains `text`."""

    text: str
    status: JobStatus = ENDED
    output: str = ""


class FakeLauncher:
    """Launcher that runs nothing: a job ends at once with exit code 0 and no output unless told otherwise.

    `jobs` are the jobs in the order of their start, each with the whole environment that it would have;
    `stopped` are those that were stopped while they ran. What was told last applies first.
    """

    def __init__(self) -> None:
        self.jobs: list[Job] = []
        self.stopped: list[Job] = []
        self._answers = [_Answer("")]
        self._present: dict[str, _Answer] = {}
        self._ended: set[str] = set()

    def ends(self, command: str = "", *, exit_code: int | None = 0, output: str = "") -> None:
        """Let the jobs whose command line contains `command` write `output` and end at once.

        An `exit_code` of None is that of a job that was killed, or whose server restarted.
        """
        self._answers.append(_Answer(command, JobStatus(JobState.FINISHED, exit_code), output))

    def runs(self, command: str = "", *, output: str = "") -> None:
        """Let the jobs whose command line contains `command` write `output` and run until stopped."""
        self._answers.append(_Answer(command, JobStatus(JobState.RUNNING), output))

    def prepare(self, job: Job) -> JobPlace:
        launcher = job.labels.get("launcher", "")
        check_image(launcher, job)
        self._refuse_ended(job.key)
        return JobPlace(launcher, machine="fake")

    def start(self, job: Job) -> bool:
        check_image(job.labels.get("launcher", ""), job)
        self._refuse_ended(job.key)
        job = replace(job, environment=job_environment(job))
        if job.key in self._present:
            return False
        line = " ".join(job.command)
        self._present[job.key] = next(each for each in reversed(self._answers) if each.text in line)
        self.jobs.append(job)
        return True

    def status(self, key: str) -> JobStatus:
        answer = self._present.get(key)
        return JobStatus(JobState.ABSENT) if answer is None else answer.status

    def logs(self, key: str, offset: int = 0) -> Output:
        answer = self._present.get(key)
        output = b"" if answer is None else answer.output.encode()
        return Output(output[offset:].decode(), max(offset, len(output)), self.status(key))

    def tail(self, key: str) -> str:
        return self.logs(key).text[-TAIL_BYTES:]

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        answer = self._present.get(key)
        if answer is not None and answer.status.state is JobState.RUNNING:
            self.stopped.append(next(job for job in reversed(self.jobs) if job.key == key))
            self._present[key] = replace(answer, status=JobStatus(JobState.FINISHED, 128 + signal.SIGTERM))

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        """End a job that runs at once, as one that does nothing on the signal."""
        if self.status(key).state is JobState.RUNNING:
            self.terminate(key)
            self._present[key] = replace(self._present[key], status=replace(self.status(key), preempted=True))
        return self.status(key)

    def _refuse_ended(self, key: str) -> None:
        if key in self._ended:
            raise AlreadyEndedError(f"job {key} has ended already; it is not started again")

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        self._ended.add(key)
        ran = self.status(key).state is JobState.RUNNING
        self.terminate(key, grace_s)
        self._present.pop(key, None)
        return ran

    def running(self) -> list[str]:
        return [key for key, answer in self._present.items() if answer.status.state is JobState.RUNNING]

    def close(self) -> None:
        """Do nothing: there is no connection."""
