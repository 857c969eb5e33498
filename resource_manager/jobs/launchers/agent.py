"""Launcher whose jobs the agent of a server runs: it says what should be, and reads what the agent reports.

Nothing is called on the server: an agent only connects outward. So the address of a job's place is the name
of its server.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from resource_manager.core.models import JobPlace
from resource_manager.errors import BusyError, ResourceManagerError, is_outage
from resource_manager.jobs.launchers.base import (
    ANSWER_TIMEOUT_S,
    TAIL_BYTES,
    Job,
    JobState,
    JobStatus,
    LauncherError,
    LauncherUnreachableError,
    Output,
    check_image,
)
from resource_manager.jobs.launchers.directory_launcher import (
    failure,
    kind_of_failure,
    output_of,
    refusal,
    spec_of,
    status_of,
)
from resource_manager.manager.agent_jobs import (
    STARTS,
    UNKNOWN_RUN,
    AgentSilentError,
    AgentState,
    is_there,
    opened_service,
)
from resource_manager.manager.patience import ASK_AGAIN_S, patiently

T = TypeVar("T")

LOOK_S, MAX_LOOK_S = 0.05, 0.4
"""Shortest and longest pause between two looks whether an agent has done what it was to do."""

BUSY_S = 300.0
"""Time for which there may be no room for a call, or an order, of this caller, whose lease is renewed."""

ABSENT = {"state": "absent", "preempted": False, **dict.fromkeys(("exit_code", "ended_at", "checkpoint_at"))}


class AgentLauncher:
    """Launcher of jobs by the agent of a server, asked by the lease service that this process opened."""

    def __init__(self, place: JobPlace) -> None:
        self.server = place.address
        self._place = place

    def prepare(self, job: Job) -> JobPlace:
        check_image("agent", job)
        place = _once_there_is_room(lambda: self._state(ANSWER_TIMEOUT_S))["place"]
        assert place is not None
        run = self._ordered(job.key, "prepare", spec=spec_of(job))
        self._place = JobPlace("agent", self.server, **place, walls=run["walls"])
        return self._place

    def start(self, job: Job) -> bool:
        check_image("agent", job)
        return bool(self._ordered(job.key, "run", spec=spec_of(job))["began"])

    def status(self, key: str) -> JobStatus:
        return status_of(self._run(key))

    def logs(self, key: str, offset: int = 0) -> Output:
        return output_of(self._output(key, offset))

    def tail(self, key: str) -> str:
        return str(self._output(key, -TAIL_BYTES)["text"])

    def terminate(self, key: str, grace_s: float = 10.0) -> None:
        self._ordered(key, "terminate", grace_s=grace_s)

    def preempt(self, key: str, grace_s: float, signal_name: str = "TERM", wait_s: float = 0.0) -> JobStatus:
        run = self._ordered(key, "preempt", grace_s=grace_s, signal=signal_name)
        ends_at, pause_s = time.monotonic() + wait_s, LOOK_S
        while run["state"] == JobState.RUNNING and time.monotonic() < ends_at:
            time.sleep(pause_s)
            run, pause_s = self._run(key), min(2 * pause_s, MAX_LOOK_S)
        return status_of(run)

    def stop(self, key: str, grace_s: float = 10.0) -> bool:
        ran = bool(self._run(key)["state"] == JobState.RUNNING)
        self._ordered(key, "stop", grace_s=grace_s)
        return ran

    def running(self) -> list[str]:
        may_run = (JobState.RUNNING, UNKNOWN_RUN["state"])
        return [key for key, run in self._state()["runs"].items() if run["state"] in may_run]

    def close(self) -> None:
        """Do nothing: there is no connection."""

    def _state(self, wait_s: float = 0.0) -> AgentState:
        """Return what the agent said last; raises `LauncherUnreachableError` if that is not of now.

        A report that is late is waited for so long: on a busy service one may take longer than it lives.
        """
        ends_at = time.monotonic() + wait_s
        while (state := _answer_of(lambda: opened_service().agent_state(self.server)))["is_silent"]:
            if time.monotonic() >= ends_at or not state.get("has_reported"):
                raise LauncherUnreachableError(
                    f"the agent of {self.server} is silent: what it runs is unknown"
                ) from (AgentSilentError() if state.get("has_reported") else None)
            time.sleep(ASK_AGAIN_S)
        place = state["place"]
        if place is None:  # a job that is placed was begun by another agent there, and may go on
            raise (LauncherUnreachableError if self._place.machine else LauncherError)(
                f"the agent of {self.server} runs no jobs: start gpu-manager agent --run-jobs there, or set "
                "another launcher"
            )
        if self._place.machine and not is_there(place, self._place):
            raise LauncherUnreachableError(
                f"the job is in {self._place.folder} of {self._place.machine}, but the agent of "
                f"{self.server} has {place['folder']} of {place['machine']}"
            )
        return state

    def _run(self, key: str, wait_s: float = 0.0) -> Mapping[str, Any]:
        run = self._state(wait_s)["runs"].get(key, ABSENT)
        if run == UNKNOWN_RUN:
            raise LauncherUnreachableError(
                f"job {key} of {self.server} is unknown to this caller: its owner or an operator may ask"
            )
        return run

    def _output(self, key: str, offset: int) -> dict[str, Any]:
        self._state()
        found = _answer_of(lambda: opened_service().job_output(self.server, key, offset))
        if "error" in found:
            raise LauncherUnreachableError(f"the output of job {key} cannot be read: {found['error']}")
        return found

    def _ordered(self, key: str, want: str, **order: Any) -> Mapping[str, Any]:
        """Have the agent do something, and return the job's state once it has; raises `LauncherError`.

        It is ordered again where there was no room for it: the agent does it once.
        """
        return _once_there_is_room(lambda: self._ordered_once(key, want, **order))

    def _ordered_once(self, key: str, want: str, *, grace_s: float = 0.0, **order: Any) -> Mapping[str, Any]:
        """Order something; a later order for the same thing, by another process, does as well."""
        failed = failure(want, key, self.server)
        wait_s = ANSWER_TIMEOUT_S if want in STARTS else 0.0
        before = self._run(key, wait_s).get("n")  # after the clock was set back it may be the greater number
        asked = {**order, "want": want, "grace_s": grace_s}
        number = _answer_of(lambda: opened_service().order_job(self.server, key, asked))
        ends_at, pause_s = time.monotonic() + ANSWER_TIMEOUT_S + grace_s, LOOK_S
        while (n := (run := self._run(key, wait_s)).get("n")) is None or n == before or n < number:
            if time.monotonic() > ends_at:
                raise LauncherUnreachableError(f"{failed}: its agent does not answer")
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, MAX_LOOK_S)
        if run["want"] != want:
            raise LauncherUnreachableError(f"{failed}: another process had it {run['want']}")
        if run["refusal"]:
            raise refusal(run["refusal"], str(run["error"]), failed)
        if run["error"] is not None:
            raise kind_of_failure(want)(f"{failed}: {run['error']}")
        return run


def _once_there_is_room(call: Callable[[], T]) -> T:
    """Return what a call gives, made again while service or store has no room for one more of this caller."""
    return patiently(call, BUSY_S, may_pass=lambda error: is_outage(error, BusyError))


def _answer_of(call: Callable[[], T]) -> T:
    """Return the service's answer; raises `LauncherUnreachableError` for its errors."""
    try:
        return call()
    except LauncherError:
        raise
    except ResourceManagerError as error:
        raise LauncherUnreachableError(str(error)) from error
